"""Brings a data set from its source to the local tier, once, and proves what it brought.

From a directory here, from an object store in `staging_objects`; what is staged stands on the `shelf`. Digests of a
directory's files are remembered by size, inode and times in `<local>/datasets/index/`.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from everstep.core.dataset import DatasetManifest, FileEntry, inside
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.core.place import ObjectPlace, is_object
from everstep.core.record import Record, Versioned
from everstep.host.shelf import Hold, Progress, Shelf, Staged, is_there
from everstep.store import atomic, digest, faults
from everstep.store.s3_access import Access

__all__ = ["Progress", "Staged", "stage"]

SETTLED_SECONDS = 2.0
"""A file changed within so short a time may change again without another time stamp: its digest is not remembered."""


class Known(Record):
    """A file's digest, believed as long as these four are unchanged. Times in nanoseconds."""

    size: int
    modified: int
    changed: int
    inode: int
    blake3: str


class Index(Versioned):
    """Digests of a source's files by path."""

    files: dict[str, Known] = {}


def stage(
    source: str | Path,
    local: Path,
    *,
    progress: Progress | None = None,
    access: Access | None = None,
    budget_gb: float | None = None,
) -> Staged:
    """Make the data set in `source` available under `local`, fetching only what is not there.

    `source` is a directory, or s3://bucket/prefix reached by `access`. `progress` is told bytes done and bytes in all, in
    this thread. `budget_gb` is the space for the data sets of all runs. Raises ValueError for what the user must mend (a
    source that is missing, empty, or changing while it is read; credentials), StoreUnavailable if space is short or a
    disk or store does not answer.
    """
    shelf = Shelf(local, None if budget_gb is None else int(budget_gb * 1e9))
    try:
        if is_object(str(source)):
            return _from_store(ObjectPlace.parse(str(source)), shelf, progress or _unheard, access)
        return _from_folder(Path(source), shelf, progress or _unheard)
    except OSError as error:
        raise _unavailable(error, local) from error


def _from_store(place: ObjectPlace, shelf: Shelf, progress: Progress, access: Access | None) -> Staged:
    from everstep.core.place import S3Settings
    from everstep.host import staging_objects
    from everstep.store import s3

    store = s3.open_store(place.bucket, access or s3.access(S3Settings()))
    shelf.open()
    try:
        return staging_objects.stage(place, store, shelf, progress)
    finally:
        store.close()


def _from_folder(source: Path, shelf: Shelf, progress: Progress) -> Staged:
    listed = _list(source, shelf.local)
    shelf.open()
    manifest = _hash(source, listed, shelf.root)
    folder = shelf.folder(manifest)
    with shelf.locked(folder.name):
        return _fetch(source, manifest, folder, shelf, shelf.hold(folder), progress)


def _unheard(done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _list(source: Path, local: Path) -> dict[str, os.stat_result]:
    """The regular files below `source` by relative path, sorted."""
    if not source.is_dir():
        raise ValueError(f"data.source: {str(source)!r} is not a directory; name the folder that holds the data")
    root = source.resolve()
    if local.resolve().is_relative_to(root):
        raise ValueError(f"tiers.local: {str(local)!r} lies inside the data {str(source)!r}; choose a place outside")
    found = dict(sorted(_walk(root, root, "", (root,))))
    if not found:
        raise ValueError(f"data.source: {str(source)!r} holds no files; put the data there or name another folder")
    return found


def _walk(root: Path, folder: Path, prefix: str, above: tuple[Path, ...]) -> Iterator[tuple[str, os.stat_result]]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name, path = f"{prefix}{entry.name}", Path(entry.path)
        try:
            inside(name).encode()
        except ValueError:
            raise ValueError(f"data.source: {name!r} is a name that cannot be staged; rename the file") from None
        if entry.is_symlink():
            _check_link(root, path, name, above)
        if entry.is_dir():
            yield from _walk(root, path, f"{name}/", (*above, path.resolve()))
        elif entry.is_file():
            yield name, entry.stat()
        else:
            raise ValueError(f"data.source: {name!r} is neither a file nor a folder; remove it from the data")


def _check_link(root: Path, path: Path, name: str, above: tuple[Path, ...]) -> None:
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise ValueError(f"data.source: {name!r} is a link that leaves the folder; put the file itself there")
    if not target.exists():
        raise ValueError(f"data.source: {name!r} is a link to nothing; remove it or put the file itself there")
    if target in above:
        raise ValueError(f"data.source: {name!r} is a link to a folder around it; remove it")


def _hash(source: Path, listed: dict[str, os.stat_result], datasets: Path) -> DatasetManifest:
    """Digests of all files; those that are known and unchanged are not read."""
    path = _index_path(datasets, source)
    known = _read_index(path)
    files: dict[str, Known] = {}
    for name, stat in listed.items():
        one = known.get(name)
        if not one or not _is_same(one, stat):
            one = _known(stat, digest.of_file((source / name).resolve(), limit=stat.st_size))
        files[name] = one
    old = time.time_ns() - int(SETTLED_SECONDS * 1e9)
    settled = {name: one for name, one in files.items() if max(one.modified, one.changed) < old}
    if settled != known:
        atomic.write(path, Index(files=settled).to_json().encode(), sync=False)
    entries = tuple(FileEntry(path=name, size=one.size, blake3=one.blake3) for name, one in files.items())
    return DatasetManifest(source=str(source), files=entries)


def _index_path(datasets: Path, source: Path) -> Path:
    return datasets / "index" / f"{digest.of_bytes(os.fsencode(source.resolve()))[:16]}.json"


def _read_index(path: Path) -> dict[str, Known]:
    """What is remembered. It only saves time, so an unreadable index is an empty one."""
    try:
        return Index.parse(path.read_bytes(), str(path.parent), path.name).files
    except (FileNotFoundError, Damaged):
        return {}


def _known(stat: os.stat_result, blake3: str) -> Known:
    return Known(
        size=stat.st_size, modified=stat.st_mtime_ns, changed=stat.st_ctime_ns, inode=stat.st_ino, blake3=blake3
    )


def _is_same(known: Known, stat: os.stat_result) -> bool:
    return known == _known(stat, known.blake3)


def _fetch(
    source: Path, manifest: DatasetManifest, folder: Path, shelf: Shelf, hold: Hold, progress: Progress
) -> Staged:
    """Complete `folder`, or a partial one that then takes its name."""
    before = shelf.staged(folder, manifest)
    home = folder if before else shelf.partial(folder.name)
    missing = [entry for entry in manifest.files if not is_there(home, entry, before)]
    if before and not missing:
        return Staged(before.dataset, folder / "data", 0, 0, hold)
    needed = sum(entry.size for entry in missing)
    (home / "data").mkdir(parents=True, exist_ok=True, mode=0o700)
    shelf.make_room(home, needed, manifest.bytes)
    done = manifest.bytes - needed
    for entry in missing:
        _fetch_file(source, home / "data", entry, lambda moved, base=done: progress(base + moved, manifest.bytes))  # type: ignore[misc]
        done += entry.size
    shelf.commit(home, folder, manifest)
    return Staged(manifest, folder / "data", len(missing), needed, hold)


def _fetch_file(source: Path, data: Path, entry: FileEntry, moved: Callable[[int], None]) -> None:
    """Fetch one file; once more if it changed meanwhile, and then it is refused."""
    target = data / entry.path
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = target.with_name(f".{digest.of_bytes(entry.path.encode())[:16]}.part")
    half = [entry.size // 2]

    def passed(done: int) -> None:
        if half and done > half[0]:
            half.clear()
            faults.point("stage.mid_file")
        moved(done)

    try:
        for _ in range(2):
            if digest.copy(source / entry.path, part, passed, follow=True, limit=entry.size) == (
                entry.blake3,
                entry.size,
            ):
                part.replace(target)
                return
    except FileNotFoundError:
        if (source / entry.path).exists():
            raise
    finally:
        part.unlink(missing_ok=True)
    _index_path(data.parent.parent, source).unlink(missing_ok=True)
    raise ValueError(
        f"data.source: {entry.path!r} in {str(source)!r} changed while it was being copied; "
        "start again when nothing writes to the data"
    )


def _unavailable(error: OSError, local: Path) -> StoreUnavailable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreUnavailable(
            f"tiers.local: no space is left in {local} for the data; free some or choose another place."
        )
    return StoreUnavailable(f"The data cannot be staged now: {error.filename or local}: {error.strerror or error}.")
