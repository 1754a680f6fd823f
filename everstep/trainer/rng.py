"""Random state: keyed seeds, the three global generators (Python, NumPy, torch), and keeping them undisturbed."""

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_CPU = torch.default_generator
_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """64 well mixed bits that depend on every part and their order (SplitMix64, Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ part) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_all(key: int) -> None:
    """Seed everything, the devices too."""
    torch.manual_seed(key & (_MASK >> 1))
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the user's code may use the global generator
    random.seed(key)


def seed_sample(key: int) -> None:
    """Seed the three global generators on the CPU; takes about 6 microseconds, where `torch.manual_seed` takes 100."""
    _CPU.manual_seed(key & (_MASK >> 1))
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
    random.seed(key)


def capture() -> dict[str, Any]:
    """The state of all generators of this process, as tensors and plain values."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _CPU.get_state(),
        "numpy": _numpy_state(),
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` took. States of CUDA devices that are not here are left out."""
    _CPU.set_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if torch.cuda.is_available():
        for device, one in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


@contextmanager
def forked(key: int | None = None) -> Iterator[None]:
    """Within, the generators may be used freely (seeded with `key` if given); after, they are as before."""
    before = capture()
    try:
        if key is not None:
            seed_all(key)
        yield
    finally:
        restore(before)


def _numpy_state() -> dict[str, Any]:
    return dict(np.random.get_state(legacy=False))  # noqa: NPY002


class Aside:
    """Lends the CPU generators to a data set for a moment and puts them back, in about 15 microseconds.

    NumPy's part would take 75: its state is copied value by value. So its generator is exchanged instead. An exchange
    forgets the second normal number that NumPy's legacy functions keep; there can be one only if the program has drawn
    from the generator since it was looked at last, and then the slow way is taken.
    """

    def __init__(self) -> None:
        self._own = np.random.MT19937(0)
        self._seen: tuple[int, int, int] | None = None
        self._torch = _CPU.get_state()
        self._python = random.getstate()
        self._bits: Any = None
        self._slow: Any = None

    def __enter__(self) -> None:
        self._torch = _CPU.get_state()
        self._python = random.getstate()
        self._bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._slow = None if self._is_clean() else np.random.get_state(legacy=False)  # noqa: NPY002
        np.random.set_bit_generator(self._own)  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        np.random.set_bit_generator(self._bits)  # type: ignore[attr-defined]
        if self._slow is not None:
            np.random.set_state(self._slow)  # noqa: NPY002
            self._remember()
        random.setstate(self._python)
        _CPU.set_state(self._torch)

    def _is_clean(self) -> bool:
        return self._seen is not None and self._seen == _position(self._bits)

    def _remember(self) -> None:
        self._seen = None if self._slow["has_gauss"] else _position(self._bits)


def _position(bits: Any) -> tuple[int, int, int] | None:
    """Where a Mersenne Twister stands: which one, its index, and the first word, which changes as the index wraps."""
    if type(bits) is not np.random.MT19937:
        return None
    address = bits.ctypes.state_address
    return address, ctypes.c_int32.from_address(address + 2496).value, ctypes.c_uint32.from_address(address).value
