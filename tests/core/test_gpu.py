"""What the way a GPU answers says about it; what follows from its readings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core import gpu
from everstep.core.gpu import Answer, ClockReason, Driver, GpuSample, NvLink, Sweep
from everstep.core.health import State

WORSE = [State.healthy, State.unknown, State.failed]


def sample(**values) -> GpuSample:
    return GpuSample(time=1.0, uuid="GPU-1", **values)


@given(st.sampled_from(list(Answer)), st.floats(0, 1e6), st.floats(0, 1e6))
def test_longer_silence_is_never_better(answer, one, other):
    short, long = sorted((one, other))
    states = [gpu.answering(sample(answer=answer, silent_s=seconds)) for seconds in (short, long)]
    assert WORSE.index(states[0]) <= WORSE.index(states[1])


@given(st.sampled_from([Answer.unresponsive, Answer.missing, Answer.error]), st.floats(0, 59.999))
def test_unknown_does_not_turn_into_failed_without_time(answer, seconds):
    assert gpu.answering(sample(answer=answer, silent_s=seconds)) is State.unknown


@pytest.mark.parametrize(
    ("answer", "silent_s", "state"),
    [
        (Answer.ok, 0, State.healthy),
        (Answer.unresponsive, 60, State.failed),
        (Answer.missing, 60, State.failed),
        (Answer.lost, 0, State.failed),
        (Answer.reset_required, 0, State.failed),
    ],
)
def test_answer_and_time_make_the_state(answer, silent_s, state):
    assert gpu.answering(sample(answer=answer, silent_s=silent_s)) is state


@pytest.mark.parametrize(
    ("driver", "silent_s", "state"),
    [
        (Driver.present, 0, State.healthy),
        (Driver.absent, 1e6, State.unknown),
        (Driver.starved, 1e6, State.unknown),
        (Driver.starting, 3, State.unknown),
        (Driver.silent, 59, State.unknown),
        (Driver.silent, 60, State.failed),
        (Driver.refused, 61, State.failed),
    ],
)
def test_driver_that_is_silent_is_unknown_then_failed(driver, silent_s, state):
    assert gpu.driving(Sweep(time=0, seconds=0, driver=driver, silent_s=silent_s)) is state


def test_missing_telemetry_is_an_alarm_after_three_periods():
    """BC-140: when samples stop, that is itself told."""
    assert not gpu.is_silent([10.0, 20.0], began=0.0, now=49.9, period=10.0)
    assert gpu.is_silent([10.0, 20.0], began=0.0, now=50.0, period=10.0)
    assert gpu.is_silent([], began=0.0, now=30.0, period=10.0)


def test_not_measured_names_what_is_none_and_nothing_else():
    """BC-141: unsupported is unknown, not bad."""
    got = sample(temperature_c=0.0, links=(), ecc_enabled=False, clock_reasons=0)
    assert set(gpu.READINGS) - set(got.not_measured) == {"temperature_c", "links", "ecc_enabled", "clock_reasons"}
    assert gpu.answering(got) is State.healthy


def test_reasons_are_words():
    assert sample(clock_reasons=0x4 | 0x40 | 0x1000).reasons == (ClockReason.power_cap, ClockReason.hw_thermal)
    assert sample(clock_reasons=0).reasons == ()
    assert sample().reasons is None


def test_slowdown_limit_is_the_stated_one_or_follows_from_the_headroom():
    assert sample(slowdown_limit_c=89, temperature_c=60, headroom_c=27, slowdown_headroom_c=-2).slowdown_at_c == 89
    assert sample(temperature_c=60, headroom_c=27, slowdown_headroom_c=-2).slowdown_at_c == 89
    assert sample(temperature_c=60).slowdown_at_c is None


def test_links_that_are_down():
    links = (NvLink(number=0, active=True), NvLink(number=1, active=False), NvLink(number=2))
    assert sample(links=links).links_down == (1,)
    assert sample().links_down == ()
