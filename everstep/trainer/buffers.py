"""Shared host buffers: the memory that snapshots are copied into, and that the writer reads.

A buffer is a memfd, not a file in /dev/shm, which is often 64 MB small in containers. There are two at most: one is being
written while the other takes the next snapshot. The second is made only once it is wanted, since a job whose saves are far
apart never needs it. Buffers are reused, and their pages are there before the first snapshot: a copy into fresh memory
costs several times as much.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

MOST = 2
ROOM = 1.25  # a buffer is made if so many times its size is free
MADV_POPULATE_WRITE = 23
POPULATE = 32 << 20

_numbers = count(1)
_libc = ctypes.CDLL(None, use_errno=True)


class Buffer:
    """One block of shared memory. `number` is never used twice in a process; `descriptor` is what a writer maps."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.number = next(_numbers)
        self.size = max(size, mmap.PAGESIZE)
        self.descriptor = os.memfd_create(f"everstep-snapshot-{self.number}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, self.size)  # no memory is told here, not by SIGBUS at the copy
            self._map = mmap.mmap(self.descriptor, self.size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self._populate()
        self._pinned = pinned and _register(self.address, self.size)

    def _populate(self) -> None:
        """Have the pages mapped. A hint: kernels before 5.14 do not know it."""
        for at in range(0, self.size, POPULATE):
            length = ctypes.c_size_t(min(POPULATE, self.size - at))
            _libc.madvise(ctypes.c_void_p(self.address + at), length, MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Give the memory back; nobody may use the buffer any more."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
        os.close(self.descriptor)
        del self.bytes, self._map


class Pool:
    """The buffers of one rank. Taken by the training thread, given back by the saver's."""

    def __init__(self, *, pinned: bool = False, free_memory: Callable[[], int | None] | None = None) -> None:
        self._pinned = pinned
        self._free_memory = free_memory or available
        self._changed = threading.Condition()
        self._idle: list[Buffer] = []
        self._all: list[Buffer] = []
        self._making = False
        self.why_one = ""

    @property
    def held(self) -> int:
        """Bytes of all buffers."""
        return sum(one.size for one in self._all)

    @property
    def free(self) -> bool:
        """Whether a snapshot could be taken now without waiting."""
        return bool(self._idle) or not self._all

    def take(self, size: int, seconds: float) -> Buffer | None:
        """A buffer of at least `size` bytes, waiting up to `seconds` for it. Raises OSError without memory for any."""
        with self._changed:
            if self._idle:
                buffer = self._idle.pop()
                return buffer if buffer.size >= size else self._replace(buffer, size)
            if not self._all:
                return self._make(size)
            if len(self._all) < MOST and not self._making and self._may_have_another(size):
                self._making = True
                threading.Thread(target=self._make_beside, args=(size,), name="buffer", daemon=True).start()
            self._changed.wait_for(lambda: self._idle, seconds)
            if not self._idle:
                return None
            buffer = self._idle.pop()
            return buffer if buffer.size >= size else self._replace(buffer, size)

    def give(self, buffer: Buffer) -> None:
        """Put a buffer back."""
        with self._changed:
            self._idle.append(buffer)
            self._changed.notify_all()

    def prepare(self, size: int) -> None:
        """Make the first buffer ahead of time, in whatever thread this is."""
        with self._changed:
            if not self._all:
                self._idle.append(self._make(size))

    def _make(self, size: int) -> Buffer:
        buffer = Buffer(size, pinned=self._pinned)
        self._all.append(buffer)
        return buffer

    def _replace(self, buffer: Buffer, size: int) -> Buffer:
        """The state has grown: an optimizer has its moments from its first step on."""
        self._all.remove(buffer)
        buffer.close()
        return self._make(size)

    def _make_beside(self, size: int) -> None:
        """The second buffer, while the training thread waits for whichever is there first."""
        try:
            buffer = Buffer(size, pinned=self._pinned)
        except OSError as error:
            self.why_one = f"there is no memory for a second snapshot ({error.strerror})"
            return  # and it is not tried again
        with self._changed:
            self._making = False
            self._all.append(buffer)
            self._idle.append(buffer)
            self._changed.notify_all()

    def _may_have_another(self, size: int) -> bool:
        free = self._free_memory()
        enough = free is None or free > ROOM * size
        if not enough:
            self.why_one = f"{free or 0:,} bytes of memory are free, a second snapshot needs {size:,}"
        return enough


def available() -> int | None:
    """Bytes of memory that this process may still take, by the kernel and by its control group; None if unknown."""
    limits = [_meminfo(), _group()]
    return min((one for one in limits if one is not None), default=None)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(found) << 10 if found else None


def _group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        most, used = (root / "memory.max").read_text().strip(), (root / "memory.current").read_text()
        return None if most == "max" else max(0, int(most) - int(used))
    except (OSError, ValueError):
        return None


def _register(address: int, size: int) -> bool:
    """Pin the pages for the GPU's copy engine. Without it the copy is right, but slower."""
    code = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
    return int(code) == 0
