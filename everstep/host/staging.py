"""Brings a data set from its source directory to the local tier, once, and proves what it brought.

`<local>/datasets/<first 16 digits of the fingerprint>/` holds `data/` and, written last, `manifest.json`. Until then the
folder has a name beginning with `.partial-`; whole files in it are not fetched again. Digests of the source's files are
remembered by size, inode and times in `<local>/datasets/index/`.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everstep.core.checkpoint import MANIFEST
from everstep.core.dataset import DatasetManifest, FileEntry, inside
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.core.record import Record, Versioned
from everstep.store import atomic, digest, faults

SETTLED_SECONDS = 2.0
"""A file changed within so short a time may change again without another time stamp: its digest is not remembered."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Staged:
    """A staged data set: its files lie under `data`. `fetched` files with `bytes` bytes had to be copied now."""

    manifest: DatasetManifest
    data: Path
    fetched: int
    bytes: int


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


class StagedFolder(Versioned):
    """`manifest.json` of a staged data set, with the modification time of each local file in nanoseconds."""

    dataset: DatasetManifest
    modified: dict[str, int]


def stage(source: Path, local: Path, *, progress: Progress | None = None) -> Staged:
    """Make the data set in `source` available under `local`, fetching only what is not there.

    `progress` is told bytes done and bytes in all. Raises ValueError for a source that the user must mend (missing,
    empty, links that leave it, changing while it is read), StoreUnavailable if space is short or a disk does not answer.
    """
    try:
        listed = _list(source, local)
        datasets = local / "datasets"
        (datasets / "index").mkdir(parents=True, exist_ok=True, mode=0o700)
        manifest = _hash(source, listed, datasets)
        folder = datasets / manifest.fingerprint[:16]
        with _locked(datasets / f".{folder.name}.lock"):
            return _fetch(source, manifest, folder, progress or _unheard)
    except OSError as error:
        raise _unavailable(error, local) from error


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


def _fetch(source: Path, manifest: DatasetManifest, folder: Path, progress: Progress) -> Staged:
    """Complete `folder`, or a partial one that then takes its name."""
    before = _read_staged(folder, manifest)
    home = folder if before else folder.with_name(f".partial-{folder.name}")
    missing = [entry for entry in manifest.files if not _is_there(home, entry, before)]
    if before and not missing:
        return Staged(before.dataset, folder / "data", 0, 0)
    needed = sum(entry.size for entry in missing)
    (home / "data").mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_space(home, needed)
    done = manifest.bytes - needed
    for entry in missing:
        _fetch_file(source, home / "data", entry, lambda moved, base=done: progress(base + moved, manifest.bytes))  # type: ignore[misc]
        done += entry.size
    _commit(home, folder, manifest)
    return Staged(manifest, folder / "data", len(missing), needed)


def _commit(home: Path, folder: Path, manifest: DatasetManifest) -> None:
    """Nothing but the listed files, all of them durable; then the manifest; then the name."""
    data = home / "data"
    listed = {entry.path for entry in manifest.files}
    for parent, _, names in os.walk(data, topdown=False):
        for name in names if home != folder else ():
            if str(Path(parent, name).relative_to(data)) not in listed:
                Path(parent, name).unlink()
        atomic.sync_folder(Path(parent))
    modified = {entry.path: (data / entry.path).stat().st_mtime_ns for entry in manifest.files}
    atomic.write(home / MANIFEST, StagedFolder(dataset=manifest, modified=modified).to_json().encode())
    if home != folder:
        if folder.exists():
            shutil.rmtree(folder)
        home.rename(folder)
        atomic.sync_folder(folder.parent)


def _read_staged(folder: Path, manifest: DatasetManifest) -> StagedFolder | None:
    """What was staged before under this name, if it is this data set."""
    try:
        staged = StagedFolder.parse((folder / MANIFEST).read_bytes(), str(folder), MANIFEST)
    except (FileNotFoundError, Damaged):
        return None
    return staged if staged.dataset.fingerprint == manifest.fingerprint else None


def _is_there(home: Path, entry: FileEntry, before: StagedFolder | None) -> bool:
    """Whether a local file is right: by size and time if it was staged whole, else by reading it."""
    path = home / "data" / entry.path
    try:
        stat = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if path.is_symlink() or not path.is_file() or stat.st_size != entry.size:
        return False
    if before and before.modified.get(entry.path) == stat.st_mtime_ns:
        return True
    return digest.of_file(path) == entry.blake3


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


def _check_space(home: Path, needed: int) -> None:
    free = shutil.disk_usage(home).free
    if needed > free:
        raise StoreUnavailable(
            f"tiers.local: {home.parent} has {_size(free)} free and the data needs {_size(needed)}; "
            "free some space or choose another place."
        )


def _unavailable(error: OSError, local: Path) -> StoreUnavailable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreUnavailable(
            f"tiers.local: no space is left in {local} for the data; free some or choose another place."
        )
    return StoreUnavailable(f"The data cannot be staged now: {error.filename or local}: {error.strerror or error}.")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e3:.0f} kB"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two stagers of one data set come one after the other; the second finds everything there."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
