"""From a run's events and its child's phases to the cuts of its time line."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.core.ledger import Event
from everstep.core.segment import Outcome, Phase, PhaseMark
from everstep.core.timeline import Bucket, Cut


class StepDone(NamedTuple):
    """A row of metrics as the time line sees it: this attempt had finished `step` at `time`."""

    attempt: int
    step: int
    time: float


def cuts(events: Iterable[Event], phases: Iterable[PhaseMark], steps: Iterable[StepDone] = ()) -> list[Cut]:
    """The marks of a run's time line, in order of time.

    `events` come in the order in which they were recorded. `steps` is optional: it shows how long a killed attempt lived, and cuts training exactly at the steps from which
    later attempts resumed. Total for any order of its inputs. The rules:

    - `run.created` (from its `queued_since`): queued, until `flow.started`: startup.
    - `stage.started`: stage, until `stage.finished`. `gate.waiting`: gate, until `gate.data`. `flow.stopping`: stop. `flow.finalizing`: finalize. `flow.ended`: idle.
    - phases of the child: see `_BUCKETS`; they count as they are, also after the flow is gone.
    - a failed attempt: detect from its last sign of life to the notice, then recover until the next trained step,
      except for the restore. So the start and compile of a *restarted* attempt count as recover, those of the first
      attempt of a flow run as startup.
    - a flow that vanished without `flow.ended`: detect from its last sign of life to the next `flow.started`, then recover.
    """
    events, phases, steps = list(events), list(phases), list(steps)
    line = _Line(
        deaths=_deaths(events, phases, steps), resumed=frozenset(resumed(events).values()), last_rows=_last_rows(steps)
    )
    points: list[tuple[float, _Point]] = [
        *((mark.time, mark) for mark in phases),
        *((row.time, row) for row in steps if row.step in line.resumed),
        *((death.time, death) for death in line.deaths.values()),
        *_in_order(events),
    ]
    for time, point in sorted(points, key=lambda pair: pair[0]):
        line.take(time, point)
    return line.cuts


def resumed(events: Iterable[Event]) -> dict[int, int]:
    """The step from which each attempt resumed, as `stretches` wants it.

    An attempt that ended beyond its newest commit and has no successor yet has lost what lies between: it stands here
    as if one had resumed from that commit.
    """
    claims: dict[int, int] = {}
    left: dict[int, int] = {}
    for event in events:
        if event.kind == "attempt.claimed":
            claims[event.attempt] = _whole(event.data.get("resumed_from"))
        elif event.kind == "attempt.ended" and "committed_step" in event.data:
            committed = _whole(event.data["committed_step"])
            if _failed(event) or committed < (event.step or 0):
                left[event.attempt + 1] = committed
    last = max(claims, default=0)
    return claims | {attempt: step for attempt, step in left.items() if attempt > last}


_BUCKETS = {
    Phase.start: Bucket.startup,
    Phase.restore: Bucket.restore,
    Phase.compile: Bucket.startup,
    Phase.train: Bucket.productive,
    Phase.save: Bucket.save_stall,
    Phase.eval: Bucket.eval,
    Phase.wait: Bucket.gate,
    Phase.stop: Bucket.stop,
}


_PLAIN = {
    "stage.started": Bucket.stage,
    "gate.waiting": Bucket.gate,
    "flow.stopping": Bucket.stop,
    "flow.finalizing": Bucket.finalize,
    "flow.ended": Bucket.idle,
}


class _Death(NamedTuple):
    """The last sign of life of a failed attempt."""

    attempt: int
    time: float


_Point = Event | PhaseMark | StepDone | _Death


@dataclass
class _Line:
    """Walks along the points of time and leaves cuts. `failing` = from the notice of a failure to the next step."""

    deaths: Mapping[int, _Death]
    resumed: frozenset[int]
    last_rows: Mapping[int, float]
    cuts: list[Cut] = field(default_factory=list)
    attempt: int = 0
    attempts_of_flow: int = 0
    open: bool = False
    failing: bool = False
    stopping: bool = False
    last_sign: float = 0.0
    marked: set[int] = field(default_factory=set)

    def take(self, time: float, point: _Point) -> None:
        match point:
            case Event():
                self._event(time, point)
            case PhaseMark():
                self._phase(time, point)
            case StepDone():
                if self._now is Bucket.productive and point.attempt == self.attempt:
                    self._cut(time, Bucket.productive, point.step)
            case _Death() if point.attempt == self.attempt:
                self._cut(time, Bucket.detect)
        self.last_sign = time

    @property
    def _now(self) -> Bucket | None:
        return self.cuts[-1].bucket if self.cuts else None

    @property
    def _starting(self) -> Bucket:
        return Bucket.recover if self.failing else Bucket.startup

    def _cut(self, time: float, bucket: Bucket, step: int = 0) -> None:
        time = max(time, self.cuts[-1].time) if self.cuts else time
        self.cuts.append(Cut(time, len(self.cuts), bucket, self.attempt, step))

    def _event(self, time: float, event: Event) -> None:
        match event.kind:
            case "run.created" if not self.open:
                self._cut(time, Bucket.queued)
            case "flow.started":
                self._flow_started(time)
            case "stage.finished" | "gate.data":
                self._cut(time, self._starting)
            case "attempt.claimed" | "attempt.started" if event.attempt not in self.marked:
                self._attempt_begins(time, event)
            case "attempt.noticed" | "attempt.ended" | "attempt.lost" if event.attempt == self.attempt:
                self._attempt_over(time, event)
            case "decision.made" if event.data.get("next") in ("restart", "walk_back"):
                self.failing = True
                self._cut(time, Bucket.recover)
            case _ if event.kind in _PLAIN:
                self.stopping = self.stopping or event.kind == "flow.stopping"
                self.open = self.open and event.kind != "flow.ended"
                self.failing = self.failing and self.open
                self._cut(time, _PLAIN[event.kind])

    def _flow_started(self, time: float) -> None:
        if self.open:
            self.failing = True
            if self._now is not Bucket.detect:
                alive = max(self.last_sign, min(self.last_rows.get(self.attempt, 0.0), time))
                self._cut(alive, Bucket.detect)
        self.open, self.stopping, self.attempts_of_flow = True, False, 0
        self._cut(time, self._starting)

    def _attempt_begins(self, time: float, event: Event) -> None:
        if event.attempt < self.attempt:
            return
        if event.attempt > self.attempt:
            self.failing = self.failing or self.attempts_of_flow > 0
            self.attempts_of_flow += 1
        self.attempt = event.attempt
        self._cut(time, self._starting, _whole(event.data.get("resumed_from")))

    def _attempt_over(self, time: float, event: Event) -> None:
        if event.attempt in self.deaths:
            self.failing = True
            self._cut(time, Bucket.stop if self.stopping else Bucket.recover)
        elif event.kind == "attempt.ended":
            stopped = event.data.get("outcome") == Outcome.stopped
            self._cut(time, Bucket.stop if stopped else Bucket.finalize)

    def _phase(self, time: float, mark: PhaseMark) -> None:
        if mark.attempt < self.attempt:
            return
        self.attempt = mark.attempt
        self.marked.add(mark.attempt)
        bucket = _BUCKETS[mark.phase]
        if bucket is Bucket.productive:
            self.failing = False
        self._cut(time, self._starting if bucket is Bucket.startup else bucket, mark.step)


def _deaths(events: Sequence[Event], phases: Sequence[PhaseMark], steps: Sequence[StepDone]) -> dict[int, _Death]:
    """The last sign of life of each attempt that failed: as the event says, else its last phase mark or row."""
    signs: dict[int, float] = {}
    for attempt, time in (*((mark.attempt, mark.time) for mark in phases), *((row.attempt, row.time) for row in steps)):
        signs[attempt] = max(time, signs.get(attempt, time))
    noticed = {event.attempt: event.time for event in events if event.kind == "attempt.noticed"}
    deaths: dict[int, _Death] = {}
    for event in events:
        if event.kind == "attempt.lost" or (event.kind == "attempt.ended" and _failed(event)):
            alive = _seconds(event.data.get("last_seen"), signs.get(event.attempt, event.time))
            latest = min(event.time, noticed.get(event.attempt, event.time))
            deaths[event.attempt] = _Death(event.attempt, min(alive, latest))
    return deaths


def _failed(ended: Event) -> bool:
    return ended.data.get("outcome") not in (Outcome.done, Outcome.stopped)


def _last_rows(steps: Iterable[StepDone]) -> dict[int, float]:
    rows: dict[int, float] = {}
    for row in steps:
        rows[row.attempt] = max(row.time, rows.get(row.attempt, row.time))
    return rows


def _in_order(events: Iterable[Event]) -> Iterator[tuple[float, Event]]:
    """Events with the moment at which each takes effect.

    A run counts from the moment at which it was asked for. A flow that waited for another one to leave began before
    that one ended, but the time was the other's: nothing that was recorded after an end takes effect before it.
    """
    ended = -math.inf
    for event in events:
        time = max(event.time, ended)
        if event.kind == "run.created":
            time = min(time, _seconds(event.data.get("queued_since"), time))
        if event.kind == "flow.ended":
            ended = time
        yield time, event


def _seconds(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else otherwise


def _whole(value: object) -> int:
    return int(_seconds(value, 0.0))
