"""Files that are whole or absent: write beside, sync, rename, sync the folder."""

import os
import secrets
from pathlib import Path


def write(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Put `data` under `path` in one step; a reader sees the old bytes or the new ones, never a part.

    `sync=False` skips the disk sync, for files that only living processes read (heartbeats, leases).
    """
    beside = _beside(path)
    try:
        with beside.open("xb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def create(path: Path, data: bytes) -> bool:
    """Create `path` with its whole content, unless it exists. True for exactly one of all who try."""
    beside = _beside(path)
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, path)
        except FileExistsError:
            return False
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power loss."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
