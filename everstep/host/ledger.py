"""The ledger: events go to the run's journal at once, and from there to a database in the background.

The journal (`events.jsonl`) is the truth about a run and the spool of the database. `<journal>.drained` says how far
the database has it, but ids make a replay harmless, so it may be lost. A database that is locked, deleted, read-only
or unreachable costs the caller nothing: what it misses is replayed, in order, when it answers again.
"""

import contextlib
import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from everstep.core.errors import Damaged
from everstep.core.ledger import Event
from everstep.store import atomic, jsonl

if TYPE_CHECKING:
    from sqlalchemy import Engine

BATCH = 500
LONGEST_WAIT = 30.0


class Ledger:
    """Appends events of one run. No method raises because of the database, and none waits for it without a deadline.

    `trouble` is why the database does not take events just now, or empty. With `most_bytes` a journal that grows larger
    becomes `former(journal)`, in the place of the one before; while the database lacks events of it only when it is
    four times as large.
    """

    def __init__(
        self, uri: str, journal: Path, *, longest_wait: float = LONGEST_WAIT, most_bytes: int | None = None
    ) -> None:
        self.trouble = ""
        self._most_bytes = most_bytes
        self._drain = _Drain(uri, journal)
        self._journal = journal
        self._longest_wait = longest_wait
        self._unwritten: list[str] = []
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._wanted = 1
        self._settled = 0
        self._urgent = False
        self._flushing = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="everstep-ledger", daemon=True)
        self._thread.start()

    def append(self, event: Event) -> None:
        """Put an event into the journal, synced. If the journal's disk refuses, it is kept here and written later."""
        with self._writing:
            self._unwritten.append(event.model_dump_json())
            self._write_down()
        self._want()

    def flush(self, deadline_seconds: float) -> bool:
        """Whether the database has everything by the deadline. Also looks whether it still has what it had."""
        wanted = self._want(urgent=True)
        with self._changed:
            self._flushing += 1
            try:
                return self._changed.wait_for(lambda: self._settled >= wanted, deadline_seconds)
            finally:
                self._flushing -= 1

    def close(self, deadline_seconds: float) -> bool:
        """Flush, and end the thread. What the database has not taken in time is replayed by the next ledger."""
        complete = self.flush(deadline_seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=0.2)
        return complete

    def _want(self, *, urgent: bool = False) -> int:
        with self._changed:
            self._wanted += 1
            self._urgent = self._urgent or urgent
            self._changed.notify_all()
            return self._wanted

    def _write_down(self) -> bool:
        if not self._unwritten:
            return True
        if self._most_bytes is not None:
            self._turn(self._most_bytes)
        try:
            jsonl.append(self._journal, self._unwritten, sync=True)
        except OSError as error:
            self.trouble = f"{self._journal} cannot be written: {error}"
            return False
        self._unwritten.clear()
        return True

    def _turn(self, most_bytes: int) -> None:
        """Begin a new journal where this one is too large. What fails here is tried again after the next event."""
        with contextlib.suppress(OSError):
            size = self._journal.stat().st_size
            if size > most_bytes * (1 if self._drain.reached >= size else 4):
                self._journal.replace(former(self._journal))
                self._drain.begin_anew()

    def _run(self) -> None:
        failures = 0
        while not self._closed:
            with self._changed:
                wanted, self._urgent = self._wanted, False
            failures = 0 if self._pass() else failures + 1
            with self._changed:
                if failures:
                    self._changed.wait_for(lambda: self._closed or self._urgent, self._pause(failures))
                    continue
                self._settled = wanted
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._wanted > self._settled)

    def _pause(self, failures: int) -> float:
        """Seconds until the next try: longer each time, short while somebody waits in `flush`, never in step."""
        longest = 0.5 if self._flushing else self._longest_wait
        return random.uniform(0.5, 1.0) * min(longest, 0.1 * 2.0 ** min(failures, 16))  # noqa: S311 - jitter is no secret

    def _pass(self) -> bool:
        """Bring the database up to date once. The only errors that are expected are the world's."""
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._writing:
                written = self._write_down()
            self._drain.run()
        except (SQLAlchemyError, OSError, ImportError) as error:
            self.trouble = str(error).splitlines()[0]
            return False
        if written:
            self.trouble = ""
        return written


def former(journal: Path) -> Path:
    """The journal before this one, where one has a limit: `events.1.jsonl`."""
    return journal.with_name(f"{journal.stem}.1{journal.suffix}")


def events(
    uri: str,
    *,
    job: str | None = None,
    run: str | None = None,
    kind: str | None = None,
    since: float | None = None,
    until: float | None = None,
    limit: int | None = None,
) -> list[Event]:
    """The events in a ledger's database that match, oldest first; with `limit` the newest so many.

    `since` and `until` are Unix seconds, the second one excluded. A ledger that nobody has written to yet is empty.
    """
    from everstep.host import event_table

    file = event_table.sqlite_file(uri)
    if file is not None and not Path(file).exists():
        return []
    return event_table.find(event_table.engine(uri), job=job, run=run, kind=kind, since=since, until=until, limit=limit)


def event_id(clock: Callable[[], float] = time.time) -> str:
    """A new id, 32 hex digits: milliseconds first, so that ids sort as they were made, then 80 random bits."""
    return f"{int(clock() * 1000) & 0xFFFFFFFFFFFF:012x}{random.SystemRandom().getrandbits(80):020x}"


class _Place(NamedTuple):
    """How far a database has a journal: the offset behind its last event there, and that event's id."""

    offset: int = 0
    last: str = ""


class _Drain:
    """Copies the journal's events into the database, from where it stands to the journal's last whole line."""

    def __init__(self, uri: str, journal: Path) -> None:
        self._uri = uri
        self._journal = journal
        self._mark = journal.with_name(f"{journal.name}.drained")
        self._ledger = hashlib.sha256(uri.encode()).hexdigest()[:16]
        self._engine: Engine | None = None

    @property
    def reached(self) -> int:
        """How many bytes of the journal the database has."""
        return self._read_mark().offset

    def begin_anew(self) -> None:
        """The journal is a new one."""
        self._mark.unlink(missing_ok=True)

    def run(self) -> None:
        from everstep.host import event_table

        engine = self._engine = self._engine or event_table.engine(self._uri)
        file = event_table.sqlite_file(self._uri)
        if file is not None:
            Path(file).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = self._read_mark()
        if place.last and not event_table.holds(engine, place.last):
            place = _Place()  # the database was deleted, or set back
        for batch, reached in self._batches(place):
            if batch:
                event_table.add(engine, batch)
            self._write_mark(reached)

    def _batches(self, place: _Place) -> Iterator[tuple[list[Event], _Place]]:
        try:
            file = self._journal.open("rb")
        except FileNotFoundError:
            return
        batch: list[Event] = []
        with file:
            file.seek(0, 2)
            file.seek(place.offset if place.offset <= file.tell() else 0)
            offset = file.tell()
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                batch += self._event(line)
                if len(batch) == BATCH:
                    place = _Place(offset, batch[-1].id)
                    yield batch, place
                    batch = []
        if offset != place.offset:
            yield batch, _Place(offset, batch[-1].id if batch else place.last)

    def _event(self, line: bytes) -> list[Event]:
        """The event in a line; none in a line that a killed writer has torn."""
        try:
            return [Event.parse(line, str(self._journal.parent), self._journal.name)]
        except Damaged:
            return []

    def _read_mark(self) -> _Place:
        try:
            mark = json.loads(self._mark.read_bytes())
            if mark["ledger"] == self._ledger:
                return _Place(int(mark["offset"]), str(mark["last"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass  # no mark, or none that can be read: the whole journal is offered again
        return _Place()

    def _write_mark(self, place: _Place) -> None:
        mark = {"ledger": self._ledger, "offset": place.offset, "last": place.last}
        atomic.write(self._mark, json.dumps(mark).encode(), sync=False)
