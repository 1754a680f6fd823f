"""The suite for a segment's telemetry: in its own process as a run has it, on rows that the project's own samples give."""

import time

import pytest
from rigs.telemetry import series, sweep

from everstep.core.check import Outcome
from everstep.host.telemetry_gate import TelemetryGate

UUIDS = tuple(f"GPU-{one}" for one in range(8))
STEADY = {"temperature_c": lambda _: 60.0}


class Desk:
    def __init__(self, folder):
        (folder / "run" / "logs").mkdir(parents=True)
        self.home = folder / "run" / "telemetry"
        self.gate = TelemetryGate(self.home, folder / "scratch", "t/x", "n1", 1.0)

    def judge(self, sweeps, segment=1, seconds=100.0):
        for one in sweeps:
            self.gate.take(one)
        self.gate.ends(10, segment, 85.0)
        return self.wait(seconds)

    def wait(self, seconds=100.0):
        until = time.monotonic() + seconds
        while (report := self.gate.poll(UUIDS)) is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        return report


@pytest.fixture
def desk(tmp_path):
    made = Desk(tmp_path)
    yield made
    made.gate.close()


def said(report):
    return {one.name: one.outcome for one in report.checks}


def test_a_healthy_segment_passes_and_a_sick_one_is_told_by_what_is_wrong(desk):
    healthy = desk.judge(series(60, **STEADY))
    assert healthy.outcome is Outcome.passed, healthy.sentence
    assert (healthy.segment, healthy.step) == (1, 10)
    assert all(one.rule for one in healthy.checks)
    assert (desk.home / "segment-000001.parquet").exists()
    sick = series(
        60,
        temperature_c=lambda ago: 93.0 if ago < 40 else 60.0,
        ecc_uncorrected_volatile=lambda ago: 2 if ago < 5 else 0,
        clock_reasons=lambda _: 0x40,
    )
    report = desk.judge(sick, segment=2)
    wrong = {name for name, outcome in said(report).items() if outcome is Outcome.failed}
    assert wrong == {"temperature", "ecc", "clocks"}
    assert "93" in next(one.why for one in report.checks if one.name == "temperature")


def test_what_a_gpu_does_not_tell_is_not_measured(desk):
    blind = series(30, gpus=1, power_w=lambda _: None)
    stripped = [
        one.model_copy(
            update={"gpus": tuple(gpu.model_copy(update={"power_w": None, "links": None}) for gpu in one.gpus)}
        )
        for one in blind
    ]
    report = desk.judge(stripped)
    assert said(report)["power"] is Outcome.not_measured
    assert said(report)["nvlink"] is Outcome.not_measured
    assert said(report)["temperature"] is Outcome.passed


def test_without_samples_nothing_is_asked(desk):
    desk.gate.take(sweep())
    desk.gate.ends(10, 1, 85.0)
    assert desk.gate.poll(UUIDS) is None
    assert desk.gate.poll(UUIDS) is None


def test_a_suite_that_dies_is_not_measured(desk, tmp_path):
    dying = TelemetryGate(desk.home, tmp_path / "other", "t/x", "n1", 1.0, command=("/bin/false",))
    for one in series(5):
        dying.take(one)
    dying.ends(10, 1, 85.0)
    until = time.monotonic() + 30
    while (report := dying.poll(UUIDS)) is None and time.monotonic() < until:
        time.sleep(0.02)
    assert report.outcome is Outcome.not_measured
    assert "status 1" in report.checks[0].why
    dying.close()
