"""How far staging has come, in words, on a terminal and for Prefect."""

import io

import pytest

from everstep.host.meter import Meter, words


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("done", "total", "rate", "said"),
    [
        (0, 4_000_000_000, 0.0, "0 % | 0.00 of 4.00 GB"),
        (1_400_000_000, 4_000_000_000, 325e6, "35 % | 1.40 of 4.00 GB | 325 MB/s | 8.0 s left"),
        (4_000_000_000, 4_000_000_000, 325e6, "100 % | 4.00 of 4.00 GB"),
        (1, 3_000_000, 10.0, "0 % | 0.00 of 3.00 MB | 0 MB/s | 3 d 11 h left"),
        (0, 0, 0.0, "100 % | 0.00 of 0.00 MB"),
    ],
)
def test_the_words(done, total, rate, said):
    assert words(done, total, rate) == said


def run(out, seconds, told=None):
    """Ten MB each tenth of a second, of 1 GB."""
    now = [0.0]
    meter = Meter(told, out, clock=lambda: now[0])
    for step in range(round(seconds * 10) + 1):
        now[0] = step / 10
        meter(step * 10_000_000, 1_000_000_000)
    return meter


def test_what_is_over_at_once_is_not_worth_a_word():
    out, told = Screen(), []
    run(out, 0.9, lambda *words: told.append(words)).close(whole=True)
    assert (out.getvalue(), told) == ("", [])


def test_a_terminal_has_one_line_that_is_wiped_at_the_end():
    out = Screen()
    meter = run(out, 5.0)
    lines = out.getvalue().split("\r")
    assert lines[-1].rstrip() in (
        "data: 50 % | 0.50 of 1.00 GB | 100 MB/s | 5.0 s left",
        "data: 49 % | 0.49 of 1.00 GB | 100 MB/s | 5.1 s left",
    )
    assert 10 < len(lines) < 30
    meter.close(whole=True)
    assert out.getvalue().split("\r")[-2].strip() == ""
    assert "\n" not in out.getvalue()


def test_a_log_has_a_line_every_ten_seconds():
    out = io.StringIO()
    run(out, 25.0).close(whole=True)
    assert [line[:11] for line in out.getvalue().splitlines()] == ["data: 100 %", "data: 200 %"]


def test_prefect_is_told_every_two_seconds_and_at_the_end():
    told = []
    meter = run(io.StringIO(), 6.0, lambda percent, said: told.append((percent, said)))
    assert [round(percent) for percent, _ in told] == [10, 30, 50]
    assert told[1][1] == "30 % | 0.30 of 1.00 GB | 100 MB/s | 7.0 s left"
    meter.close(whole=True)
    assert told[-1] == (100.0, "100 % | 1.00 of 1.00 GB")


def test_a_staging_that_fails_is_not_said_to_be_whole():
    told = []
    run(io.StringIO(), 6.0, lambda percent, said: told.append(percent)).close(whole=False)
    assert told[-1] == pytest.approx(50.0)
