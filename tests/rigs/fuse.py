"""A folder that fails and hangs on request: a FUSE mount that passes everything on to a real folder.

`mount(folder)` gives a `Tier`: `tier.path` is what the product is shown, `tier.source` what lies behind it, whatever the
mount does. `tier.plan(Fault("hang", "write"))` lets every write hang until `tier.clear()`, as a mount over a network does
whose server is gone: the process that waits is in uninterruptible sleep, also for SIGKILL. `errno:28` and the like fail
the operation. Needs root, `/dev/fuse` and the package fuse3 (`make test-setup`); `why_not()` says what is missing.

The file system is a process of its own (`python fuse.py <source> <mount> <control folder>`), which dies with the test.
"""

import contextlib
import ctypes.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

READY_SECONDS = 20.0
LOOK_SECONDS = 0.01

OPERATIONS = frozenset(
    {
        "getattr", "readdir", "open", "create", "read", "write", "truncate", "flush", "fsync", "fsyncdir", "release",
        "unlink", "rename", "link", "symlink", "readlink", "mkdir", "rmdir", "statfs", "access", "chmod", "utimens",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """Harm for the operations that fit.

    do: `hang` (until the plan is cleared) or `errno:<number>`. op: one of `OPERATIONS`, several with a space between, or
    empty for all. path: a regular expression that is searched in the path within the mount. The first `skip` that fit
    go unharmed, then `times` are harmed (-1: all).
    """

    do: str
    op: str = ""
    path: str = ""
    skip: int = 0
    times: int = -1

    def __post_init__(self) -> None:
        assert self.do == "hang" or re.fullmatch(r"errno:\d+", self.do), self.do
        assert set(self.op.split()) <= OPERATIONS, self.op

    def fits(self, op: str, path: str) -> bool:
        return (not self.op or op in self.op.split()) and re.search(self.path, path) is not None


@dataclass
class Tier:
    """A mounted folder."""

    path: Path
    source: Path
    control: Path
    process: subprocess.Popen[bytes]

    def plan(self, *faults: Fault) -> None:
        """From now on these faults, and no others; their counts begin anew."""
        beside = self.control / "plan.new"
        beside.write_text(json.dumps([asdict(fault) for fault in faults]))
        beside.replace(self.control / "plan.json")

    def clear(self) -> None:
        """From now on all goes well; what hangs goes on."""
        self.plan()

    def met(self) -> int:
        """How many operations have met a fault so far."""
        return sum(1 for _ in self.control.glob("met-*"))

    def hanging(self) -> list[str]:
        """The operations that hang now, as `<op> <path>`."""
        found = []
        for one in sorted(self.control.glob("hang-*")):
            with contextlib.suppress(FileNotFoundError):
                found.append(one.read_text())
        return found

    def await_hanging(self, seconds: float = 30.0) -> None:
        """Wait until an operation hangs."""
        until = time.monotonic() + seconds
        while not self.hanging():
            assert time.monotonic() < until, "nothing hangs"
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Unmount. What still hangs goes on; what comes later finds nothing."""
        self.clear()
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True, timeout=20)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self.process.kill()
        self.process.wait(10)


def why_not() -> str:
    """Why no such folder can be mounted here; empty if it can."""
    if not Path("/dev/fuse").exists():
        return "the kernel offers no /dev/fuse"
    if os.geteuid() != 0:
        return "mounting needs root"
    if ctypes.util.find_library("fuse3") is None:
        return "there is no libfuse3; run make test-setup"
    return ""


@contextlib.contextmanager
def mount(folder: Path) -> Iterator[Tier]:
    """Mount `folder/mount` over `folder/source`; both are made. Unmounted with the block."""
    tier = Tier(folder / "mount", folder / "source", folder / "control", _start(folder))
    try:
        _await_ready(tier)
        yield tier
    finally:
        tier.close()


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    from everstep.host import launcher

    for name in ("mount", "source", "control"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    own = [sys.executable, __file__, str(folder / "source"), str(folder / "mount"), str(folder / "control")]
    guard = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), str(int(signal.SIGTERM)), "--"]
    with (folder / "control" / "log").open("wb") as log:
        return subprocess.Popen([*guard, *own], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _await_ready(tier: Tier) -> None:
    until = time.monotonic() + READY_SECONDS
    while not os.path.ismount(tier.path):
        if tier.process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the mount did not come: {(tier.control / 'log').read_text()[-2000:]}")
        time.sleep(LOOK_SECONDS)


class _Plan:
    """The faults as they stand in the control folder, and how often each was met."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self._seen: tuple[int, int] | None = None
        self._faults: list[Fault] = []
        self._fitted: Counter[int] = Counter()
        self._met = 0

    def meet(self, op: str, path: str) -> None:
        """Let the operation hang or fail if a fault says so."""
        self._look()
        for index, fault in enumerate(self._faults):
            if not fault.fits(op, path):
                continue
            self._fitted[index] += 1
            if self._fitted[index] <= fault.skip or 0 <= fault.times < self._fitted[index] - fault.skip:
                continue
            self._met += 1
            number = self._met
            (self._control / f"met-{number}").touch()
            if fault.do == "hang":
                self._hang(number, f"{op} {path}")
                return
            code = int(fault.do.partition(":")[2])
            raise OSError(code, os.strerror(code))

    def _hang(self, number: int, what: str) -> None:
        note, seen = self._control / f"hang-{number}", self._seen
        note.write_text(what)
        while self._look() == seen:
            time.sleep(LOOK_SECONDS)
        note.unlink()

    def _look(self) -> tuple[int, int] | None:
        try:
            stat = (self._control / "plan.json").stat()
        except FileNotFoundError:
            return None
        seen = (stat.st_mtime_ns, stat.st_ino)
        if seen != self._seen:
            self._faults = [Fault(**one) for one in json.loads((self._control / "plan.json").read_text())]
            self._fitted.clear()
            self._seen = seen
        return seen


def _serve(source: str, mountpoint: str, control: str) -> None:  # noqa: C901 - a method for each operation
    import mfusepy

    plan = _Plan(Path(control))

    def at(path: str) -> str:
        return source + path

    class Passing(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            plan.meet("getattr", path)
            found = os.lstat(at(path))
            times = {f"st_{word}": getattr(found, f"st_{word}_ns") for word in ("atime", "mtime", "ctime")}
            words = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_ino", "st_blocks")
            return {word: getattr(found, word) for word in words} | times

        def readdir(self, path: str, fh: int) -> Any:
            plan.meet("readdir", path)
            return [".", "..", *os.listdir(at(path))]  # noqa: PTH208 - names are what is asked for

        def open(self, path: str, flags: int) -> int:
            plan.meet("open", path)
            return os.open(at(path), flags)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            plan.meet("create", path)
            return os.open(at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            plan.meet("read", path)
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            plan.meet("write", path)
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            plan.meet("truncate", path)
            os.truncate(at(path), length)
            return 0

        def flush(self, path: str, fh: int) -> int:
            plan.meet("flush", path)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            plan.meet("fsync", path)
            os.fsync(fh)
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            plan.meet("fsyncdir", path)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def unlink(self, path: str) -> int:
            plan.meet("unlink", path)
            os.unlink(at(path))  # noqa: PTH108
            return 0

        def rename(self, old: str, new: str) -> int:
            plan.meet("rename", new)
            os.rename(at(old), at(new))  # noqa: PTH104
            return 0

        def link(self, target: str, source: str) -> int:
            plan.meet("link", target)
            os.link(at(source), at(target))
            return 0

        def symlink(self, target: str, source: str) -> int:
            plan.meet("symlink", target)
            os.symlink(source, at(target))  # noqa: PTH211
            return 0

        def readlink(self, path: str) -> str:
            plan.meet("readlink", path)
            return os.readlink(at(path))  # noqa: PTH115

        def mkdir(self, path: str, mode: int) -> int:
            plan.meet("mkdir", path)
            os.mkdir(at(path), mode)  # noqa: PTH102
            return 0

        def rmdir(self, path: str) -> int:
            plan.meet("rmdir", path)
            os.rmdir(at(path))  # noqa: PTH106
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            plan.meet("statfs", path)
            found = os.statvfs(at(path))
            return {word: getattr(found, word) for word in dir(found) if word.startswith("f_") and word != "f_fsid"}

        def access(self, path: str, amode: int) -> int:
            plan.meet("access", path)
            return 0

        def chmod(self, path: str, mode: int) -> int:
            plan.meet("chmod", path)
            os.chmod(at(path), mode)  # noqa: PTH101
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            plan.meet("utimens", path)
            os.utime(at(path), ns=times)
            return 0

    # Nothing is remembered by the kernel, so that every operation comes here.
    mfusepy.FUSE(
        Passing(), mountpoint, foreground=True, nothreads=False, attr_timeout=0, entry_timeout=0, negative_timeout=0
    )


if __name__ == "__main__":
    os.umask(0)
    _serve(*sys.argv[1:4])
