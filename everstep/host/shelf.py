"""The staged data sets of a machine: `<local>/datasets/`. Names, locks, what is whole, space, and who must go first.

`<first 16 digits of the fingerprint>/` holds `data/` and, written last, `manifest.json`. What is being brought has a name
that begins with `.partial-`. `.<name>.lock` is held by the one who brings it, `.<name>.use` is shared by those who read
it: while anybody does, it is not evicted. The time of `.<name>.use` is that of its last use.
"""

import ctypes
import fcntl
import os
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from everstep.core.checkpoint import MANIFEST
from everstep.core.dataset import DatasetManifest, FileEntry
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.core.record import Versioned
from everstep.core.words import size
from everstep.store import atomic, digest, faults

PARTIAL = ".partial-"
EVICTED = ".evicted-"
FORGET_SECONDS = 3 * 86400.0
"""A half-done data set that nobody went on with for so long is removed."""
NAME_DIGITS = 16
Progress = Callable[[int, int], None]
TOOLS = ("parts", "fetched.jsonl")
"""What stands in a data set only while it is brought."""


class StagedFolder(Versioned):
    """`manifest.json` of a staged data set, with the modification time of each local file in nanoseconds."""

    dataset: DatasetManifest
    modified: dict[str, int]


class Hold:
    """Keeps a staged data set from being evicted until it is closed or forgotten."""

    def __init__(self, handle: int) -> None:
        self.close = weakref.finalize(self, os.close, handle)


@dataclass(frozen=True)
class Staged:
    """A staged data set: its files lie under `data`. `fetched` files with `bytes` bytes had to be copied now.

    As long as this lives, the data set is not evicted.
    """

    manifest: DatasetManifest
    data: Path
    fetched: int
    bytes: int
    hold: Hold | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Shelf:
    """The data sets of one local tier; `budget` is their space in bytes, all runs together."""

    local: Path
    budget: int | None = None

    @property
    def root(self) -> Path:
        return self.local / "datasets"

    def open(self) -> None:
        """Make the folder, and clear away what dead stagers left there."""
        (self.root / "index").mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self.root.glob(f"{EVICTED}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.root.glob(f"{PARTIAL}*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > FORGET_SECONDS:
                    self._remove_partial(path)

    def folder(self, manifest: DatasetManifest) -> Path:
        return self.root / manifest.fingerprint[:NAME_DIGITS]

    def partial(self, name: str) -> Path:
        return self.root / f"{PARTIAL}{name}"

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Two stagers of one name come one after the other; the second finds everything there."""
        handle = _open_lock(self.root / f".{name}.lock")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def hold(self, folder: Path) -> Hold:
        """Keep a data set from eviction, and note that it is used now."""
        handle = _open_lock(self._use(folder))
        fcntl.flock(handle, fcntl.LOCK_SH)
        os.utime(handle)
        return Hold(handle)

    def staged(self, folder: Path, manifest: DatasetManifest) -> StagedFolder | None:
        """What was staged before under this name, if it is this data set."""
        found = _read(folder)
        return found if found and found.dataset.fingerprint == manifest.fingerprint else None

    def make_room(self, home: Path, needed: int, total: int) -> None:
        """See that `needed` more bytes fit on the disk and all `total` of the data set into the budget.

        Evicts others for the sake of the budget, the one least recently used first. Raises ValueError where the data
        can never fit, StoreUnavailable where they do not fit now.
        """
        if self.budget is not None:
            self._keep_budget(home, total, self.budget)
        free = shutil.disk_usage(home).free
        if needed > free:
            raise StoreUnavailable(
                f"tiers.local: {home.parent} has {size(free) or 'nothing'} free and the data needs {size(needed)}; "
                "free some space or choose another place."
            )

    def commit(self, home: Path, folder: Path, manifest: DatasetManifest) -> None:
        """Nothing but the listed files, all of them durable; then the manifest; then the name."""
        data = home / "data"
        if home != folder:
            _keep_only(str(data), {entry.path for entry in manifest.files})
        _sync(home)
        modified = {entry.path: os.lstat(f"{data}/{entry.path}").st_mtime_ns for entry in manifest.files}
        atomic.write(home / MANIFEST, StagedFolder(dataset=manifest, modified=modified).to_json().encode())
        faults.point("stage.committed")
        if home != folder:
            if folder.exists():
                shutil.rmtree(folder)
            home.rename(folder)
            atomic.sync_folder(folder.parent)
        for name in TOOLS:  # not earlier: they are what a stager that is killed goes on from
            _remove(folder / name)

    def find(self, wanted: dict[str, int]) -> dict[str, Path]:
        """Files of the staged data sets with these BLAKE3 digests and sizes, as they were when they were proven."""
        found: dict[str, Path] = {}
        for folder in self._whole():
            staged = _read(folder)
            for entry in staged.dataset.files if staged else ():
                if wanted.get(entry.blake3) == entry.size and is_there(folder, entry, staged, by_reading=False):
                    found[entry.blake3] = folder / "data" / entry.path
        return found

    def _whole(self) -> list[Path]:
        return [path for path in self.root.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "index"]

    def _keep_budget(self, home: Path, total: int, budget: int) -> None:
        if total > budget:
            raise ValueError(
                f"tiers.budget_gb: the data has {size(total)} and the budget is {size(budget)}; raise it or use less data."
            )
        others = [path for path in (*self._whole(), *self.root.glob(f"{PARTIAL}*")) if path != home]
        sizes = {path: _bytes_of(path) for path in others}
        for path in sorted(others, key=lambda path: (not path.name.startswith(PARTIAL), self._last_use(path))):
            if sum(sizes.values()) + total <= budget:
                return
            gone = self._remove_partial(path) if path.name.startswith(PARTIAL) else self._evict(path)
            if gone:
                del sizes[path]
        if sum(sizes.values()) + total > budget:
            raise StoreUnavailable(
                f"tiers.budget_gb: {size(total)} of data do not fit into {size(budget)} beside the {size(sum(sizes.values())) or '0 B'} "
                "that living runs use; wait for their end or raise the budget."
            )

    def _evict(self, folder: Path) -> bool:
        """Remove a data set that nobody uses."""
        handle = _open_lock(self._use(folder))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            away = self.root / f"{EVICTED}{folder.name}-{secrets.token_hex(4)}"
            folder.rename(away)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            return True
        finally:
            os.close(handle)
        shutil.rmtree(away)
        return True

    def _remove_partial(self, path: Path) -> bool:
        handle = _open_lock(self.root / f".{path.name.removeprefix(PARTIAL)}.lock")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
        return True

    def _use(self, folder: Path) -> Path:
        return self.root / f".{folder.name}.use"

    def _last_use(self, folder: Path) -> float:
        for path in (self._use(folder), folder):
            with suppress(FileNotFoundError):
                return path.stat().st_mtime
        return 0.0


def is_there(home: Path, entry: FileEntry, before: StagedFolder | None, *, by_reading: bool = True) -> bool:
    """Whether a local file is right: by size and time if it was staged whole, else by reading it."""
    path = f"{home}/data/{entry.path}"
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
        return False
    if before and before.modified.get(entry.path) == found.st_mtime_ns:
        return True
    return by_reading and digest.of_file(Path(path)) == entry.blake3


def _keep_only(data: str, listed: set[str]) -> None:
    """Remove files that are not listed, and folders that hold nothing then."""
    for parent, _, names in os.walk(data, topdown=False):
        inner = os.path.relpath(parent, data)
        for name in names:
            if (name if parent == data else f"{inner}/{name}") not in listed:
                Path(parent, name).unlink()
        if parent != data and not any(Path(parent).iterdir()):
            Path(parent).rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read(folder: Path) -> StagedFolder | None:
    try:
        return StagedFolder.parse((folder / MANIFEST).read_bytes(), str(folder), MANIFEST)
    except (FileNotFoundError, Damaged):
        return None


def _bytes_of(folder: Path) -> int:
    """By its manifest, or by looking at every file."""
    staged = _read(folder)
    if staged:
        return staged.dataset.bytes
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.lstat().st_size
    return total


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _sync(folder: Path) -> None:
    """Everything below a folder on its disk, in one call where the C library has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):
        os.sync()
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(handle) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(handle)
