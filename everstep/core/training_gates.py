"""Training gates: whether a training still trains, from its metrics, restores, saves and ranks. Pure.

Each check says pass, fail or not measured, with figures and its rule. None fails by one noisy value: medians are compared,
and a fault must last. What is worse never gets a better answer, and the order of rows does not matter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from everstep.core.check import Check, Figure, failed, not_measured, passed
from everstep.core.training_gates_seen import (
    DEFAULT,
    StepSeen,
    TrainingGates,
    TrainingSeen,
    middle_of,
    spread,
)
from everstep.core.training_gates_trends import plateau, save_time, throughput
from everstep.core.words import count, figure

NEAR = 1000  # steps before and after a restore: what is farther away may differ for other reasons

__all__ = ["DEFAULT", "StepSeen", "TrainingGates", "TrainingSeen", "judge"]


def judge(seen: TrainingSeen, policy: TrainingGates = DEFAULT) -> tuple[Check, ...]:
    """All checks, in the order in which a person would ask."""
    return (
        finite_loss(seen, policy),
        finite_gradients(seen, policy),
        finite_weights(seen),
        loss_after_restore(seen, policy),
        gradient_norm_after_restore(seen, policy),
        plateau(seen, policy),
        throughput(seen, policy),
        slow_rank(seen, policy),
        save_time(seen, policy),
    )


def finite_loss(seen: TrainingSeen, policy: TrainingGates = DEFAULT) -> Check:
    """Whether every loss of the segment is a number."""
    values = [(row.step, row.loss) for row in seen.accepted if row.step > seen.since]
    return _finite("finite_loss", "loss", values, seen, policy)


def finite_gradients(seen: TrainingSeen, policy: TrainingGates = DEFAULT) -> Check:
    """Whether every gradient norm of the segment is a number. With a scaler a few that are not are skipped steps."""
    norms = [(row.step, row.grad_norm) for row in seen.accepted if row.step > seen.since and row.grad_norm is not None]
    return _finite("finite_gradients", "gradient norm", norms, seen, policy)


def _finite(
    name: str, what: str, values: Sequence[tuple[int, float]], seen: TrainingSeen, policy: TrainingGates
) -> Check:
    rule = f"every {what} of the segment is a finite number"
    limit = 1
    if seen.scaled:
        limit = policy.skips_in_a_row
        rule = f"fewer than {limit} in a row that are no finite number, as a gradient scaler skips such steps"
    if not values:
        return not_measured(name, rule, f"no {what} of the segment was recorded")
    bad = [(step, value) for step, value in values if not math.isfinite(value)]
    longest = max((len(list(run)) for fine, run in groupby(values, _is_finite) if not fine), default=0)
    figures: dict[str, Figure] = {"measured": len(values), "not_finite": len(bad), "longest_run": longest}
    if longest < limit:
        return passed(name, rule, "", **figures)
    step, value = bad[0]
    why = f"the {what} is {value!r} in step {step:,}, and not finite in {len(bad):,} of {count(len(values), 'value')}"
    return failed(name, rule, why, first_step=step, **figures)


def _is_finite(value: tuple[int, float]) -> bool:
    return math.isfinite(value[1])


def finite_weights(seen: TrainingSeen) -> Check:
    """Whether the segment's checkpoint holds finite numbers only, by its verification."""
    rule = "every parameter and optimizer state in the segment's checkpoint is a finite number"
    if seen.weights_finite is None:
        return not_measured("finite_weights", rule, "the checkpoint has not been verified")
    if seen.weights_finite:
        return passed("finite_weights", rule)
    return failed("finite_weights", rule, "the checkpoint holds values that are not finite")


def loss_after_restore(seen: TrainingSeen, policy: TrainingGates = DEFAULT) -> Check:
    """Whether the loss goes on where it was when the newest attempt resumed."""
    return _after_restore("loss_after_restore", "loss", lambda row: row.loss, policy.loss_jump, seen, policy)


def gradient_norm_after_restore(seen: TrainingSeen, policy: TrainingGates = DEFAULT) -> Check:
    """Whether the gradient norm goes on where it was when the newest attempt resumed."""
    name, what = "gradient_norm_after_restore", "gradient norm"
    return _after_restore(name, what, lambda row: row.grad_norm, policy.norm_jump, seen, policy)


def _after_restore(
    name: str,
    what: str,
    value: Callable[[StepSeen], float | None],
    share: float,
    seen: TrainingSeen,
    policy: TrainingGates,
) -> Check:
    """The first values after the restore, and the newest: a jump that has passed is none that matters now.

    They are compared with what an earlier attempt saw in the same steps, where it had come so far (samples and learning
    rate were the same then); else with the values before the restore.
    """
    rule = (
        f"the median {what} after a restore exceeds the one before it by no more than {share:.0%} and "
        f"{policy.jump_noise:g} robust standard deviations"
    )
    attempt, at = seen.newest, seen.resumed.get(seen.newest, 0)
    if not at:
        return not_measured(name, rule, "the newest attempt did not resume from a checkpoint")
    near = [row for row in seen.accepted if at - NEAR < row.step <= at]
    before = _numbers(value, near)[-policy.before_steps :]
    trained = [row for row in seen.by_attempt.get(attempt, []) if row.step > at]
    after = [one for row in trained if (one := value(row)) is not None]
    soon = sum(value(row) is not None for row in trained if row.step <= at + NEAR)
    if soon < policy.restore_least or len(before) < policy.before_least:
        why = f"{count(len(before), 'value')} before and {soon:,} soon after the restore at step {at:,}, too few"
        return not_measured(name, rule, why, before=len(before), after=soon)
    first, newest = after[: min(soon, policy.restore_steps)], after[-policy.restore_steps :]
    same = _numbers(value, _again(seen, trained[: len(first)]))
    usual = middle_of(same if len(same) >= policy.before_least else before)
    noise = spread(before)
    limit = usual + max(policy.jump_noise * noise, share * abs(usual))
    figures: dict[str, Figure] = {
        "restored_step": at,
        "before": usual,
        "noise": noise,
        "after": middle_of(first),
        "newest": middle_of(newest),
        "limit": limit,
    }
    if min(middle_of(first), middle_of(newest)) > limit:
        why = f"the {what} was {figure(usual)} before the restore at step {at:,} and is {figure(middle_of(first))} after it"
        return failed(name, rule, why, **_told(figures))
    return passed(name, rule, "", **_told(figures))


def _again(seen: TrainingSeen, trained: Sequence[StepSeen]) -> list[StepSeen]:
    """What the attempts before saw in the steps that were trained again."""
    steps = {row.step for row in trained}
    found: dict[int, StepSeen] = {}
    for attempt, rows in seen.by_attempt.items():
        if attempt < seen.newest:
            found |= {row.step: row for row in rows if row.step in steps}
    return list(found.values())


def _numbers(value: Callable[[StepSeen], float | None], rows: Sequence[StepSeen]) -> list[float]:
    return [one for row in rows if (one := value(row)) is not None and math.isfinite(one)]


def _told(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """The same for JSON, which has no infinity."""
    return {
        name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def slow_rank(seen: TrainingSeen, policy: TrainingGates = DEFAULT) -> Check:
    """Whether each rank's own work in a step takes about as long as its peers'."""
    rule = (
        f"the median work of a rank's peers is at least {policy.slow_score:g} of its own, or less than "
        f"{1000 * policy.slow_seconds:g} ms shorter"
    )
    work = {rank: one for rank, one in seen.work.items() if one is not None and math.isfinite(one) and one >= 0}
    if len(work) < 2:
        ranks = count(len(seen.work), "rank")
        return not_measured(
            "slow_rank", rule, f"{len(work)} of {ranks} told the time of their own work, which takes two"
        )
    peers = {rank: middle_of(one for other, one in work.items() if other != rank) for rank in work}
    slow = [
        rank
        for rank, own in sorted(work.items())
        if peers[rank] < policy.slow_score * own and own - peers[rank] > policy.slow_seconds
    ]
    worst = max(slow or work, key=lambda rank: (work[rank] - peers[rank], -rank))
    figures: dict[str, Figure] = {
        "rank": worst,
        "work_seconds": work[worst],
        "peers_seconds": peers[worst],
        "score": min(1.0, peers[worst] / work[worst]) if work[worst] else 1.0,
        "ranks": len(work),
    }
    if not slow:
        return passed("slow_rank", rule, "", **figures)
    named = ", ".join(map(str, slow))
    why = (
        f"rank {named} works {figure(1000 * work[worst])} ms a step, its peers {figure(1000 * peers[worst])} ms"
        if len(slow) == 1
        else f"ranks {named} work longer than their peers, rank {worst} {figure(1000 * work[worst])} ms a step"
    )
    return failed("slow_rank", rule, why, **figures)
