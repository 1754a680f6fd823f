"""Brings a committed checkpoint from one tier to another. May be killed anywhere and run again: it goes on.

Files first (temporary name, sync, rename), read back from the far end, and only then the manifest: what is committed
there has been read there.
"""

import secrets
from collections.abc import Callable
from pathlib import Path

from everstep.core.checkpoint import MANIFEST, Manifest
from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.store import atomic, checkpoint, digest, faults

PART = ".part"


def copy(source: Path, target: Path, moved: Callable[[int], None] | None = None) -> int:
    """Copy the checkpoint in `source` to `target`; the number of bytes that had to be moved.

    `moved` is told the number of bytes that have just been copied, and may take its time.

    Raises Damaged if the source is not what its manifest says, StoreUnavailable if the far end gives back other bytes
    than it got, OSError as it comes.
    """
    faults.point("copy.begin")
    data = checkpoint.read_manifest_bytes(source)
    manifest = checkpoint.read_manifest(source)
    _make_folder(target, data)
    _clear_leftovers(target, manifest)
    missing = [entry for entry in manifest.files if not _is_right(target / entry.path, entry)]
    for entry in missing:
        _copy_file(source, target, entry, moved)
    atomic.sync_folder(target)
    faults.point("copy.verify")
    for entry in missing:
        if not _is_right(target / entry.path, entry):
            (target / entry.path).unlink(missing_ok=True)
            raise StoreUnavailable(f"{target / entry.path} came back with other bytes than were written.")
    faults.point("copy.before_manifest")
    if _manifest_of(target) != data:
        atomic.write(target / MANIFEST, data)
        atomic.sync_folder(target.parent)
    if _manifest_of(target) != data:
        raise StoreUnavailable(f"{target / MANIFEST} came back with other bytes than were written.")
    return sum(entry.size for entry in missing)


def _make_folder(target: Path, data: bytes) -> None:
    """A committed checkpoint of the same name but with other contents is set aside, never mixed or overwritten."""
    if target.is_symlink():
        raise Damaged(str(target.parent), target.name, "is a symbolic link; remove it")
    present = _manifest_of(target)
    if present is not None and present != data:
        target.rename(target.with_name(f".aside-{target.name}-{secrets.token_hex(4)}"))
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic.sync_folder(target.parent)


def _clear_leftovers(target: Path, manifest: Manifest) -> None:
    """Remove what a killed copier left under temporary names; refuse anything that is not the checkpoint's."""
    listed = {entry.path for entry in manifest.files} | {MANIFEST}
    for path in list(target.iterdir()):
        if path.name in listed:
            continue
        if not path.name.startswith(".") or not path.name.endswith((PART, ".tmp")):
            raise Damaged(str(target), path.name, "is not part of the checkpoint; move it away")
        path.unlink()


def _is_right(path: Path, entry: FileEntry) -> bool:
    """An independent read: whether the file has the size and digest that the manifest says."""
    try:
        if path.is_symlink() or path.stat().st_size != entry.size:
            return False
        return digest.of_file(path, cold=True, limit=entry.size) == entry.blake3
    except FileNotFoundError:
        return False


def _copy_file(source: Path, target: Path, entry: FileEntry, moved: Callable[[int], None] | None) -> None:
    part = target / f".{entry.path}{PART}"
    half = [entry.size // 2]
    told = 0

    def passed(done: int) -> None:
        nonlocal told
        if half and done > half[0]:
            half.clear()
            faults.point("copy.mid_file")
        if moved is not None:
            moved(done - told)
        told = done

    try:
        found, size = digest.copy(source / entry.path, part, passed, limit=entry.size)
        if (found, size) != (entry.blake3, entry.size):
            raise Damaged(source.name, entry.path, "does not match its BLAKE3 digest in the manifest")
        part.replace(target / entry.path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _manifest_of(folder: Path) -> bytes | None:
    try:
        return checkpoint.read_manifest_bytes(folder)
    except Damaged:
        return None
