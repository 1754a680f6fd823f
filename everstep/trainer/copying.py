"""The bytes of one snapshot on their way from the living state into a buffer.

Small tensors, buffers of the model and whatever the program may change in its forward pass are copied at once. Parameters
and the optimizer's state change in `optimizer.step()` only: they may be copied while the next forward and backward pass
run, if the copy is complete before that step. Several threads take the pieces, the training thread among them when it
would have to wait anyway. `memmove` lets go of the interpreter's lock, so a copy in another thread stalls nobody.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from everstep.trainer.buffers import Buffer
from everstep.trainer.snapshot import Placed

PIECE = 16 << 20  # about 4 ms: long against taking the interpreter's lock, short against a step
SMALL = 1 << 16

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

Parts = Iterable[tuple[Placed, Tensor]]


class Copying:
    """See the module. Holds on to the tensors, so that no allocator reuses their memory meanwhile."""

    def __init__(self, buffer: Buffer, parts: Parts, may_wait: Callable[[Placed, Tensor], bool]) -> None:
        self._buffer = buffer
        self._later: list[tuple[Placed, Tensor]] = []
        now: list[tuple[Placed, Tensor]] = []
        for placed, tensor in parts:
            waits = placed.size >= SMALL and may_wait(placed, tensor)
            (self._later if waits else now).append((placed, tensor))
        self._versions = [_version(tensor) for _, tensor in self._later]
        self._event: Any = None
        self._cuda = any(tensor.device.type == "cuda" for _, tensor in (*now, *self._later))
        self._pieces: list[Callable[[], object]] = []
        self._turn = count()
        self._left = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._sealed = threading.Event()
        self.torn = False
        self._begin(now)

    @property
    def later_bytes(self) -> int:
        """Bytes that may be copied beside the next forward and backward pass."""
        return sum(placed.size for placed, _ in self._later)

    @property
    def is_complete(self) -> bool:
        """Whether nobody has to wait for it any more."""
        return self._sealed.is_set()

    def help(self) -> None:
        """Copy pieces until none is left to begin."""
        while (index := next(self._turn)) < len(self._pieces):
            self._pieces[index]()
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if last:
                self._close()

    def join(self) -> None:
        """Copy what is left and wait for what others copy. On a GPU: have its stream wait, not this thread."""
        self.help()
        self._over.wait()
        if self._event is not None and not self._sealed.is_set():
            torch.cuda.current_stream().wait_event(self._event)
            self._seal()

    def wait(self) -> None:
        """Wait until all bytes are there, and until it is known whether they belong together; for the saver's thread."""
        self._sealed.wait()
        if self._event is not None:
            self._event.synchronize()

    def is_still_equal(self) -> bool:
        """Whether the bytes that could have waited are, now, what was copied: nothing changed them since."""
        return all(
            _memcmp(self._buffer.address + placed.begin, tensor.data_ptr(), placed.size) == 0
            for placed, tensor in self._later
            if tensor.device.type == "cpu" and tensor.is_contiguous()
        )

    def _begin(self, now: list[tuple[Placed, Tensor]]) -> None:
        if self._cuda:
            self._on_stream(now)
            self._close()
            return
        for placed, tensor in now:
            for piece in self._moves(placed, tensor):
                piece()
        self._pieces = [piece for placed, tensor in self._later for piece in self._moves(placed, tensor)]
        self._left = len(self._pieces)
        if not self._pieces:
            self._close()

    def _moves(self, placed: Placed, tensor: Tensor) -> list[Callable[[], object]]:
        """Calls that copy one tensor, each a piece of it."""
        if not placed.size:
            return []
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return [_Laying(self._view(placed, tensor), tensor)]
        target, source = self._buffer.address + placed.begin, tensor.data_ptr()
        return [_Move(target + at, source + at, min(PIECE, placed.size - at)) for at in range(0, placed.size, PIECE)]

    def _on_stream(self, now: list[tuple[Placed, Tensor]]) -> None:
        """Copies by the GPU's own engine, on a stream of their own; the training's stream waits for the first part only."""
        main = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for placed, tensor in now:
                self._view(placed, tensor).copy_(tensor, non_blocking=True)
            first = side.record_event()
            for placed, tensor in self._later:
                self._view(placed, tensor).copy_(tensor, non_blocking=True)
            self._event = side.record_event()
        main.wait_event(first)

    def _view(self, placed: Placed, tensor: Tensor) -> Tensor:
        place = self._buffer.bytes[placed.begin : placed.begin + placed.size]
        return place.view(tensor.dtype).view(tensor.shape)

    def _close(self) -> None:
        """All is copied; on a GPU, all copies have been asked for, and `join` seals them."""
        self._over.set()
        if self._event is None:
            self._seal()

    def _seal(self) -> None:
        """What was changed meanwhile cannot be told from what was not: the snapshot is torn then."""
        self.torn = any(_version(tensor) != was for (_, tensor), was in zip(self._later, self._versions, strict=True))
        self._sealed.set()


class _Move:
    """One memmove."""

    def __init__(self, target: int, source: int, size: int) -> None:
        self._move = target, source, size

    def __call__(self) -> None:
        ctypes.memmove(*self._move)


class _Laying:
    """One copy that lays a tensor's elements in order, or brings them from another device."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = target, source

    def __call__(self) -> None:
        self._target.copy_(self._source)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place. A tensor made under inference mode does not count it."""
    return -1 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - there is no public name for it
