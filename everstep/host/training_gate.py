"""The training gate of a segment: reads what the run left on disk, in bounded time, and asks `core.training_gates`.

It waits for nothing but the disk.
"""

import time
from collections.abc import Mapping, Sequence

from everstep.core.check import GateReport
from everstep.core.checkpoint import AttemptClaim
from everstep.core.errors import Damaged
from everstep.core.job import TrainJob
from everstep.core.segment import Heartbeat, SegmentResult
from everstep.core.training_gates import DEFAULT, TrainingGates, TrainingSeen, judge
from everstep.host import cadence, history, step_rows
from everstep.store import jsonl
from everstep.store.layout import RunPlaces

EVENT_BYTES = 256 * 1024
STALE_SECONDS = 60.0  # a heartbeat comes four times a second; what an older one says is no news


def look(
    places: RunPlaces,
    job: TrainJob,
    result: SegmentResult,
    *,
    weights_finite: bool | None,
    heartbeats: Sequence[Heartbeat | None],
    now: float,
    policy: TrainingGates = DEFAULT,
) -> GateReport:
    """What the training gates say of the segment that ended with `result`.

    `weights_finite` is what verification of the segment's checkpoint found, None before it. `heartbeats` are the ranks'
    newest, None for one that cannot be read; `now` is the time (Unix seconds). Raises OSError where the run directory
    cannot be read: then nothing is known, which is no failure of the training.
    """
    began = time.perf_counter()
    claims = {number: one for number, one in history.claims(places).items() if number <= result.attempt}
    resumed = {number: one.resumed_from for number, one in claims.items()}
    rows, scaled = step_rows.read(places.metrics, result.attempt, resumed)
    seen = TrainingSeen(
        rows=rows,
        resumed=resumed,
        alike=_alike(places, claims, result.attempt),
        since=_since(places, result),
        steps=job.steps,
        saves=tuple(cadence.saves(places)),
        work=_work(heartbeats, result.attempt, now),
        weights_finite=weights_finite,
        scaled=scaled,
    )
    checks = judge(seen, policy)
    return GateReport(
        gate="training",
        time=now,
        seconds=time.perf_counter() - began,
        step=result.step,
        segment=result.segment,
        checks=checks,
    )


def _since(places: RunPlaces, result: SegmentResult) -> int:
    """The step after which the segment began: where the one before it ended, as far as that is known."""
    path = places.result(result.segment - 1)
    try:
        before = SegmentResult.parse(path.read_bytes(), str(path.parent), path.name)
    except (FileNotFoundError, Damaged):
        return 0
    return before.step if before.step < result.step else 0


def _work(heartbeats: Sequence[Heartbeat | None], attempt: int, now: float) -> dict[int, float | None]:
    """Each rank's own work, as far as its heartbeat is one of this attempt and fresh."""
    found: dict[int, float | None] = {}
    for rank, beat in enumerate(heartbeats):
        fresh = beat is not None and beat.attempt == attempt and now - beat.time <= STALE_SECONDS
        found[rank] = beat.work_seconds if beat is not None and fresh else None
    return found


def _alike(places: RunPlaces, claims: Mapping[int, AttemptClaim], newest: int) -> frozenset[int]:
    """The attempts that ran on the newest one's machine with as many ranks, by claims and events."""
    ranks: dict[int, int] = {}
    for row in jsonl.read(places.events, EVENT_BYTES):
        if not isinstance(row, dict) or row.get("kind") != "attempt.started":
            continue
        attempt, data = row.get("attempt"), row.get("data")
        pids = data.get("pids") if isinstance(data, dict) else None
        if isinstance(attempt, int) and isinstance(pids, list):
            ranks[attempt] = len(pids)
    mine = claims.get(newest)
    if mine is None or newest not in ranks:
        return frozenset()
    return frozenset(
        number
        for number, one in claims.items()
        if number < newest and one.host == mine.host and ranks.get(number) == ranks[newest]
    )
