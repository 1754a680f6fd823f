"""How often to save: the interval that loses the least, from what saving, failing and recovering cost here.

T = C + sqrt(2 (M + R) C + C^2), from one save's beginning to the next one's, with the stall C of a save, the mean time
to failure M and the recovery time R; all in seconds. It maximises the availability (1 - C/T) M / (M + R + T/2): of each
interval C is lost, and each failure costs R and half an interval of work (Saxena, Hukerikar, Blaz, Raj: "Optimal
Checkpoint Interval with Availability as an Objective Function", NVIDIA, arXiv:2410.18124).
"""

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

from pydantic import Field, ValidationError

from everstep.core import words
from everstep.core.ledger import Event
from everstep.core.record import Record

LONGEST_SECONDS = 30 * 60.0
FIRST_SECONDS = 60.0
DUTY = 0.8
"""The writer and the copier may be busy for so much of the time: the rest is for what is slower than usual."""
MUCH = 0.25
"""A choice that differs by less from the one in force is not worth a word."""


class Bound(StrEnum):
    """What held the interval."""

    none = "none"
    longest = "longest"
    writer = "writer"
    detection = "detection"
    first = "first"


_HELD = {
    Bound.none: "nothing held it",
    Bound.longest: "it is held at 30 minutes: more work than that is never at risk",
    Bound.writer: "it is held up by writing and copying, which must keep up",
    Bound.detection: "it is held up by the time that it takes to notice a failure",
    Bound.first: "no save has been measured yet: the first one comes early, to measure it",
}


class Input(Record):
    """A length of time in seconds, and where it comes from, in words."""

    seconds: float = Field(ge=0, allow_inf_nan=False)
    source: str


class Inputs(Record):
    """What the choice rests on. `stall` and `write` are None before a save was measured.

    `stall`: what the training thread waits in a save. `write`: from a save's beginning to its commit. `copy`: from a
    local commit to a durable copy on the persistent tier. `recovery`: from the notice of a failure to the next trained
    step, and `detection` from the last sign of life to that notice. `failure`: mean time between two failures.
    """

    stall: Input | None = None
    write: Input | None = None
    copied: Input | None = None
    recovery: Input
    detection: Input
    failure: Input
    saved: bool = Field(False, description="Whether the run has saved already, measured or not.")


class Cadence(Record):
    """A choice: save every `seconds`. `optimum` is the formula's answer before any bound, None without a stall.

    `loss` is the share of time that saving, redone work and recovery are expected to cost at this rhythm.
    """

    seconds: float = Field(gt=0, allow_inf_nan=False)
    optimum: float | None = None
    bound: Bound
    loss: float = Field(0.0, ge=0, le=1)
    inputs: Inputs

    @property
    def held(self) -> str:
        """What held the interval, in words."""
        return _HELD[self.bound]


ASSUMED_STALL = Input(seconds=1.0, source="assumed, for no save of this run has told what it cost")


def optimum(stall: float, recovery: float, failure: float) -> float:
    """The formula of the module; seconds."""
    return stall + math.sqrt(2 * (failure + recovery) * stall + stall**2)


def availability(interval: float, stall: float, recovery: float, failure: float) -> float:
    """The share of time that trains what counts, if the job saves every `interval` seconds."""
    return max(0.0, 1 - stall / interval) * failure / (failure + recovery + interval / 2)


def choose(inputs: Inputs) -> Cadence:
    """The rhythm of saves.

    Never over 30 minutes, and never shorter than detection. Never faster than writer and copier keep up: that goes
    before the 30 minutes, because a save that takes longer to write is not there any earlier for being asked for.
    """
    floor = max(one.seconds if one else 0.0 for one in (inputs.write, inputs.copied)) / DUTY
    if inputs.stall is None and not inputs.saved:
        return _made(max(FIRST_SECONDS, floor), None, Bound.first, inputs)
    stall = inputs.stall or ASSUMED_STALL
    best = optimum(stall.seconds, inputs.recovery.seconds, inputs.failure.seconds)
    seconds, bound = best, Bound.none
    if seconds < inputs.detection.seconds:
        seconds, bound = inputs.detection.seconds, Bound.detection
    if seconds > LONGEST_SECONDS:
        seconds, bound = LONGEST_SECONDS, Bound.longest
    if seconds < floor:
        seconds, bound = floor, Bound.writer
    return _made(seconds, best, bound, inputs.model_copy(update={"stall": stall}))


def differs(new: Cadence, old: Cadence | None) -> bool:
    """Whether a new choice is another one, and not the same with a little noise in it."""
    if old is None or (new.bound is not old.bound and Bound.first in (new.bound, old.bound)):
        return True
    return abs(new.seconds - old.seconds) > MUCH * min(new.seconds, old.seconds)


def sentence(chosen: Cadence) -> str:
    """The choice as one says it: how often, what was best, what held it, and what it is expected to cost."""
    said = f"a save every {words.duration(chosen.seconds)}"
    if chosen.bound is Bound.none:
        said += ", which loses the least"
    elif chosen.optimum is not None:
        said += f"; {words.duration(chosen.optimum)} would lose the least, but {chosen.held}"
    else:
        said += f": {chosen.held}"
    if chosen.inputs.stall is None:
        return said
    return f"{said}. Saves, redone work and recovery are expected to cost {words.share(chosen.loss, 1.0)} of the time"


def told(inputs: Inputs) -> list[tuple[str, str, str]]:
    """Each input that is known: its name, its length, and where it comes from."""
    rows = (
        ("a save stalls training for", inputs.stall),
        ("a save is written in", inputs.write),
        ("a copy to the persistent tier takes", inputs.copied),
        ("a failure comes every", inputs.failure),
        ("a failure is noticed within", inputs.detection),
        ("recovery takes", inputs.recovery),
    )
    return [(name, _length(one.seconds), one.source) for name, one in rows if one is not None]


def newest(events: Iterable[Event]) -> Cadence | None:
    """The choice that a run made last, as its events tell it; None without one."""
    found = None
    for event in events:
        if event.kind == "cadence.chosen":
            try:
                found = Cadence.model_validate(event.data)
            except ValidationError:
                continue
    return found


def usual(values: Sequence[float]) -> float:
    """The median, which one hiccup does not move."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def slow(values: Sequence[float]) -> float:
    """The value that nine in ten do not exceed: what is to be kept up with."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]


def _length(seconds: float) -> str:
    return words.duration(seconds) if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"


def _made(seconds: float, best: float | None, bound: Bound, inputs: Inputs) -> Cadence:
    stall, failure = inputs.stall, inputs.failure
    least = 1e-3  # a clock is no finer, and an interval of nothing is none
    seconds = max(seconds, least)
    lost = 0.0
    if stall is not None and failure.seconds > 0:
        lost = 1 - availability(seconds, stall.seconds, inputs.recovery.seconds, failure.seconds)
    return Cadence(seconds=seconds, optimum=best, bound=bound, loss=min(1.0, max(0.0, lost)), inputs=inputs)
