"""What is known of a run, as records: everything that reports and the JSON line are made from."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from everstep.core.checkpoint import AttemptClaim, Key, RunRecord, State, abandoned
from everstep.core.cutting import StepDone
from everstep.core.ledger import Event
from everstep.core.segment import SegmentResult
from everstep.core.timeline import Account, Bucket, Cut, Stretch, account, costs, stretches


class Row(NamedTuple):
    """A row of `metrics.jsonl`. `figures` has the numbers of the step, `evaluation` those of evaluate()."""

    attempt: int
    step: int
    time: float
    figures: dict[str, float]
    evaluation: dict[str, float]


@dataclass(frozen=True)
class Held:
    """A checkpoint on a tier. `torn` = never committed; `gone` = only its quarantine is left."""

    key: Key
    tier: str
    state: State
    reason: str = ""
    bytes: int = 0
    torn: bool = False
    gone: bool = False
    abandoned: bool = False


@dataclass(frozen=True)
class AttemptStory:
    """One attempt: where it began, how far it came, how it ended and what its end cost in seconds."""

    attempt: int
    resumed_from: int
    began: float
    host: str = ""
    outcome: str = "running"
    cause: str = ""
    step: int | None = None
    decision: str = ""
    cost: float = 0.0


@dataclass(frozen=True)
class Chronicle:
    """A run as its files tell it. `last_sign` is the newest moment of which anything is known."""

    record: RunRecord | None
    events: tuple[Event, ...]
    claims: dict[int, AttemptClaim]
    results: tuple[SegmentResult, ...]
    checkpoints: tuple[Held, ...]
    cuts: tuple[Cut, ...]
    resumed: dict[int, int]
    newest: Row | None
    evaluated: Row | None
    last_sign: float

    def line(self, end: float | None = None) -> list[Stretch]:
        """The time line up to `end` (Unix seconds), or up to the last sign of life."""
        return stretches(self.cuts, self.last_sign if end is None else end, self.resumed)

    def account(self, end: float | None = None) -> Account:
        """Where every second went."""
        return account(self.line(end))

    @property
    def status(self) -> str:
        """The word of the last `flow.ended` (or `object.complete`, which may come later), `running` after a `flow.started`."""
        kinds = ("flow.started", "flow.ended", "object.complete")
        last = next((event for event in reversed(self.events) if event.kind in kinds), None)
        return str(last.data.get("status", "ended")) if last and last.kind != "flow.started" else "running"

    @cached_property
    def last_metrics(self) -> dict[str, float]:
        """What the newest evaluation gave that still counts."""
        results = [one for one in self.results if not abandoned(Key(one.step, one.attempt), self.resumed)]
        newest = max((one for one in results if one.metrics), key=lambda one: one.step, default=None)
        if self.evaluated and (newest is None or self.evaluated.step > newest.step):
            return self.evaluated.evaluation
        return dict(newest.metrics) if newest else {}

    @cached_property
    def last_shown(self) -> str:
        """The text that the program gave at the newest segment's end that still counts; empty if it gives none."""
        results = [one for one in self.results if one.shown and not abandoned(Key(one.step, one.attempt), self.resumed)]
        return max(results, key=lambda one: one.step).shown if results else ""

    @property
    def restarts(self) -> int:
        """How many attempts were begun after one that had failed."""
        return sum(1 for one in self.attempts[:-1] if one.outcome == "failed")

    @property
    def samples_per_second(self) -> float | None:
        """Samples that count, by second of training that counts; None before the first."""
        seconds = self.account().buckets[Bucket.productive]
        samples = self.newest.figures.get("samples") if self.newest else None
        return samples / seconds if samples and seconds > 0 else None

    @cached_property
    def attempts(self) -> tuple[AttemptStory, ...]:
        """The story of each attempt, oldest first."""
        spent = costs(self.line())
        happened: dict[int, list[Event]] = {}
        for event in self.events:
            happened.setdefault(event.attempt, []).append(event)
        return tuple(
            _story(claim, happened.get(number, []), spent.get(number, 0.0))
            for number, claim in sorted(self.claims.items())
        )


def accepted(rows: Iterable[Row], resumed: Mapping[int, int]) -> list[Row]:
    """The rows that count, by step: for each step that of the last attempt that got past it."""
    left: dict[int, float] = {}
    best: dict[int, Row] = {}
    for row in rows:
        if row.attempt not in left:
            left[row.attempt] = min((step for later, step in resumed.items() if later > row.attempt), default=math.inf)
        if row.step > left[row.attempt]:
            continue
        if row.step not in best or row.attempt >= best[row.step].attempt:
            best[row.step] = row
    return [best[step] for step in sorted(best)]


def landmarks(rows: Iterable[Row], resumed: Mapping[int, int]) -> list[StepDone]:
    """The few rows that a time line needs: the steps from which attempts resumed, and each attempt's last one."""
    steps = set(resumed.values())
    last: dict[int, StepDone] = {}
    found = []
    for row in rows:
        done = StepDone(row.attempt, row.step, row.time)
        last[row.attempt] = done
        if row.step in steps:
            found.append(done)
    return found + [done for done in last.values() if done not in found]


def _story(claim: AttemptClaim, events: list[Event], cost: float) -> AttemptStory:
    outcome, cause, step, decision = "running", "", None, ""
    for event in events:
        if event.kind == "attempt.ended":
            outcome, cause, step = str(event.data.get("outcome", "")), event.text, event.step
        elif event.kind == "attempt.lost":
            outcome, cause, step = "lost", event.text or "its flow vanished", event.step
        elif event.kind == "decision.made":
            decision = str(event.data.get("next", ""))
            if outcome == "done" and decision not in ("", "finish"):  # its last checkpoint did not verify
                outcome, cause = "failed", event.text
    return AttemptStory(claim.attempt, claim.resumed_from, claim.time, claim.host, outcome, cause, step, decision, cost)
