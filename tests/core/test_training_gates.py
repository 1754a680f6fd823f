"""Training gates: each fault is found and a healthy training is never blamed."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.check import Outcome
from everstep.core.checkpoint import SaveCost
from everstep.core.training_gates import DEFAULT, StepSeen, TrainingGates, TrainingSeen, judge

BATCH = 32
ORDER = [Outcome.passed, Outcome.not_measured, Outcome.failed]
PASS, FAIL, UNKNOWN = Outcome.passed, Outcome.failed, Outcome.not_measured


def steps(first, last, attempt=1, *, loss=2.0, norm=1.0, seconds=1.0, began=0.0, seed=0, noise=0.02):
    """Rows of an attempt, one a step. `loss`, `norm` and `seconds` are numbers or functions of the step."""
    draw = np.random.default_rng(seed).normal(1.0, noise, (last - first + 1, 3)).tolist()

    def of(value, step):
        return value(step) if callable(value) else value

    rows, time = [], began
    for step, (a, b, c) in zip(range(first, last + 1), draw, strict=True):
        time += of(seconds, step) * abs(c)
        gradient = of(norm, step)
        norm_seen = None if gradient is None else gradient * b
        rows.append(StepSeen(attempt, step, time, of(loss, step) * a, BATCH * step, norm_seen))
    return rows


def save(step, seconds, attempt=1, size=1000):
    parts = {"copy_seconds": 0.1 * seconds, "wait_seconds": 0.0, "fence_seconds": 0.0, "write_seconds": 0.9 * seconds}
    return SaveCost(attempt=attempt, step=step, time=step, bytes=size, **parts)


def outcome(name, seen, policy=DEFAULT):
    return next(check for check in judge(seen, policy) if check.name == name)


def falling(step):
    return 2 + 6 * step**-0.4


def test_nothing_known_is_nothing_measured():
    checks = judge(TrainingSeen())
    assert {check.outcome for check in checks} == {UNKNOWN}
    assert all(check.rule and check.why for check in checks)
    assert len({check.name for check in checks}) == 9


def test_each_check_of_a_healthy_run_is_measured_and_passes():
    rows = steps(1, 2500, loss=falling) + steps(2401, 5000, 2, loss=falling, began=2600.0)
    seen = TrainingSeen(
        rows=rows,
        resumed={1: 0, 2: 2400},
        since=4000,
        steps=5000,
        saves=[save(step, 3.0) for step in range(100, 2100, 100)],
        work={0: 0.1, 1: 0.11, 2: 0.1},
        weights_finite=True,
    )
    checks = judge(seen)
    assert {check.name: check.outcome for check in checks} == {check.name: PASS for check in checks}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["finite_loss", "finite_gradients"])
def test_a_value_that_is_no_number(name, value):
    kind = "loss" if name == "finite_loss" else "grad_norm"
    rows = steps(1, 100)
    rows[79] = rows[79]._replace(**{kind: value})
    check = outcome(name, TrainingSeen(rows=rows))
    assert (check.outcome, check.figures["first_step"], check.figures["not_finite"]) == (FAIL, 80, 1)
    assert f"is {value!r} in step 80" in check.why
    assert outcome(name, TrainingSeen(rows=rows, since=80)).outcome is PASS
    assert outcome(name, TrainingSeen(rows=rows, since=100)).outcome is UNKNOWN
    again = steps(71, 100, 2)  # the step was trained again, from before it
    assert outcome(name, TrainingSeen(rows=rows + again, resumed={1: 0, 2: 70})).outcome is PASS


def test_with_a_scaler_some_skipped_steps_are_normal_and_many_in_a_row_are_not():
    for bad, expected in ((3, PASS), (19, PASS), (20, FAIL)):
        rows = [row._replace(grad_norm=math.inf) if row.step <= bad else row for row in steps(1, 100)]
        assert outcome("finite_gradients", TrainingSeen(rows=rows, scaled=True)).outcome is expected
        assert outcome("finite_gradients", TrainingSeen(rows=rows)).outcome is FAIL


def test_gradients_that_are_measured_now_and_then():
    rows = [row if row.step % 16 == 0 else row._replace(grad_norm=None) for row in steps(1, 200)]
    check = outcome("finite_gradients", TrainingSeen(rows=rows))
    assert (check.outcome, check.figures["measured"]) == (PASS, 12)
    assert outcome("finite_gradients", TrainingSeen(rows=steps(1, 50, norm=None))).outcome is UNKNOWN


@pytest.mark.parametrize(("told", "expected"), [(None, UNKNOWN), (True, PASS), (False, FAIL)])
def test_weights(told, expected):
    assert outcome("finite_weights", TrainingSeen(weights_finite=told)).outcome is expected


def restored(after, *, lost=0, **more):
    """A run that resumed at step 200 after its first attempt had come `lost` steps further."""
    rows = steps(1, 200 + lost, **more) + steps(201, 201 + 99, 2, began=1000.0, seed=5, **(more | after))
    return TrainingSeen(rows=rows, resumed={1: 0, 2: 200})


@pytest.mark.parametrize("lost", [0, 30])
@pytest.mark.parametrize(
    ("name", "after", "expected"),
    [
        ("loss_after_restore", {}, PASS),
        ("loss_after_restore", {"loss": 2.1}, PASS),
        ("loss_after_restore", {"loss": 2.6}, FAIL),
        ("loss_after_restore", {"loss": math.nan}, FAIL),
        ("loss_after_restore", {"loss": lambda step: 5.0 if step < 240 else 2.0}, PASS),  # it has come back
        ("loss_after_restore", {"loss": lambda step: 2.0 if step < 240 else 5.0}, PASS),  # that came later
        ("loss_after_restore", {"loss": lambda step: 50.0 if step < 205 else 2.0}, PASS),  # a few values
        ("gradient_norm_after_restore", {}, PASS),
        ("gradient_norm_after_restore", {"norm": 4.5}, PASS),
        ("gradient_norm_after_restore", {"norm": 6.0}, FAIL),
        ("gradient_norm_after_restore", {"norm": math.inf}, FAIL),
    ],
)
def test_a_jump_after_a_restore(name, after, expected, lost):
    check = outcome(name, restored(after, lost=lost))
    assert (check.outcome, check.figures["restored_step"]) == (expected, 200)


def test_a_jump_that_the_schedule_makes_is_none():
    """The earlier attempt saw the same in the same steps, where it came so far."""

    def warm_restart(step):
        return 2.0 if step <= 200 else 3.5

    assert outcome("loss_after_restore", restored({}, loss=warm_restart, lost=30)).outcome is PASS
    assert outcome("loss_after_restore", restored({"loss": 5.0}, loss=warm_restart, lost=30)).outcome is FAIL


def test_a_restore_is_measured_with_enough_values_only():
    name = "loss_after_restore"
    assert outcome(name, TrainingSeen(rows=steps(1, 100), resumed={1: 0})).outcome is UNKNOWN
    assert outcome(name, TrainingSeen(rows=steps(1, 100), resumed={1: 0, 2: 90})).outcome is UNKNOWN
    few = steps(1, 100) + steps(91, 94, 2)
    assert outcome(name, TrainingSeen(rows=few, resumed={1: 0, 2: 90})).outcome is UNKNOWN
    early = steps(1, 8) + steps(6, 60, 2)
    assert outcome(name, TrainingSeen(rows=early, resumed={1: 0, 2: 5})).outcome is UNKNOWN


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (falling, PASS),
        (lambda step: 2 + step**-0.05, PASS),
        (lambda step: 2.0 if step > 1500 else falling(step), FAIL),
        (lambda step: 1.5 + step * 1e-4, FAIL),
        (lambda step: 2.0 if step < 3500 else math.nan, FAIL),
        (lambda _: 0.0, FAIL),
    ],
)
def test_a_plateau(loss, expected):
    check = outcome("plateau", TrainingSeen(rows=steps(1, 4000, loss=loss, noise=0.002), steps=4000))
    assert (check.outcome, check.figures["window_steps"]) == (expected, 1000)


def test_a_plateau_takes_two_windows_and_little_noise():
    flat = steps(1, 4000, noise=0.002)
    assert outcome("plateau", TrainingSeen(rows=flat)).outcome is FAIL
    assert outcome("plateau", TrainingSeen(rows=flat), TrainingGates(plateau_steps=None)).outcome is UNKNOWN
    assert outcome("plateau", TrainingSeen(rows=flat, steps=9000)).outcome is UNKNOWN  # a quarter of the run is more
    assert outcome("plateau", TrainingSeen(rows=flat[:1900])).outcome is UNKNOWN
    assert outcome("plateau", TrainingSeen(rows=flat[2900:])).outcome is UNKNOWN
    loud = steps(1, 4000, loss=lambda step: 2.0 if step < 3000 else 2.2, noise=1.0)
    assert outcome("plateau", TrainingSeen(rows=loud)).outcome is UNKNOWN
    loud = steps(1, 4000, loss=lambda step: 2.0 if step < 3000 else 6.0, noise=1.0)
    assert outcome("plateau", TrainingSeen(rows=loud)).outcome is FAIL
    thin = [row for row in steps(1, 40_000, loss=falling) if row.step // 100 % 10 == 0]
    assert outcome("plateau", TrainingSeen(rows=thin)).outcome is PASS


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda step: 1.0 if step <= 500 else 1.15, PASS),
        (lambda step: 1.0 if step <= 500 else 1.4, FAIL),
        (lambda step: 1.0 if step <= 570 else 1.4, PASS),  # not all through the newest window
        (lambda step: 1.4 if 500 < step < 570 else 1.0, PASS),  # it is over
        (lambda step: 1.0 if step % 50 else 40.0, PASS),  # evaluations, saves
        (lambda step: 300.0 if step < 5 else 1.0, PASS),  # compiles
        (lambda step: 1.0 if step <= 500 else 0.5, PASS),
    ],
)
def test_throughput(seconds, expected):
    check = outcome("throughput", TrainingSeen(rows=steps(1, 600, seconds=seconds)))
    assert check.outcome is expected
    assert check.figures["baseline_samples_per_second"] == pytest.approx(BATCH, rel=0.25)


def test_throughput_without_a_window_or_a_baseline():
    quick = steps(1, 600, seconds=0.01)
    assert outcome("throughput", TrainingSeen(rows=quick)).outcome is UNKNOWN  # six seconds of steps
    assert outcome("throughput", TrainingSeen(rows=steps(1, 140))).outcome is UNKNOWN
    assert outcome("throughput", TrainingSeen(rows=steps(1, 50))).outcome is UNKNOWN


def test_throughput_of_another_attempt_counts_where_it_can_be_compared():
    rows = steps(1, 400) + steps(401, 500, 2, seconds=1.5, began=500.0)
    seen = {"rows": rows, "resumed": {1: 0, 2: 400}}
    assert outcome("throughput", TrainingSeen(**seen)).outcome is UNKNOWN
    assert outcome("throughput", TrainingSeen(**seen, alike=frozenset({1}))).outcome is FAIL


def test_a_save_or_an_evaluation_in_every_fifth_step_is_left_out():
    rows = steps(1, 600, seconds=lambda step: 6.0 if step > 500 and step % 5 == 1 else 1.0)
    assert outcome("throughput", TrainingSeen(rows=rows)).outcome is FAIL
    saves = [save(step, 5.0) for step in range(500, 601, 5)]
    assert outcome("throughput", TrainingSeen(rows=rows, saves=saves)).outcome is PASS
    told = [row._replace(evaluated=row.step > 500 and row.step % 5 == 1) for row in rows]
    assert outcome("throughput", TrainingSeen(rows=told)).outcome is PASS


@pytest.mark.parametrize(
    ("work", "expected", "rank"),
    [
        ({0: 0.1, 1: 0.1}, PASS, None),
        ({0: 0.1, 1: 0.14}, PASS, 1),
        ({0: 0.1, 1: 0.15}, FAIL, 1),
        ({0: 0.3, 1: 0.1, 2: 0.1, 3: 0.11}, FAIL, 0),
        ({0: 0.3, 1: 0.1, 2: 0.29, 3: 0.1, 4: 0.1, 5: 0.1}, FAIL, 0),
        ({0: 0.001, 1: 0.004}, PASS, 1),  # three milliseconds
        ({0: 0.1, 1: None, 2: 0.11}, PASS, 2),
        ({0: 0.1, 1: None}, UNKNOWN, None),
        ({0: 0.1, 1: math.nan}, UNKNOWN, None),
        ({0: 0.1}, UNKNOWN, None),
        ({0: 0.0, 1: 0.0}, PASS, None),
    ],
)
def test_a_slow_rank(work, expected, rank):
    check = outcome("slow_rank", TrainingSeen(work=work))
    assert check.outcome is expected
    if rank is not None:
        assert check.figures["rank"] == rank


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([3.0 + 0.3 * n for n in range(12)], FAIL),
        ([3.0] * 10 + [9.0] * 10, FAIL),
        ([3.0, 3.4, 2.9, 3.2] * 3, PASS),
        ([3.0] * 11 + [60.0], PASS),
        ([0.01 + 0.003 * n for n in range(12)], PASS),  # milliseconds
        ([3.0 + 0.05 * n for n in range(12)], PASS),  # a fifth in all
        ([9.0 - 0.3 * n for n in range(12)], PASS),
        ([3.0 + n for n in range(7)], UNKNOWN),
        ([], UNKNOWN),
    ],
)
def test_save_times(times, expected):
    saves = [save(100 * n, seconds) for n, seconds in enumerate(times, start=1)]
    assert outcome("save_time", TrainingSeen(saves=saves)).outcome is expected


def test_saves_of_a_state_that_grows_may_take_longer():
    saves = [save(n, 3.0 + 0.5 * n, size=1000 * (6 + n)) for n in range(12)]
    assert outcome("save_time", TrainingSeen(saves=saves)).outcome is PASS


# Properties


def scenario(seed):
    """Some run, healthy or not."""
    draw = random.Random(seed)
    factor = draw.choice([1.0, 1.0, 1.1, 1.5, 4.0, 8.0])
    noise = draw.choice([0.001, 0.02, 0.3])
    lost = draw.choice([0, 15, 40])
    slope = draw.choice([0.0, 1e-4])
    more = {"loss": lambda step: 3.0 - slope * step, "noise": noise}
    rows = steps(1, 300 + lost, seed=seed, **more)
    later = {"loss": lambda step: factor * (3.0 - slope * step), "norm": factor**2}
    rows += steps(301, 600, 2, began=1000.0, seed=seed + 1, **(more | later))
    return TrainingSeen(
        rows=rows,
        resumed={1: 0, 2: 300},
        alike=frozenset(draw.choice([(), (1,)])),
        saves=[save(n, 3.0 + draw.choice([0.0, 0.5]) * n + draw.random()) for n in range(draw.randint(0, 20))],
        work={rank: draw.choice([None, 0.1, 0.12, 0.2]) for rank in range(draw.randint(1, 4))},
        scaled=draw.random() < 0.2,
    )


POLICY = TrainingGates(plateau_steps=200, throughput_seconds=0.0)


def ranked(seen):
    return {check.name: ORDER.index(check.outcome) for check in judge(seen, POLICY)}


def made(seen, **more):
    kept = {name: getattr(seen, name) for name in TrainingSeen.__dataclass_fields__}
    return TrainingSeen(**(kept | more))


def slowed(rows, first, factor):
    """The same rows, with every step of the second attempt from `first` on taking so many times as long."""
    found, shift, last = [], 0.0, None
    for row in rows:
        if row.attempt == 2 and row.step >= first and last is not None:
            shift += (factor - 1) * (row.time - last.time)
        last = row
        found.append(row._replace(time=row.time + shift))
    return found


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), by=st.floats(1.0, 20.0), bad=st.sampled_from([math.nan, math.inf]), data=st.data())
def test_what_is_worse_never_gets_a_better_answer(seed, by, bad, data):
    seen = scenario(seed)
    before = ranked(seen)

    def worse(*names, **more):
        after = ranked(made(seen, **more))
        assert all(after[name] >= before[name] for name in names), (names, before, after)

    restored = [row._replace(loss=row.loss * by, grad_norm=row.grad_norm * by) for row in seen.rows if row.attempt == 2]
    first = [row for row in seen.rows if row.attempt == 1]
    worse("loss_after_restore", "gradient_norm_after_restore", "finite_loss", rows=first + restored)
    shifted = [row._replace(loss=row.loss + by - 1) if row.step > 400 else row for row in seen.rows]
    worse("plateau", rows=shifted)
    at = data.draw(st.integers(len(first), len(seen.rows) - 1))
    broken = [*seen.rows]
    broken[at] = broken[at]._replace(loss=bad, grad_norm=bad)
    worse("finite_loss", "finite_gradients", "loss_after_restore", "gradient_norm_after_restore", rows=broken)
    worse("throughput", rows=slowed(seen.rows, 551, by))
    known = {rank: one for rank, one in seen.work.items() if one is not None}
    if known:
        slowest = max(known, key=known.get)
        worse("slow_rank", work=dict(seen.work) | {slowest: known[slowest] * by})
    if seen.saves:
        last = seen.saves[-1]
        longer = last.model_copy(update={"write_seconds": 100.0 + last.write_seconds * by})
        worse("save_time", saves=[*seen.saves[:-1], longer])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(seed, shuffle):
    seen = scenario(seed)
    rows, saves = [*seen.rows], [*seen.saves]
    shuffle.shuffle(rows)
    shuffle.shuffle(saves)
    assert judge(made(seen, rows=rows, saves=saves), POLICY) == judge(seen, POLICY)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), many=st.integers(0, 4), saves=st.integers(0, 7))
def test_too_few_samples_are_not_measured(seed, many, saves):
    seen = scenario(seed)
    few = [row for row in seen.rows if row.attempt == 2][:many]
    checks = judge(made(seen, rows=few, saves=seen.saves[:saves], work={0: 1.0}), POLICY)
    measured = {check.name for check in checks if check.outcome is not UNKNOWN}
    assert measured <= {"finite_loss", "finite_gradients"}


# Healthy trainings


def healthy(seed, hours, step_seconds):
    """Rows of a training with noise, evaluations, saves and three restores, and what is known at each of its looks."""
    draw = np.random.default_rng(seed)
    total = int(hours * 3600 / step_seconds)
    every_save, every_eval = int(draw.integers(40, 200)), int(draw.integers(20, 400))
    floor, gain, power = draw.uniform(0.0, 2.0), draw.uniform(1.0, 8.0), draw.uniform(0.1, 0.6)
    noise, grad_noise, jitter = draw.uniform(0.005, 0.2), draw.uniform(0.2, 0.8), draw.uniform(0.005, 0.1)
    number = np.arange(total + 1)
    warm = 50 + total // 50
    curve = floor + gain * (1 + number / warm) ** -power
    correlated = np.convolve(draw.normal(0, 1, total + 30), np.ones(8) / math.sqrt(8))[: total + 1]
    losses = curve * np.exp(noise * (draw.standard_t(4, total + 1) / math.sqrt(2) + 0.3 * correlated))
    norms = curve * draw.lognormal(0, grad_noise, total + 1)
    tail = int(draw.integers(50, 400))  # the last step of an epoch has fewer samples
    sizes = np.where(number % tail == 0, BATCH // 4, BATCH)
    samples = np.cumsum(sizes).tolist()
    sizes, losses, norms = sizes.tolist(), losses.tolist(), norms.tolist()
    clipped = bool(draw.integers(2))
    ends = sorted(draw.choice(np.arange(total // 10, total), 3, replace=False).tolist())
    rows, resumed, saves, first, time = [], {}, [], 0, 0.0
    for attempt, last in enumerate([*ends, total], start=1):
        resumed[attempt] = first
        spent = (step_seconds * draw.lognormal(0, jitter, last - first + 1)).tolist()
        time += draw.uniform(10, 300)
        for step, seconds in zip(range(first + 1, last + 1), spent, strict=False):
            pause = draw.uniform(20, 90) if step == first + 1 else 0.0
            evaluated = step % every_eval == 0
            pause += step_seconds * 20 * evaluated + (2.0 if (step - 1) % every_save == 0 else 0.0)
            swing = 1 + 0.015 * math.sin(2 * math.pi * time / 86400)
            time += pause + seconds * swing * (0.3 + 0.7 * sizes[step] / BATCH)
            norm = norms[step] if clipped or step % 16 == 0 else None
            told = evaluated and step % 3 > 0  # a pause that no row tells of must not matter either
            rows.append(StepSeen(attempt, step, time, losses[step], samples[step], norm, told))
            if step % every_save == 0:
                saves.append(save(step, 4.0 * draw.lognormal(0, 0.25), attempt))
        first = last // every_save * every_save
    work = {rank: 0.8 * step_seconds * float(draw.lognormal(0, 0.04)) for rank in range(int(draw.integers(1, 9)))}
    looks = []
    for part in (0.15, 0.4, 0.6, 0.8, 1.0):
        end = int(part * len(rows))
        now = rows[end - 1]
        begun = {attempt: at for attempt, at in resumed.items() if attempt <= now.attempt}
        done = [one for one in saves if (one.attempt, one.step) < (now.attempt, now.step)]
        looks.append(
            TrainingSeen(
                rows=rows[:end],
                resumed=begun,
                alike=frozenset(range(1, now.attempt)),
                since=int(0.9 * now.step),
                steps=total,
                saves=done[-20:],
                work=work,
                weights_finite=True,
            )
        )
    return looks


@pytest.mark.parametrize(("hours", "step_seconds", "seeds"), [(1, 1.0, 60), (1, 4.0, 200), (72, 60.0, 40)])
def test_a_healthy_training_is_never_blamed(hours, step_seconds, seeds):
    blamed, measured = [], set()
    for seed in range(seeds):
        for seen in healthy(seed, hours, step_seconds):
            for check in judge(seen):
                measured |= {check.name} if check.outcome is PASS else set()
                if check.outcome is FAIL:
                    blamed.append((seed, len(seen.rows), check.name, check.why, check.figures))
    assert blamed == []
    assert measured >= {"finite_loss", "finite_gradients", "loss_after_restore", "throughput", "slow_rank", "save_time"}
