"""Who holds a GPU: whether a pid that the driver names is a process that can be seen from here.

In a container the driver may name pids of the host. Such a number is nobody here, or somebody who has nothing to do with
it, and must never be signalled. A process holds a GPU if it has one of the driver's device files open; a mark of ours in
its environment says that it is a rank of a run.
"""

import os
from enum import StrEnum
from pathlib import Path

from everstep.core.gpu import GpuProcess
from everstep.core.record import Record
from everstep.host.process import MARK

DEVICE = "/dev/nvidia"


class Where(StrEnum):
    """Where the process is that holds a GPU."""

    here = "here"  # seen here, with the GPU open
    outside = "outside"  # not here, or the number is another process's here
    unknown = "unknown"  # another user's: it may not be looked at


class Holder(Record):
    """A process that holds a GPU, as far as it can be known from here. Only one that is `here` may be signalled."""

    pid: int
    where: Where
    memory_bytes: int | None = None
    name: str = ""
    attempt: str = ""

    @property
    def sentence(self) -> str:
        size = "" if self.memory_bytes is None else f" ({self.memory_bytes / 2**30:.1f} GiB)"
        if self.where is Where.outside:
            return f"held by a process outside this namespace{size}"
        if self.where is Where.unknown:
            return f"held by process {self.pid}{size}, which this user may not look at"
        run = f", a rank of {self.attempt}" if self.attempt else ""
        return f"held by {self.name} ({self.pid}){size}{run}"


def holder(process: GpuProcess, proc: Path = Path("/proc"), device: str = DEVICE) -> Holder:
    """Find out who a process of a sample is. `device` begins the names of the driver's device files."""
    folder = proc / str(process.pid)
    where = _where(folder, device)
    name = attempt = ""
    if where is Where.here:
        name = _read(folder / "comm").decode(errors="replace").strip()
        marks = (one for one in _read(folder / "environ").split(b"\0") if one.startswith(f"{MARK}=".encode()))
        attempt = next(marks, b"").partition(b"=")[2].decode(errors="replace")
    return Holder(pid=process.pid, where=where, memory_bytes=process.memory_bytes, name=name, attempt=attempt)


def _where(folder: Path, device: str) -> Where:
    try:
        with os.scandir(folder / "fd") as entries:
            if any(_target(Path(entry.path)).startswith(device) for entry in entries):
                return Where.here
    except PermissionError:
        return Where.unknown
    except OSError:
        return Where.outside
    return Where.outside


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
