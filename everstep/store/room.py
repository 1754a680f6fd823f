"""How much room a tier has, and how the lack of it is worded: path, bytes free, bytes needed."""

import errno
import os
from pathlib import Path

LACKING = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a write that found no room: the device is full, or this user's quota is used up."""


def free(path: Path) -> int:
    """Bytes that this user may still write below `path`, which need not exist yet. Raises OSError.

    What the file system keeps for root counts for root only. A quota of this user is not seen here unless the file
    system itself shows it (project quotas of XFS and ext4 do); a write then fails with EDQUOT, see `explain`.
    """
    stat = _stat(path)
    return stat.f_frsize * (stat.f_bfree if os.geteuid() == 0 else stat.f_bavail)


def lacks(error: BaseException) -> bool:
    """Whether a write failed for lack of room, and may succeed when some has been made."""
    return isinstance(error, OSError) and error.errno in LACKING


def words(path: Path | str, available: int, needed: int) -> str:
    """The clause that says what is missing, in bytes."""
    return f"{path} has {available:,} bytes free, {needed:,} are needed"


def explain(path: Path, needed: int, error: OSError) -> str:
    """Why `needed` bytes could not be written below `path`, as one clause with the path and both numbers.

    A quota is told from a full device, and a file system without free entries (inodes) from one without free bytes: in
    both cases the free bytes alone would mislead.
    """
    what = error.strerror or str(error)
    try:
        available, stat = free(path), _stat(path)
    except OSError as unknown:
        return f"{what}: {path} needs {needed:,} bytes; what is free there cannot be told ({unknown.strerror})"
    said = words(path, available, needed)
    if error.errno == errno.EDQUOT:
        return f"{what}: this user's quota on {path} is used up; {said}"
    if error.errno == errno.ENOSPC and stat.f_files and not stat.f_favail:
        return f"{what}: {path} takes no more files (no inodes are free); {said}"
    return f"{what}: {said}"


def _stat(path: Path) -> os.statvfs_result:
    """That of the nearest folder that exists: a tier's folders are made when they are first needed."""
    for place in (path, *path.absolute().parents):
        try:
            return os.statvfs(place)
        except FileNotFoundError:
            continue
    return os.statvfs("/")
