"""Finds out what saves and failures cost a run, and keeps its rhythm of saves fitting: `checkpoint.every: auto`.

A thread of its own looks, so that neither a slow disk nor a database that is away holds up supervision. What it chose
last stands in `seconds`; the supervisor puts that into the lease, and the ranks hear it there. Each choice is an event
`cadence.chosen` with all that it rests on.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from everstep.core import cadence
from everstep.core.cadence import Cadence, Input, Inputs
from everstep.core.checkpoint import SaveCost
from everstep.core.chronicle import Chronicle
from everstep.core.errors import EverstepError
from everstep.core.health import Severity
from everstep.core.job import TrainJob
from everstep.core.ledger import Event
from everstep.core.reliability import Fleet, mean_time, seen
from everstep.core.timeline import Bucket, cost_parts
from everstep.core.words import count
from everstep.host import history, ledger
from everstep.store import checkpoint, jsonl
from everstep.store.layout import RunPlaces

LOOK_SECONDS = 2.0
QUIET_SECONDS = 0.5
"""After an attempt's begin the ranks' restart comes first; what held before holds on meanwhile."""
HISTORY_SECONDS = 60.0
LEDGER_SECONDS = 600.0
LEDGER_DAYS = 180
LEDGER_EVENTS = 20_000
NEWEST = 20
NEWEST_BYTES = 1 << 16
RECOVERY = Input(seconds=60.0, source="assumed, for this run has not recovered from a failure yet")
DETECTION = Input(seconds=5.0, source="assumed: a death is noticed within a second, on a busy machine within a few")
_LIVING = (Bucket.productive, Bucket.lost_work, Bucket.save_stall, Bucket.eval)


@dataclass(frozen=True)
class Past:
    """What a run's own history says: how long failures took to be noticed and mended, and how often it broke."""

    detection: Input
    recovery: Input
    lived: Fleet

    @classmethod
    def of(cls, past: Chronicle, attempt: int) -> "Past":
        """Means over the failures that the run has recovered from, when `attempt` is the one that runs."""
        seconds = past.account().buckets
        hours = sum(seconds[bucket] for bucket in _LIVING) / 3600
        broken = Fleet(failures=seen(past.events).failures, node_hours=hours)
        trains = past.newest is not None and past.newest.attempt >= attempt
        mended = attempt if trains else attempt - 1
        parts = [spent for number, spent in cost_parts(past.line()).items() if number < mended]
        if not parts:
            return cls(DETECTION, RECOVERY, broken)
        source = f"measured, the mean of {count(len(parts), 'failure')} of this run"
        noticed = sum(spent.get(Bucket.detect, 0.0) for spent in parts) / len(parts)
        again = sum(spent.get(Bucket.recover, 0.0) + spent.get(Bucket.restore, 0.0) for spent in parts) / len(parts)
        return cls(Input(seconds=noticed, source=source), Input(seconds=again, source=source), broken)


class Pacer:
    """The rhythm of one run's saves. `seconds` is None until something was chosen, and for a job with its own rhythm."""

    def __init__(self, job: TrainJob, places: RunPlaces, ledger_uri: str, record: Callable[..., None]) -> None:
        self.chosen: Cadence | None = None
        self._job = job
        self._places = places
        self._ledger_uri = ledger_uri
        self._record = record
        self._attempt = 0
        self._told = 0
        self._wake = threading.Event()
        self._over = threading.Event()
        self._costs: object = None
        self._trouble = ""
        self._fleet, self._fleet_at = Fleet(), -LEDGER_SECONDS
        self._past: Past | None = None
        self._past_of, self._past_at = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="everstep-cadence", daemon=True)

    @property
    def seconds(self) -> float | None:
        """The interval that holds now."""
        return self.chosen.seconds if self.chosen else None

    def begin(self, attempt: int) -> None:
        """An attempt begins: look at everything anew."""
        if not self._job.checkpoint.is_auto:
            return
        self._attempt = attempt
        if self._thread.ident is None:
            self._thread.start()
        self._wake.set()

    def ask(self) -> None:
        """A segment has ended: look again."""
        self._wake.set()

    def close(self) -> None:
        """End the thread; one that hangs on a disk is left to the process's end."""
        self._over.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=0.5)

    def look(self) -> Cadence:
        """Choose by what is known now, and say so if that is another choice, or the attempt's first."""
        attempt = self._attempt
        chosen = cadence.choose(self._inputs(attempt))
        if attempt != self._told or cadence.differs(chosen, self.chosen):
            self.chosen = chosen
            self._told = attempt
            told = chosen.model_dump(mode="json", exclude={"seconds"})
            self._record("cadence.chosen", text=cadence.sentence(chosen), seconds=chosen.seconds, **told)
        return chosen

    def _inputs(self, attempt: int) -> Inputs:
        """All that a choice rests on, as the run's files and the ledger tell it now."""
        past = self._read_past(attempt)
        known, unheard = self._ask_ledger()
        mean = mean_time(known, past.lived, self._job.nodes, self._job.ranks)
        rows = saves(self._places)
        return Inputs(
            stall=stall(rows),
            write=_written(rows),
            copied=_copied(self._places),
            recovery=past.recovery,
            detection=past.detection,
            failure=Input(seconds=mean.seconds, source=mean.source + unheard),
            saved=any(checkpoint.find(self._places.checkpoints(tier))[0] for tier in self._places.tiers),
        )

    def _read_past(self, attempt: int) -> "Past":
        """A long run's history is long: it is read at an attempt's begin, and then once in a while."""
        if self._past is None or attempt != self._past_of or time.monotonic() - self._past_at >= HISTORY_SECONDS:
            self._past = Past.of(history.read(self._places), attempt)
            self._past_of, self._past_at = attempt, time.monotonic()
        return self._past

    def _ask_ledger(self) -> tuple[Fleet, str]:
        """What the fleet saw; an answer holds for some minutes. A ledger that is away is said, and costs nothing else."""
        from sqlalchemy.exc import SQLAlchemyError

        if time.monotonic() - self._fleet_at >= LEDGER_SECONDS:
            try:
                self._fleet = fleet(self._ledger_uri)
            except (SQLAlchemyError, OSError, ImportError, ValueError):
                return self._fleet, "; the ledger does not answer now"
            self._fleet_at = time.monotonic()
        return self._fleet, ""

    def _run(self) -> None:
        while True:
            asked = self._wake.wait(LOOK_SECONDS)
            self._wake.clear()
            if self._over.wait(QUIET_SECONDS if asked else 0.0):
                return
            try:
                costs = self._version()
                if asked or costs != self._costs:
                    self.look()
                    self._costs, self._trouble = costs, ""
            except (OSError, EverstepError) as error:  # what holds goes on holding; it is said once
                if not self._trouble:
                    self._record("cadence.unknown", severity=Severity.medium, text=str(error))
                self._trouble = str(error)

    def _version(self) -> object:
        """Another value when a save has been measured."""
        try:
            stat = self._places.saves.stat()
        except FileNotFoundError:
            return None
        return stat.st_mtime_ns, stat.st_size


def fleet(uri: str) -> Fleet:
    """What the ledger's database knows of all runs of the last half year. Raises what the database raises."""
    events: list[Event] = []
    since = time.time() - LEDGER_DAYS * 86400
    for kind in ("attempt.started", "attempt.ended", "attempt.lost"):
        events += ledger.events(uri, kind=kind, since=since, limit=LEDGER_EVENTS)
    return seen(events)


def saves(places: RunPlaces) -> list[SaveCost]:
    """What the newest saves cost, oldest first. Rows of another version or none are passed over.

    The first save of an attempt makes its buffers: it counts only where there is no other.
    """
    found = []
    for row in jsonl.read(places.saves, NEWEST_BYTES):
        try:
            cost = SaveCost.model_validate(row)
        except ValidationError:
            continue
        if cost.schema_version == SaveCost.VERSION:
            found.append(cost)
    later = [row for before, row in pairwise(found) if row.attempt == before.attempt]
    return (later or found)[-NEWEST:]


def stall(rows: list[SaveCost]) -> Input | None:
    """The usual stall."""
    if not rows:
        return None
    source = f"measured, the median of {count(len(rows), 'save')}"
    return Input(seconds=cadence.usual([row.stall_seconds for row in rows]), source=source)


def _written(rows: list[SaveCost]) -> Input | None:
    if not rows:
        return None
    source = f"measured, nine in ten of {count(len(rows), 'save')}"
    return Input(seconds=cadence.slow([row.write_seconds for row in rows]), source=source)


def _copied(places: RunPlaces) -> Input | None:
    """Only the copy to the persistent tier is kept up with: on the way to the object tier what is overtaken is left out."""
    rows = jsonl.read(_copier_log(places), NEWEST_BYTES)
    took = [
        float(row["seconds"])
        for row in rows
        if isinstance(row, dict)
        and (row.get("kind"), row.get("tier")) == ("checkpoint.durable", "persistent")
        and isinstance(row.get("seconds"), int | float)
        and row["seconds"] >= 0
    ][-NEWEST:]
    if not took:
        return None
    return Input(seconds=cadence.slow(took), source=f"measured, nine in ten of {count(len(took), 'copy', 'copies')}")


def _copier_log(places: RunPlaces) -> Path:
    return places.persistent / "copier.jsonl"
