"""Long curves in little memory: nothing that stood out is lost."""

import math

import pytest

from everstep.core.curve import Rate, Thinner


def test_a_short_curve_is_kept_as_it_is():
    thinner = Thinner()
    for step in range(1, 101):
        thinner.add(step, step / 10)
    curve = thinner.curve()
    assert [point.x for point in curve.points] == list(range(1, 101))
    assert all(point.low == point.mean == point.high for point in curve.points)


def test_a_spike_of_one_step_among_many_stays_visible():
    thinner = Thinner(most=100)
    for step in range(100_000):
        thinner.add(step, 1.0)
    thinner.add(77_777.0, 50.0)
    thinner.add(22_222.0, -50.0)
    curve = thinner.curve()
    assert len(curve.points) <= 100
    assert curve.rows == 100_002
    assert max(point.high for point in curve.points) == 50.0
    assert min(point.low for point in curve.points) == -50.0
    assert abs(max(curve.points, key=lambda point: point.high).x - 77_777) < 100_000 / 50


def test_what_is_no_number_is_counted_and_placed():
    thinner = Thinner()
    for step in range(200):
        thinner.add(step, math.nan if step % 2 else math.inf)
    curve = thinner.curve()
    assert curve.points == ()
    assert curve.odd_rows == 200
    assert curve.odd[:3] == (0, 1, 2)
    assert len(curve.odd) == 50


def test_places_far_apart_take_no_more_cells():
    thinner = Thinner(most=10)
    for place in (0, 1, 2**52, 2**52 + 1, 5, *range(0, 1000, 7)):
        thinner.add(place, 1.0)
    assert len(thinner.curve().points) <= 10


def test_a_rate_is_amount_by_time_however_it_was_cut():
    rate = Rate(most=4)
    for second in range(1, 1001):
        rate.add(second, 10 if second <= 500 else 30, 1.0)
    points = rate.curve().points
    assert len(points) <= 4
    assert points[0].mean == pytest.approx(10)
    assert points[-1].mean == pytest.approx(30)


@pytest.mark.parametrize(("amount", "seconds"), [(1, 0), (1, -1), (-1, 1), (math.nan, 1), (math.inf, 1)])
def test_a_rate_of_nonsense_is_none(amount, seconds):
    rate = Rate()
    rate.add(1.0, amount, seconds)
    assert rate.curve().points == ()
