"""The stand-in NVML from Python: a node with GPUs that any process may see, and that any process may harm."""

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from everstep.sim.nvml import build, layout
from everstep.store import atomic

NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
UNKNOWN = 999
XID_EVENT = 8
NO_INSTANCE = 0xFFFFFFFF

STATE_VARIABLE = "EVERSTEP_NVML_STATE"


@dataclass
class _Gpu:
    texts: dict[str, str]
    values: dict[str, int] = field(default_factory=lambda: dict(layout.VALUES))
    status: dict[str, int] = field(default_factory=dict)
    delay: dict[str, int] = field(default_factory=dict)


@dataclass
class _State:
    """What lies in the file. Record 0 is the system's, `order` numbers the records that nvmlInit lists, from 1."""

    records: list[_Gpu]
    order: list[int]
    texts: dict[str, str]
    cuda: int = 13000
    locked: int = 0

    def pack(self) -> bytes:
        order = [*self.order, *([0] * (layout.GPUS - len(self.order)))]
        texts = (self.texts.get(name, "").encode() for name in layout.SYSTEM_TEXTS)
        head = layout.HEADER.pack(
            layout.MAGIC, layout.digest(), len(self.order), self.cuda, self.locked, 0, *order, *texts
        )
        return head + b"".join(_pack(one) for one in self.records)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        magic, digest, count, cuda, locked, _, *rest = layout.HEADER.unpack_from(data)
        if (magic, digest) != (layout.MAGIC, layout.digest()):
            raise ValueError("the state of the stand-in NVML is of another version; make a new one.")
        texts = dict(zip(layout.SYSTEM_TEXTS, map(_text, rest[layout.GPUS :]), strict=True))
        records = [_unpack(one) for one in layout.RECORD.iter_unpack(data[layout.HEADER.size :])]
        return cls(records, rest[:count], texts, cuda, locked)


class FakeNvml:
    """A node of `gpus` GPUs whose state is the file `folder/state`.

    GPUs are named by the number they had when the node was made, whatever the driver calls them later. Each change is
    one atomic step; several processes may hold the same folder (`FakeNvml.at(folder)`).
    """

    def __init__(self, folder: Path, gpus: int = 8, name: str = "NVIDIA H100 80GB HBM3") -> None:
        if not 0 <= gpus <= layout.GPUS:
            raise ValueError(f"gpus: {gpus} is not between 0 and {layout.GPUS}.")
        self._hold(folder)
        folder.mkdir(parents=True, exist_ok=True)
        made = [_gpu(number, name) for number in range(layout.GPUS)]
        texts = {"driver": "580.95.05", "nvml": "13.580.95.05"}
        atomic.write(self.events, b"", sync=False)
        self._write(_State([_Gpu({}), *made], list(range(1, gpus + 1)), texts))

    @classmethod
    def at(cls, folder: Path) -> Self:
        """The node whose state another process has made in `folder`."""
        self = cls.__new__(cls)
        self._hold(folder)
        if not self.state.exists():
            raise ValueError(f"{folder}: holds no state of a stand-in NVML.")
        return self

    def _hold(self, folder: Path) -> None:
        self.library = build.library()
        self.folder = folder
        self.state = folder / "state"
        self.events = folder / "state.events"

    # how processes come to see it

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process finds the stand-in in place of the driver's library."""
        before = os.environ.get("LD_LIBRARY_PATH", "")
        paths = [str(self.library.parent), *(part for part in before.split(":") if part)]
        return {"LD_LIBRARY_PATH": ":".join(dict.fromkeys(paths)), STATE_VARIABLE: str(self.state)}

    def preload(self) -> None:
        """Let this process, started without `environment`, see it: to be called before nvmlInit, once is enough.

        The loader then answers to the library's name with the one that is loaded already.
        """
        ctypes.CDLL(str(self.library), ctypes.RTLD_GLOBAL)
        os.environ[STATE_VARIABLE] = str(self.state)

    # what a GPU reads

    def uuid(self, gpu: int) -> str:
        return self._read().records[gpu + 1].texts["uuid"]

    def bus(self, gpu: int) -> str:
        return self._read().records[gpu + 1].texts["bus"]

    def set(self, gpu: int | None = None, **values: int) -> None:
        """Change readings of a GPU, or of all: names and units as in `layout.VALUES`."""
        unknown = sorted(set(values) - set(layout.VALUES))
        if unknown:
            raise ValueError(f"{unknown[0]} is no reading of a GPU; those are in everstep.sim.nvml.layout.")
        with self._change() as state:
            for one in self._of(state, gpu):
                one.values.update(values)

    def train(self, gpu: int | None = None) -> None:
        """Readings of a GPU that is busy training, and healthy."""
        self.set(
            gpu,
            utilisation=98,
            memory_utilisation=61,
            memory_used=71 * layout.GIB,
            temperature=63,
            memory_temperature=78,
            headroom=24,
            power=655_000,
            sm_clock=1755,
            reasons=4,
        )

    def processes(self, gpu: int, held: dict[int, int]) -> None:
        """The processes on a GPU: bytes by pid; -1 bytes are "not available"."""
        values = {"processes": len(held)}
        for number, (pid, memory) in enumerate(held.items()):
            values |= {f"process_pid_{number}": pid, f"process_memory_{number}": memory}
        self.set(gpu, **values)

    def mig(self, gpu: int, slices: tuple[int, ...]) -> None:
        """Split a GPU into MIG instances of so many slices; none: whole again."""
        values = {"mig": int(bool(slices)), "mig_pending": int(bool(slices)), "instances": len(slices)}
        for number, size in enumerate(slices):
            values |= {f"instance_slices_{number}": size, f"instance_total_{number}": size * 10 * layout.GIB}
        self.set(gpu, **values)

    # what goes wrong

    def xid(self, gpu: int, code: int, *, times: int = 1, gpu_instance: int = NO_INSTANCE) -> None:
        """The driver reports an XID, to whoever listens."""
        one = layout.EVENT.pack(gpu + 1, 0, XID_EVENT, code, gpu_instance, NO_INSTANCE)
        with self.events.open("ab") as file:
            file.write(one * times)

    def lose(self, gpu: int, *, lost: bool = True) -> None:
        """The GPU falls off the bus: every call about it is answered with NVML_ERROR_GPU_IS_LOST."""
        self.set(gpu, lost=int(lost))

    def remove(self, gpu: int) -> None:
        """The GPU is gone: lost to those who hold it; who comes later does not see it and counts the others anew."""
        with self._change() as state:
            state.records[gpu + 1].values["present"] = 0
            state.order = [one for one in state.order if one != gpu + 1]

    def order(self, *gpus: int) -> None:
        """Whoever initialises from now on sees these GPUs, in this order."""
        with self._change() as state:
            state.order = [one + 1 for one in gpus]
            for one in gpus:
                state.records[one + 1].values["present"] = 1

    def fail(self, *calls: str, gpu: int | None = None, error: int = NOT_SUPPORTED) -> None:
        """Calls, or signals (`layout.SIGNALS`), answer with this NVML error; 0 puts them right again."""
        with self._change() as state:
            for one in self._of(state, gpu):
                one.status.update(dict.fromkeys(_calls(calls), error))

    def hang(self, *calls: str, gpu: int | None = None, seconds: float | None = None) -> None:
        """Calls or signals do not answer for so long; None: until `answer`."""
        self._delay(calls, gpu, layout.FOREVER if seconds is None else int(seconds * 1000))

    def hang_in_kernel(self, *calls: str, path: Path, gpu: int | None = None) -> None:
        """Calls or signals look at `path`: where it lies on a mount that hangs, nobody can kill the process."""
        with self._change() as state:
            state.texts["stuck"] = str(path)
        self._delay(calls, gpu, layout.UNINTERRUPTIBLE)

    def answer(self, *calls: str, gpu: int | None = None) -> None:
        """Calls or signals answer again; without any, all do."""
        self._delay(calls or layout.CALLS, gpu, 0)

    def system(self, call: str, *, error: int = 0, seconds: float | None = 0.0) -> None:
        """A call that is about no GPU (nvmlInit, nvmlEventSetWait_v2) fails or hangs; None seconds: for ever."""
        with self._change() as state:
            for one in _calls((call,)):
                state.records[0].status[one] = error
                state.records[0].delay[one] = layout.FOREVER if seconds is None else int(seconds * 1000)

    def one_at_a_time(self, *, locked: bool = True) -> None:
        """Calls of one process wait for each other, so that one that hangs stops all."""
        with self._change() as state:
            state.locked = int(locked)

    def unload(self) -> None:
        """The kernel module is gone: nvmlInit says that the driver is not loaded. `load` brings it back."""
        self.state.rename(self.folder / "unloaded")

    def load(self) -> None:
        (self.folder / "unloaded").rename(self.state)

    def _delay(self, calls: tuple[str, ...], gpu: int | None, milliseconds: int) -> None:
        with self._change() as state:
            for one in self._of(state, gpu):
                one.delay.update(dict.fromkeys(_calls(calls), milliseconds))

    @staticmethod
    def _of(state: _State, gpu: int | None) -> list[_Gpu]:
        return state.records[1:] if gpu is None else [state.records[gpu + 1]]

    @contextlib.contextmanager
    def _change(self) -> Iterator[_State]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self._read()
            yield state
            self._write(state)

    def _read(self) -> _State:
        return _State.unpack(self.state.read_bytes())

    def _write(self, state: _State) -> None:
        atomic.write(self.state, state.pack(), sync=False)


def _gpu(number: int, name: str) -> _Gpu:
    texts = {
        "uuid": f"GPU-5e1f00{number:02x}-e5e7-4a11-9b3c-{number + 1:012x}",
        "name": name,
        "serial": f"1650523{number:06d}",
        "bus": f"00000000:{0x1B + 0x11 * (number % 8) + number // 8:02X}:00.0",
    }
    return _Gpu(texts)


def _calls(names: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for name in names:
        if name not in layout.SIGNALS and name not in layout.CALLS:
            raise ValueError(f"{name} is neither a call nor a signal of the stand-in NVML.")
        found += layout.SIGNALS.get(name, (name,))
    return found


def _pack(one: _Gpu) -> bytes:
    return layout.RECORD.pack(
        *(one.texts.get(name, "").encode() for name in layout.TEXTS),
        *(one.values[name] for name in layout.VALUES),
        *(one.status.get(name, 0) for name in layout.CALLS),
        *(one.delay.get(name, 0) for name in layout.CALLS),
    )


def _unpack(parts: tuple[object, ...]) -> _Gpu:
    rest = list(parts)
    texts = {name: _text(rest.pop(0)) for name in layout.TEXTS}
    numbers = [one for one in rest if isinstance(one, int)]
    values, codes = numbers[: len(layout.VALUES)], numbers[len(layout.VALUES) :]
    status, delay = codes[: len(layout.CALLS)], codes[len(layout.CALLS) :]
    return _Gpu(
        texts,
        dict(zip(layout.VALUES, values, strict=True)),
        dict(zip(layout.CALLS, status, strict=True)),
        dict(zip(layout.CALLS, delay, strict=True)),
    )


def _text(raw: object) -> str:
    assert isinstance(raw, bytes)
    return raw.rstrip(b"\0").decode()
