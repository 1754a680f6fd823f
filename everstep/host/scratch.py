"""Folders for the temporary files of a run's processes: what SIGKILL lets them leave goes when they are known to be dead.

Loader workers and ranks pass tensors by sockets and shared memory whose names they remove themselves, if they can.
Folders have short names: a socket's path has 107 characters at most.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the kernel has it
LONGEST = 107 - len("/pymp-12345678/listener-12345678")


def make(token: str) -> dict[str, str]:
    """A new folder for the processes marked `token`, as the environment that leads there; empty if none can be made."""
    folder = Path(tempfile.gettempdir(), _name(token))
    if len(str(folder)) > LONGEST:
        return {}
    try:
        folder.mkdir(mode=0o700)
    except OSError:  # a full or read-only disk: what they then do without is theirs to say
        return {}
    return {"TMPDIR": str(folder)}


def clear(token: str, *, spare: str | None = None, pids: Iterable[int] = ()) -> None:
    """Remove the folders of processes marked `token` or below, all of them dead, but not those of `spare` or below.

    With them goes the shared memory that the dead processes `pids` have left: its names begin with their number.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_name(token)}*"):
        name = folder.name
        if _below(name, _name(token)) and not (spare and _below(name, _name(spare))) and _is_ours(folder):
            shutil.rmtree(folder, ignore_errors=True)
    for pid in pids:
        for left in SHARED_MEMORY.glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):
                left.unlink()


def _name(token: str) -> str:
    """The mark without the run's id: the digits behind it say which run of which name it is."""
    return "-".join(["everstep", *token.split("/")[1:]])


def _below(name: str, above: str) -> bool:
    return name == above or name.startswith(f"{above}-")


def _is_ours(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False
