"""Time accounting: where every second of a run went.

The time line of a run is cut at marks; each stretch belongs to exactly one bucket, so the buckets add up to the wall
time whatever was killed. A cut says what begins (`core.cutting` makes them from events and phases); `stretches` lays them
out, `account` adds them up. `lost_work` is training that a later attempt threw away.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Bucket(StrEnum):
    """Where time goes."""

    queued = "queued"
    stage = "stage"
    startup = "startup"
    restore = "restore"
    productive = "productive"
    eval = "eval"
    save_stall = "save_stall"
    gate = "gate"
    detect = "detect"
    recover = "recover"
    lost_work = "lost_work"
    stop = "stop"
    finalize = "finalize"
    idle = "idle"


@dataclass(frozen=True, order=True)
class Cut:
    """From `time` (Unix seconds) on, time belongs to `bucket`. `attempt` and `step` name the training that runs."""

    time: float
    order: int
    bucket: Bucket
    attempt: int = 0
    step: int = 0


@dataclass(frozen=True)
class Stretch:
    """A piece of the time line."""

    begin: float
    end: float
    bucket: Bucket
    attempt: int
    step: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Account:
    """Seconds by bucket, and what follows from them."""

    wall: float
    buckets: dict[Bucket, float]

    @property
    def ettr(self) -> float:
        """Effective training time ratio: productive / (wall - queued)."""
        paid = self.wall - self.buckets[Bucket.queued]
        return (
            min(1.0, self.buckets[Bucket.productive] / paid) if paid > 0 else 0.0
        )  # sums of floats may differ a little


def stretches(cuts: Iterable[Cut], end: float, resumed: Mapping[int, int]) -> list[Stretch]:
    """The time line from the first cut to `end`, each piece in one bucket.

    `resumed` maps each attempt to the step that it resumed from: a piece of training beyond the step from which a
    later attempt resumed was thrown away and is `lost_work`. An `end` before the last cut counts as at that cut.
    """
    ordered = sorted(cuts)
    line: list[Stretch] = []
    left = {cut.attempt: left_at(cut.attempt, resumed) for cut in ordered}
    for index, cut in enumerate(ordered):
        until = ordered[index + 1].time if index + 1 < len(ordered) else max(end, cut.time)
        bucket = cut.bucket
        if bucket is Bucket.productive and cut.step >= left[cut.attempt]:
            bucket = Bucket.lost_work
        line.append(Stretch(cut.time, until, bucket, cut.attempt, cut.step))
    return line


def left_at(attempt: int, resumed: Mapping[int, int]) -> float:
    """The step from which on later attempts repeated what `attempt` had trained; infinity if none did."""
    return min((start for later, start in resumed.items() if later > attempt), default=math.inf)


def account(line: Sequence[Stretch]) -> Account:
    """Seconds by bucket; they add up to the wall time by construction."""
    buckets = dict.fromkeys(Bucket, 0.0)
    for piece in line:
        buckets[piece.bucket] += piece.seconds
    wall = line[-1].end - line[0].begin if line else 0.0
    return Account(wall=wall, buckets=buckets)


def costs(line: Iterable[Stretch]) -> dict[int, float]:
    """Seconds that the end of each attempt cost: work thrown away, then detect, recover and restore until training."""
    return {attempt: sum(parts.values()) for attempt, parts in cost_parts(line).items()}


def cost_parts(line: Iterable[Stretch]) -> dict[int, dict[Bucket, float]]:
    """What the end of each attempt cost, by bucket."""
    spent: dict[int, dict[Bucket, float]] = {}
    trained = 0
    for piece in line:
        if piece.bucket in (Bucket.productive, Bucket.lost_work):
            trained = piece.attempt
        if piece.bucket is Bucket.lost_work or (piece.bucket in _COSTLY and trained):
            parts = spent.setdefault(trained, {})
            parts[piece.bucket] = parts.get(piece.bucket, 0.0) + piece.seconds
    return spent


_COSTLY = (Bucket.detect, Bucket.recover, Bucket.restore)
