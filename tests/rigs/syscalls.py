"""One file operation of a living process, killed or refused: strace's fault injection.

An operation is `(call, n)`: strace counts each kind of call for itself, and each thread by itself. A signal comes as the call is entered, so the one before it is the last that
was done: killed at each in turn, a process has been killed between any two.
"""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

OPERATIONS = (
    "mkdir,mkdirat,open,openat,write,pwrite64,writev,fsync,fdatasync,sync_file_range,ftruncate,rename,renameat,renameat2,"
    "link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,utimensat,copy_file_range,sendfile"
)
MISSING = "strace is not installed; `make test-setup` installs it with apt"
KILL = "signal=SIGKILL"
ERRORS = tuple(f"error={errno.errorcode[number]}" for number in (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT))


@dataclass(frozen=True)
class Traced:
    """What a process did while it was watched."""

    log: Path

    @property
    def operations(self) -> list[tuple[str, int]]:
        """The operations that its main thread began, in order."""
        lines = [line.split(maxsplit=1) for line in self.log.read_text(errors="replace").splitlines()]
        calls = [(pid, call) for pid, call in lines if not call.startswith(("+++", "---", "<... "))]
        names = [call.partition("(")[0] for pid, call in calls if pid == calls[0][0]]
        return [(name, names[: at + 1].count(name)) for at, name in enumerate(names)]

    @property
    def injected(self) -> bool:
        return "(INJECTED" in self.log.read_text(errors="replace") or "+++ killed by SIGKILL" in self.log.read_text()


def needed() -> None:
    """Skip where strace is missing, or may not trace."""
    if shutil.which("strace") is None:
        pytest.skip(MISSING)
    done = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        assert "CI" not in os.environ, done.stderr
        pytest.skip(f"tracing is not allowed here: {done.stderr.strip()}")


@contextmanager
def watching(pid: int, log: Path, what: str = "", at: tuple[str, int] = ("", 0)) -> Iterator[Traced]:
    """Watch a process for the block; with `what`, that happens at the operation `at`, counted from here on."""
    command = ["strace", "-f", "-p", str(pid), "-o", str(log), "-e", f"trace={OPERATIONS}"]
    if what:
        command += ["-e", f"inject={at[0]}:{what}:when={at[1]}"]
    log.unlink(missing_ok=True)
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    assert "attached" in said, said
    drain = threading.Thread(target=tracer.stderr.read, daemon=True)
    drain.start()
    try:
        yield Traced(log)
    finally:
        tracer.terminate()
        tracer.wait(30)
        drain.join(30)
        tracer.stderr.close()
