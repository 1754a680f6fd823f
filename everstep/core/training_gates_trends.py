"""Training gates that look at a run over time: plateau, throughput, save time. Pure. See `training_gates`."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, variance
from typing import NamedTuple

from everstep.core.check import Check, Figure, failed, not_measured, passed
from everstep.core.training_gates_seen import DEFAULT, StepSeen, TrainingGates, TrainingSeen, middle_of, spread
from everstep.core.words import count, duration, figure

PARTS = 8  # of a window of losses, for the error of its mean: losses of neighbouring steps are not independent
ROWS = 20  # of each part at least
BLOCK = 10  # steps whose speed is taken together: a host runs ahead of its GPU, so single steps tell little


def plateau(seen: TrainingSeen, policy: TrainingGates = DEFAULT) -> Check:
    """Whether the smoothed loss still falls. A run that has converged fails: more steps gain nothing.

    Two windows side by side are compared, each a quarter of the run and a thousand steps at least. Where the noise is
    greater than the gain that is asked for, nothing is measured, unless the loss has risen for sure.
    """
    name = "plateau"
    if policy.plateau_steps is None:
        return not_measured(name, "none: the policy lets a loss stand still", "the policy asks for nothing")
    rows = seen.accepted
    last = rows[-1].step if rows else 0
    window = max(policy.plateau_steps, math.ceil(policy.plateau_share * max(seen.steps or 0, last)))
    rule = f"the smoothed loss of the last {window:,} steps is over {policy.plateau_gain:.1%} lower than before them"
    if last < 2 * window:
        return not_measured(name, rule, f"that takes {2 * window:,} steps, and there are {last:,}", window_steps=window)
    earlier, newer = _smoothed(rows, last - 2 * window, window), _smoothed(rows, last - window, window)
    if earlier is None or newer is None:
        return not_measured(name, rule, "too few rows of these steps were read", window_steps=window)
    before, now = math.fsum(earlier) / PARTS, math.fsum(newer) / PARTS
    if not math.isfinite(before):
        return not_measured(name, rule, "the loss before was no number", window_steps=window)
    if not math.isfinite(now):
        return failed(name, rule, "the loss is no number", loss_before=before, window_steps=window)
    error = math.sqrt((variance(earlier) + variance(newer)) / PARTS)
    least = policy.plateau_gain * abs(before)
    figures: dict[str, Figure] = {"loss_before": before, "loss_now": now, "error": error, "window_steps": window}
    if before - now > least:
        return passed(name, rule, "", **figures)
    if error > least and now - before <= 3 * error:
        return not_measured(name, rule, f"the noise of the loss, {figure(error)}, hides so small a gain", **figures)
    why = f"the loss was {figure(before)} and is {figure(now)}, with no gain in {window:,} steps"
    return failed(name, rule, why, **figures)


def _smoothed(rows: Sequence[StepSeen], after: int, window: int) -> list[float] | None:
    """The median loss of each part of the steps after that one; None where a part has too few rows."""
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for row in rows:
        if after < row.step <= after + window:
            parts[(row.step - after - 1) * PARTS // window].append(row.loss)
    if min(map(len, parts)) < ROWS:
        return None
    return [middle_of(part) for part in parts]


class _Block(NamedTuple):
    """Some steps together: when they ended, and their samples a second."""

    time: float
    rate: float


def throughput(seen: TrainingSeen, policy: TrainingGates = DEFAULT) -> Check:
    """Whether samples a second are what they were before, in this attempt or in earlier ones that were like it.

    Steps with a save or an evaluation in them are left out, and of ten others the slowest. The drop must hold all through the newest window, and be
    larger than the noise explains.
    """
    name = "throughput"
    rule = (
        f"the median samples a second of the newest {policy.throughput_steps:,} steps and "
        f"{duration(policy.throughput_seconds)} are at least {policy.throughput_share:.0%} of the median before them"
    )
    mine = _blocks(seen, seen.newest, policy)
    begin = _window(mine, policy)
    if begin is None:
        return not_measured(name, rule, "the newest attempt is too young for a window")
    newest = mine[begin:]
    earlier = [one.rate for attempt in seen.alike for one in _blocks(seen, attempt, policy)]
    before = earlier + [one.rate for one in mine[:begin]]
    if len(before) * BLOCK < policy.baseline_steps:
        return not_measured(name, rule, f"{len(before) * BLOCK:,} steps before the newest window are no baseline")
    rates = [one.rate for one in newest]
    usual, now, noise = median(before), median(rates), spread(before)
    # 1.2533: the standard error of a median is so much larger than that of a mean
    error = 1.2533 * noise * math.sqrt(1 / len(before) + 1 / len(rates))
    limit = min(policy.throughput_share * usual, usual - 3 * error)
    figures: dict[str, Figure] = {
        "samples_per_second": now,
        "baseline_samples_per_second": usual,
        "share": now / usual if usual else 1.0,
        "window_seconds": newest[-1].time - newest[0].time,
        "baseline_blocks": len(before),
    }
    if all(median(part) < limit for part in [rates, *_thirds(newest)]):
        why = f"{figure(now)} samples a second, {1 - now / usual:.0%} below the {figure(usual)} of before"
        return failed(name, rule, why, **figures)
    return passed(name, rule, "", **figures)


def _blocks(seen: TrainingSeen, attempt: int, policy: TrainingGates) -> list[_Block]:
    """An attempt's steps by the ten, oldest first, without its first steps."""
    saved = {one.step for one in seen.saves if one.attempt == attempt}
    warm = seen.resumed.get(attempt, 0) + policy.warm_steps
    steps = []
    for before, row in pairwise(seen.by_attempt.get(attempt, [])):
        seconds, samples = row.time - before.time, row.samples - before.samples
        if row.step != before.step + 1 or before.step < warm or row.evaluated or before.step in saved:
            continue
        if seconds > 0 and samples > 0:  # a clock may be set back
            steps.append((row.time, seconds, samples))
    first = len(steps) % BLOCK
    return [_block(steps[at : at + BLOCK]) for at in range(first, len(steps), BLOCK)]


def _block(steps: Sequence[tuple[float, float, float]]) -> _Block:
    """`steps`: time, seconds, samples. The slowest one is left out: it may have a pause in it that no row tells of."""
    kept = sorted(steps, key=lambda one: one[1] / one[2])[:-1]
    return _Block(steps[-1][0], math.fsum(one[2] for one in kept) / math.fsum(one[1] for one in kept))


def _window(blocks: Sequence[_Block], policy: TrainingGates) -> int | None:
    """Where the newest window begins: it has enough steps, and is long enough."""
    for begin in range(len(blocks) - 1, -1, -1):
        long = blocks[-1].time - blocks[begin].time >= policy.throughput_seconds
        if long and (len(blocks) - begin) * BLOCK >= policy.throughput_steps:
            return begin
    return None


def _thirds(blocks: Sequence[_Block]) -> list[list[float]]:
    """The speeds in each third of the time, where there are any."""
    begin, length = blocks[0].time, blocks[-1].time - blocks[0].time
    parts: list[list[float]] = [[], [], []]
    for one in blocks:
        parts[min(2, int(3 * (one.time - begin) / length)) if length > 0 else 0].append(one.rate)
    return [part for part in parts if part]


def save_time(seen: TrainingSeen, policy: TrainingGates = DEFAULT) -> Check:
    """Whether saves take longer and longer, from their beginning to their commit.

    A trend is what Mann and Kendall's test says, with the slope of Theil and Sen; a state that has grown may take longer.
    """
    name = "save_time"
    rule = (
        f"save times have no trend (Mann-Kendall, z over {policy.trend_z:g}) by which they have grown by over "
        f"{policy.save_growth:.0%} and {duration(policy.save_seconds)}"
    )
    rows = sorted(seen.saves, key=lambda one: (one.attempt, one.step, one.time))
    if len(rows) < policy.saves_least:
        why = f"{count(len(rows), 'save')}, and a trend takes {policy.saves_least}"
        return not_measured(name, rule, why, saves=len(rows))
    usual = median(one.bytes for one in rows)
    seconds = [
        (one.stall_seconds + one.write_seconds) * (usual / one.bytes if one.bytes and usual else 1.0) for one in rows
    ]
    score = _mann_kendall(seconds)
    growth = (len(rows) - 1) * _slope(seconds)
    begin = median(seconds[: max(3, len(rows) // 3)])
    figures: dict[str, Figure] = {
        "saves": len(rows),
        "first_seconds": begin,
        "growth_seconds": growth,
        "trend_z": score,
    }
    if score > policy.trend_z and growth > max(policy.save_seconds, policy.save_growth * begin):
        why = f"saves took {duration(begin)} and have grown by {duration(growth)} over {len(rows)} of them"
        return failed(name, rule, why, **figures)
    return passed(name, rule, "", **figures)


def _mann_kendall(values: Sequence[float]) -> float:
    """The score z of the test; ties make it smaller, never greater."""
    size = len(values)
    total = sum((later > one) - (later < one) for at, one in enumerate(values) for later in values[at + 1 :])
    return (total - (total > 0) + (total < 0)) / math.sqrt(size * (size - 1) * (2 * size + 5) / 18)


def _slope(values: Sequence[float]) -> float:
    """The median slope of all pairs, by place."""
    places = range(len(values))
    return median((values[later] - values[at]) / (later - at) for at in places for later in places[at + 1 :])
