"""How often to save: the formula, its bounds, and a simulation that knows no formula."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core import cadence
from everstep.core.cadence import DUTY, FIRST_SECONDS, LONGEST_SECONDS, Bound, Input, Inputs, choose, differs
from everstep.core.reliability import PUBLISHED, Fleet, Prior, mean_time, whole_nodes

stalls = st.floats(0, 1e4)
seconds = st.floats(0, 1e7)
failures = st.floats(1e-3, 1e10)


def given_input(value):
    return Input(seconds=value, source="a test")


def inputs(stall=0.5, recovery=60.0, failure=3.6e4, detection=1.0, write=5.0, copied=None, *, saved=True):
    wrap = lambda value: None if value is None else given_input(value)  # noqa: E731
    return Inputs(
        stall=wrap(stall),
        write=wrap(write),
        copied=wrap(copied),
        recovery=given_input(recovery),
        detection=given_input(detection),
        failure=given_input(failure),
        saved=saved,
    )


made = st.builds(inputs, st.none() | stalls, seconds, failures, seconds, st.none() | seconds, st.none() | seconds)


def test_the_formula_is_that_of_the_paper():
    """T = C + sqrt(2 (M + R) C + C^2): with C = 2, M = 90, R = 10 that is 2 + sqrt(404)."""
    assert cadence.optimum(2, 10, 90) == pytest.approx(2 + math.sqrt(404))
    assert cadence.optimum(0, 10, 90) == 0


@given(st.floats(0.01, 100), st.floats(0, 1000), st.floats(10, 1e6))
def test_no_other_interval_has_a_better_availability(stall, recovery, failure):
    best = cadence.optimum(stall, recovery, failure)
    there = cadence.availability(best, stall, recovery, failure)
    assert all(cadence.availability(best * factor, stall, recovery, failure) <= there + 1e-9 for factor in (0.9, 1.1))


@given(made, st.booleans())
def test_the_bounds_hold_and_every_number_is_one(given_inputs, saved):
    chosen = choose(given_inputs.model_copy(update={"saved": saved}))
    keeping_up = max(one.seconds if one else 0.0 for one in (given_inputs.write, given_inputs.copied)) / DUTY
    assert math.isfinite(chosen.seconds)
    assert chosen.seconds > 0
    assert 0 <= chosen.loss <= 1
    assert chosen.seconds >= keeping_up * (1 - 1e-12)
    assert chosen.seconds <= max(LONGEST_SECONDS, keeping_up)
    if chosen.bound is not Bound.first and chosen.seconds < LONGEST_SECONDS:
        assert chosen.seconds >= given_inputs.detection.seconds
    assert (chosen.bound is Bound.first) == (given_inputs.stall is None and not saved)
    if chosen.bound is Bound.none:
        assert chosen.seconds == pytest.approx(max(chosen.optimum, 1e-3))


@given(made, stalls, failures)
def test_a_dearer_save_and_a_rarer_failure_never_make_saves_more_frequent(given_inputs, stall, failure):
    stalls_of = sorted([given_inputs.stall.seconds if given_inputs.stall else 0.0, stall])
    failures_of = sorted([given_inputs.failure.seconds, failure])
    by_stall = [choose(given_inputs.model_copy(update={"stall": given_input(one)})).seconds for one in stalls_of]
    by_failure = [
        choose(given_inputs.model_copy(update={"stall": given_input(stall), "failure": given_input(one)})).seconds
        for one in failures_of
    ]
    assert by_stall == sorted(by_stall)
    assert by_failure == sorted(by_failure)


@pytest.mark.parametrize(
    ("given_inputs", "expected", "bound"),
    [
        (inputs(stall=0.5, failure=3.6e4), 190.3, Bound.none),
        (inputs(stall=5, failure=1e7), LONGEST_SECONDS, Bound.longest),
        (inputs(stall=0.001, failure=100, detection=30), 30, Bound.detection),
        (inputs(stall=0.001, failure=100, write=40), 50, Bound.writer),
        (inputs(stall=0.001, failure=100, write=4, copied=80), 100, Bound.writer),
        (inputs(stall=1, failure=1e7, write=3600), 4500, Bound.writer),
        (inputs(stall=1, failure=1e7, detection=7200), LONGEST_SECONDS, Bound.longest),
        (inputs(stall=None, write=None, saved=False), FIRST_SECONDS, Bound.first),
        (inputs(stall=None, write=None, failure=1e4), 142.8, Bound.none),
        (inputs(stall=0, detection=0, write=0), 0.001, Bound.none),
    ],
)
def test_what_holds_the_interval(given_inputs, expected, bound):
    chosen = choose(given_inputs)
    assert chosen.seconds == pytest.approx(expected, rel=1e-3)
    assert (chosen.bound, bool(chosen.held)) == (bound, True)


def test_a_stall_that_is_not_known_is_assumed_and_says_so():
    assert "assumed" in choose(inputs(stall=None)).inputs.stall.source


def test_a_little_noise_is_no_other_choice():
    one = choose(inputs(stall=0.5))
    assert differs(one, None)
    assert not differs(choose(inputs(stall=0.55)), one)
    assert differs(choose(inputs(stall=2.0)), one)
    assert differs(one, choose(inputs(stall=None, write=None, saved=False)))


@given(st.lists(seconds, min_size=1, max_size=30))
def test_usual_and_slow_values_are_among_the_values(values):
    assert min(values) <= cadence.usual(values) <= cadence.slow([*values, max(values)]) <= max(values)


def lived(interval, stall, recovery, failure, work, seed):
    """Seconds that `work` seconds of training take, played through: an exponential clock kills, and nothing is known."""
    dice = random.Random(seed)
    now = done = 0.0
    dies = dice.expovariate(1 / failure)
    while done < work:
        if now + interval <= dies:
            now += interval
            done += interval - stall
        else:
            now = dies + recovery
            dies = now + dice.expovariate(1 / failure)
    return now * work / done


@pytest.mark.parametrize(
    ("stall", "recovery", "failure"),
    [(0.5, 30, 3600), (5, 120, 7200), (30, 300, 14400), (0.05, 1, 600), (12, 60, 108_000)],
)
def test_a_simulation_finds_no_interval_that_is_more_than_two_per_cent_better(stall, recovery, failure):
    """Played with 3,000 failures at each of many intervals, from a quarter to four times the chosen one."""
    chosen = choose(inputs(stall=stall, recovery=recovery, failure=failure, detection=0, write=0)).optimum
    work = 3000 * failure
    took = {
        factor: lived(chosen * factor, stall, recovery, failure, work, seed=7)
        for factor in (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 4.0)
    }
    assert took[1.0] <= 1.02 * min(took.values())
    assert took[0.25] > took[1.0] < took[4.0]


def test_the_prior_has_the_mean_and_the_spread_of_what_was_published():
    prior = Prior.of()
    rates = [one.per_1000_node_days for one in PUBLISHED]
    assert prior.rate(Fleet()) * 24_000 == pytest.approx(sum(rates) / len(rates))
    assert 0.3 < prior.alpha < 1.5
    assert all(one.source and one.what for one in PUBLISHED)


@given(st.integers(0, 1000), st.floats(0, 1e6), st.integers(1, 1000), st.integers(1, 8))
def test_failures_shorten_and_hours_lengthen_the_mean_time(count, hours, nodes, ranks):
    def mean(failures, node_hours):
        return mean_time(Fleet(failures=failures, node_hours=node_hours), Fleet(), nodes, ranks).seconds

    assert 0 < mean(count + 1, hours) < mean(count, hours) < mean(count, hours + 1000)
    assert mean(count, hours) == pytest.approx(
        nodes * mean_time(Fleet(failures=count, node_hours=hours), Fleet(), nodes * nodes, ranks).seconds
    )


def test_a_large_fleet_is_believed_more_than_what_others_published():
    own = Fleet(failures=1000, node_hours=100_000)
    assert mean_time(own, Fleet(), 1, 8).seconds == pytest.approx(360_000, rel=0.02)


def test_more_gpus_of_a_node_fail_more_often_and_a_part_of_a_node_counts_for_its_part():
    sizes = [whole_nodes(1, ranks) for ranks in (1, 2, 4, 8, 16)]
    assert all(before < after for before, after in pairwise(sizes[:4]))
    assert sizes[3] == sizes[4] == 1
    assert whole_nodes(4, 8) == 4


def test_a_run_that_fails_far_more_often_than_its_fleet_is_believed():
    fleet = Fleet(failures=2, node_hours=50_000)
    usual = mean_time(fleet, Fleet(failures=2, node_hours=0.1), 1, 8)
    often = mean_time(fleet, Fleet(failures=3, node_hours=0.1), 1, 8)
    assert "this ledger: 2 sudden ends in 50,000 node-hours" in usual.source
    assert often.seconds == pytest.approx(120)
    assert often.source == "this run itself: 3 sudden ends in 0.1 node-hours, more often than its fleet"
