"""Fetches many objects at once into a half-done data set: several files side by side, a large one in parts.

Every worker has one buffer of `PART` bytes, which bounds the memory. The parts of a file are asked for in order, arrive as
they like, and are hashed and written in order: what is on the disk is always the file's beginning, and the digest of the
whole costs no second reading.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from everstep.core.errors import EverstepError, StoreUnavailable
from everstep.host.arrival import Arriving, Holed, Wanted
from everstep.host.fetch_journal import Journal, Proven
from everstep.store.objects import Changed, NotThere
from everstep.store.s3 import Bucket

PART = 8 << 20
MOST_WORKERS = 24
MOST_FAILURES = 10
MOST_UNANSWERED = 4
"""After so many files that the store gave no answer for, each with all the patience there is, no other is asked for."""
SAID = 5
ZEROS = bytes(4096)
LOOK_SECONDS = 0.2
LEAVE_SECONDS = 5.0
_own = threading.local()


class Failed(EverstepError):
    """Some files could not be fetched; `failures` says why, by path."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        said = list(dict.fromkeys(str(failures[path]) for path in sorted(failures)))
        more = f" And {len(said) - SAID} files more." if len(said) > SAID else ""
        super().__init__(" ".join(said[:SAID]) + more)
        self.failures = failures

    def told(self) -> Exception:
        """As an error that passes only if all of it may pass by itself."""
        mend = any(isinstance(error, ValueError) for error in self.failures.values())
        return ValueError(str(self)) if mend else StoreUnavailable(str(self))


def workers() -> int:
    """Two for each processor: one waits for bytes while another hashes and writes; at least some hide a long way."""
    return min(MOST_WORKERS, max(4, 2 * (os.cpu_count() or 1)))


def fetch(
    store: Bucket, home: Path, wanted: Iterable[Wanted], progress: Callable[[int], None]
) -> tuple[dict[str, Proven], set[str]]:
    """Bring all that is wanted into `home`; what every file turned out to be, and which had to be fetched for it.

    `progress` is told the bytes that are there, in the calling thread. Raises Failed when all that could be fetched has
    been, and OSError from the disk at once. After an exception the store is closed.
    """
    for folder in ("data", "parts"):
        (home / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    fetcher = _Fetcher(store, home, progress)
    try:
        fetcher.run(wanted)
    except BaseException:
        store.close()
        raise
    if fetcher.failures:
        raise Failed(fetcher.failures)
    return fetcher.proven, {one.path for one in fetcher.arrived}


class _Fetcher:
    def __init__(self, store: Bucket, home: Path, progress: Callable[[int], None]) -> None:
        self.proven: dict[str, Proven] = {}
        self.arrived: list[Proven] = []
        self.failures: dict[str, Exception] = {}
        self._there = 0
        self._store = store
        self._home = home
        self._progress = progress
        self._journal = Journal(home)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._files: list[Arriving] = []

    def run(self, wanted: Iterable[Wanted]) -> None:
        """Look at what is there already, then fetch the rest, the largest first."""
        largest_first = sorted(wanted, key=lambda one: -one.size)
        self._files = [Arriving(one, self._home, self._store, self._journal) for one in largest_first]
        mine = {file.part for file in self._files}
        for path in (self._home / "parts").iterdir():
            if str(path) not in mine:
                path.unlink()
        try:
            self._share([partial(self._look, file) for file in self._files])
            rest = [file for file in self._files if not file.over]
            units = [(file, at) for file in rest for at in range(file.done, max(file.wanted.size, 1), PART)]
            self._share([partial(self._part, file, at) for file, at in units])
        finally:
            for file in self._files:
                file.close()

    def _share(self, work: list[Callable[[], None]]) -> None:
        """Have the workers do it all, begun in this order, and show progress meanwhile."""
        queue, trouble = deque(work), deque[BaseException]()
        threads = [
            threading.Thread(target=self._toil, args=(queue, trouble), name=f"everstep-fetch-{number}", daemon=True)
            for number in range(min(len(work), workers()))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(LOOK_SECONDS)
                    self._progress(self._there)
                    if self._stop.is_set():
                        self._store.close()
        except BaseException:
            self._stop.set()
            self._store.close()
            for thread in threads:
                thread.join(LEAVE_SECONDS)
            raise
        if trouble:
            raise trouble[0]

    def _toil(self, queue: deque[Callable[[], None]], trouble: deque[BaseException]) -> None:
        while not self._stop.is_set():
            try:
                work = queue.popleft()
            except IndexError:
                return
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                trouble.append(error)
                self._stop.set()

    def _look(self, file: Arriving) -> None:
        proven = file.resume()
        with self._lock:
            self._there += file.wanted.size if proven else file.done
            if proven:
                self.proven[proven.path] = proven

    def _part(self, file: Arriving, at: int) -> None:
        """Fetch one part, wait for its turn, take it in; the last part makes the file whole."""
        if file.over:
            return
        try:
            if at == file.done:
                file.open()
            view = memoryview(_buffer())[: min(PART, file.wanted.size - at)]
            crc32 = self._fetch(file, at, view)
            with file.turn:
                while file.done != at and not file.over and not self._stop.is_set():
                    file.turn.wait(LOOK_SECONDS)
                if file.over or self._stop.is_set():
                    return
                file.take(view, crc32)
                file.turn.notify_all()
                self._count(len(view))
                if file.done == file.wanted.size:
                    self._arrived(file.complete())
        except (EverstepError, ValueError) as error:
            self._fail(file, error)

    def _fetch(self, file: Arriving, at: int, view: memoryview) -> str:
        """The bytes of a part. A hole of zeros is asked for twice where nothing else will prove the bytes."""
        wanted = file.wanted
        if not view:
            return ""
        crc32 = self._store.fill(wanted.key, at, view, etag=wanted.etag, whole=len(view) == wanted.size)
        if file.is_bare and not crc32 and _buffer().find(ZEROS, 0, len(view)) >= 0:
            again = memoryview(bytearray(len(view)))
            self._store.fill(wanted.key, at, again, etag=wanted.etag)
            if again != view:
                raise Holed(f"{wanted.path!r} came with other bytes the second time")
        return crc32

    def _fail(self, file: Arriving, error: Exception) -> None:
        """Give the file up; but wrong bytes and a changed object are fetched once more, from the start."""
        with file.turn:
            if file.over or self._stop.is_set():
                return
            file.over = True
            file.close()
            file.turn.notify_all()
        self._count(-file.done)
        if isinstance(error, Holed | Changed) and not file.again:
            self._again(file.wanted)
            return
        with self._lock:
            self.failures[file.wanted.path] = _named(file.wanted, error)
            unanswered = sum(isinstance(one, StoreUnavailable) for one in self.failures.values())
            if len(self.failures) >= MOST_FAILURES or unanswered >= MOST_UNANSWERED:
                self._stop.set()

    def _again(self, wanted: Wanted) -> None:
        """Fetch a file alone, as it is at the source now."""
        fresh = Arriving(wanted, self._home, self._store, self._journal, again=True)
        self._files.append(fresh)
        try:
            found = self._store.head(wanted.key)
            if found is None:
                raise NotThere(wanted.key)
            fresh.wanted = Wanted(wanted.path, wanted.key, found.size, found.etag, wanted.blake3)
        except (EverstepError, ValueError) as error:
            self._fail(fresh, error)
            return
        for at in range(0, max(fresh.wanted.size, 1), PART):
            self._part(fresh, at)

    def _arrived(self, proven: Proven) -> None:
        with self._lock:
            self.proven[proven.path] = proven
            self.arrived.append(proven)

    def _count(self, moved: int) -> None:
        with self._lock:
            self._there += moved


def _buffer() -> bytearray:
    """The buffer of this thread."""
    have: bytearray | None = getattr(_own, "buffer", None)
    if have is None:
        have = _own.buffer = bytearray(PART)
    return have


def _named(wanted: Wanted, error: Exception) -> Exception:
    """The error in words that name the file."""
    where = f"data.source: {wanted.path!r}"
    if isinstance(error, NotThere):
        return ValueError(f"{where} is listed, but it is not there; put it back or remove it for good.")
    if isinstance(error, Changed):
        return ValueError(f"{where} changed while it was being copied; start again when nothing writes to the data.")
    if isinstance(error, Holed):
        return ValueError(f"{where} came twice with other bytes than its source promises; put it there anew.")
    return error if isinstance(error, StoreUnavailable | ValueError) else StoreUnavailable(f"{where}: {error}")
