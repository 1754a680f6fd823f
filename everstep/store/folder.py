"""A directory that stands for an object store: keys are paths below it. For one machine, a mount, and tests."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.core.dataset import inside
from everstep.core.errors import StoreUnavailable
from everstep.store import atomic, digest
from everstep.store.objects import Changed, Exists, Moved, NotThere, ObjectStat

_BESIDE = re.compile(r"^\..+\.(part|[0-9a-f]{8}\.tmp)$")


class FolderStore:
    """An `ObjectStore` in a directory, which is made when it is first written to."""

    def __init__(self, root: Path) -> None:
        self.bucket = str(root)
        self._root = root

    def list(self, prefix: str) -> Iterator[ObjectStat]:
        with self._speaking():
            found = sorted(self._walk(prefix), key=lambda one: one.key)
        yield from found

    def head(self, key: str) -> ObjectStat | None:
        with self._speaking():
            return _stat(self._path(key), key)

    def read(self, key: str, start: int = 0, end: int | None = None, *, etag: str | None = None) -> bytes:
        with self._speaking():
            path = self._path(key)
            before = _stat(path, key)
            if before is None:
                raise NotThere(f"{path} is not there.")
            if etag is not None and before.etag != etag:
                raise Changed(f"{path} is no longer the file that was asked for.")
            with path.open("rb") as file:
                file.seek(start)
                return file.read(-1 if end is None else end - start)

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        with self._speaking():
            path = self._path(key)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not create:
                atomic.write(path, data)
            elif not atomic.create(path, data):
                raise Exists(f"{path} is there already.")

    def put_file(self, key: str, path: Path, *, moved: Moved | None = None) -> None:
        """As `ObjectStore.put_file`; the source's own errors are OSErrors that name it."""
        target = self._path(key)
        part = target.with_name(f".{target.name}.part")
        with self._speaking():
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        done = 0

        def passed(so_far: int) -> None:
            nonlocal done
            if moved is not None:
                moved(so_far - done)
            done = so_far

        try:
            digest.copy(path, part, passed)
            with self._speaking():
                part.replace(target)
                atomic.sync_folder(target.parent)
        except OSError as error:
            if error.filename == str(path):
                raise
            raise _silent(error, self._root) from error
        finally:
            part.unlink(missing_ok=True)

    def delete(self, key: str) -> None:
        with self._speaking():
            path = self._path(key)
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == self._root or not parent.is_relative_to(self._root) or not _remove_empty(parent):
                    return

    def abort_uploads(self, prefix: str) -> int:
        with self._speaking():
            left = list(self._path(prefix).rglob(".*.part"))
            for path in left:
                path.unlink(missing_ok=True)
        return len(left)

    def _path(self, key: str) -> Path:
        return self._root / inside(key)

    def _walk(self, prefix: str) -> Iterator[ObjectStat]:
        top = self._path(prefix) if prefix else self._root
        for parent, _, names in os.walk(top, onerror=_unless_missing):
            for name in names:
                key = str(Path(parent, name).relative_to(self._root))
                found = None if _BESIDE.match(name) else _stat(self._root / key, key)
                if found is not None:
                    yield found

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _silent(error, self._root) from error


def _stat(path: Path, key: str) -> ObjectStat | None:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    etag = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    if not stat.S_ISREG(found.st_mode):
        return None
    return ObjectStat(key=key, size=found.st_size, modified=found.st_mtime, etag=etag)


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _remove_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def _silent(error: OSError, root: Path) -> StoreUnavailable:
    return StoreUnavailable(f"{error.filename or root}: {error.strerror or error}.")
