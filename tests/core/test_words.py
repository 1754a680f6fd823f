"""One wording of times, sizes, numbers and money."""

import math

import pytest

from everstep.core import words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (-1, "0.0 s"),
        (7.6, "7.6 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.94, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (198_000, "2 d 7 h"),
        (273_600, "3 d 4 h"),
        (math.inf, "unknown"),
        (math.nan, "unknown"),
    ],
)
def test_durations(seconds, text):
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, ""), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5e9, "5.0 GB"), (7e15, "7000.0 TB")],
)
def test_sizes(count, text):
    assert words.size(int(count)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.05, "0.05"),
        (-250, "-250"),
        (1500, "1.5k"),
        (999_999.9, "1M"),
        (2e7, "20M"),
        (3e12, "3T"),
        (math.inf, "inf"),
    ],
)
def test_numbers_for_an_axis(value, text):
    assert words.short(value) == text


def test_a_share_is_never_rounded_to_nothing_or_to_all():
    told = [words.share(part, 1000) for part in (0, 0.5, 1, 500, 999.8, 1000)]
    assert told == ["0.0 %", "< 0.1 %", "0.1 %", "50.0 %", "> 99.9 %", "100.0 %"]
    assert words.share(1, 0) == "0.0 %"


def test_money():
    assert words.money(12345.678, "EUR") == "12,345.68 EUR"
    assert words.money(0.001, "USD") == "under 0.01 USD"
    assert words.money(0, "USD") == "0.00 USD"


def test_hours():
    assert [words.hours(one) for one in (0, 0.001, 0.31, 4203.8)] == ["0.00", "under 0.01", "0.31", "4,203.80"]


def test_moments_counts_and_first_lines():
    assert words.moment(0) == "1970-01-01 00:00:00 UTC"
    assert words.moment(1e30) == "at an unknown time"
    assert words.count(1, "restart") == "1 restart"
    assert words.count(1200, "restart") == "1,200 restarts"
    assert words.first_line("\n  why\nmore", 20) == "why"
    assert words.first_line("x" * 30, 10) == "xxxxxxx..."
