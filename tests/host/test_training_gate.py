"""The training gate of a segment, over the files that a run leaves."""

import itertools
import json
import math
import time

import pytest

from everstep.core.check import GateReport, Outcome
from everstep.core.checkpoint import AttemptClaim, SaveCost
from everstep.core.job import TrainJob
from everstep.core.ledger import Event
from everstep.core.segment import Heartbeat, Phase, SegmentResult
from everstep.core.segment import Outcome as Ended
from everstep.host import step_rows, training_gate
from everstep.store import jsonl
from everstep.store.layout import RunPlaces

PASS, FAIL, UNKNOWN = Outcome.passed, Outcome.failed, Outcome.not_measured
NOW = 1_000_000.0


class Run:
    """A run that is told: what a training leaves on disk."""

    def __init__(self, folder):
        self.places = RunPlaces(persistent=folder / "run", local=folder / "local")
        for one in ("attempts", "segments"):
            (self.places.persistent / one).mkdir(parents=True)
        self.places.local.mkdir()
        self.now = NOW - 500_000

    def attempt(self, number, resumed_from=0, ranks=2, host="node-1"):
        claim = AttemptClaim(attempt=number, resumed_from=resumed_from, host=host, pid=1, boot="b", time=self.now)
        self.places.claim(number).write_text(claim.to_json())
        pids = {"pids": list(range(ranks))}
        event = Event(id=f"e{number}", time=self.now, kind="attempt.started", attempt=number, data=pids)
        jsonl.append(self.places.events, [event.model_dump_json()])

    def train(self, attempt, first, last, seconds=1.0, loss=None, **more):
        rows = []
        for step in range(first, last + 1):
            self.now += seconds
            value = 2 + 6 * step**-0.4 * (1 + 0.01 * math.sin(step)) if loss is None else loss
            row = {"attempt": attempt, "step": step, "time": self.now, "loss": value, "lr": 0.001, "samples": 32 * step}
            rows.append(json.dumps(row | {"epoch": 0, "grad_norm": 1.0 + step % 3 / 10} | more))
        jsonl.append(self.places.metrics, rows)

    def result(self, attempt, segment, step):
        result = SegmentResult(
            attempt=attempt, segment=segment, step=step, outcome=Ended.done, checkpoint="c", time=self.now
        )
        self.places.result(segment).parent.mkdir(exist_ok=True)
        self.places.result(segment).write_text(result.to_json())
        return result

    def saved(self, attempt, step, seconds):
        row = SaveCost(
            attempt=attempt, step=step, time=self.now, bytes=10, copy_seconds=0.1, wait_seconds=0.0, fence_seconds=0.0,
            write_seconds=seconds,
        )  # fmt: skip
        jsonl.append(self.places.saves, [row.model_dump_json()])

    def look(self, result, *, weights=True, beats=(), steps=1000):
        job = TrainJob(name="digits", program="a:b", data={"source": "d"}, steps=steps, ranks=2)
        return training_gate.look(self.places, job, result, weights_finite=weights, heartbeats=beats, now=NOW)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def beat(rank, work, attempt=1, age=0.2):
    return Heartbeat(
        attempt=attempt, rank=rank, pid=1, time=NOW - age, phase=Phase.train, step=1, progress=1, work_seconds=work
    )


def outcomes(report):
    return {check.name: check.outcome for check in report.checks}


def test_a_healthy_run_passes(run):
    run.attempt(1)
    run.train(1, 1, 450)
    run.attempt(2, resumed_from=400)
    run.train(2, 401, 1000)
    for step in range(50, 1001, 50):
        run.saved(1 if step <= 400 else 2, step, 2.0 + step % 3 / 10)
    run.result(2, 4, 800)
    report = run.look(run.result(2, 5, 1000), beats=[beat(0, 0.1, 2), beat(1, 0.12, 2)])
    assert (report.gate, report.time, report.step, report.segment) == ("training", NOW, 1000, 5)
    expected = dict.fromkeys(outcomes(report), PASS) | {"plateau": UNKNOWN}
    assert outcomes(report) == expected, report.sentence
    assert report.outcome is PASS
    assert GateReport.parse(report.to_json(), "a", "b") == report


def test_a_run_of_which_nothing_is_left_is_not_measured(run):
    report = run.look(run.result(1, 1, 10), weights=None)
    assert set(outcomes(report).values()) == {UNKNOWN}
    assert report.outcome is UNKNOWN


def test_a_loss_of_this_segment_that_is_no_number(run):
    run.attempt(1)
    run.train(1, 1, 100)
    run.train(1, 101, 101, loss="nan", grad_norm="inf")
    run.train(1, 102, 200)
    first, second = run.result(1, 1, 150), run.result(1, 2, 200)
    found = {check.name: check for check in run.look(first).checks}
    assert found["finite_loss"].why.startswith("the loss is nan in step 101")
    assert found["finite_gradients"].why.startswith("the gradient norm is inf in step 101")
    assert run.look(second).outcome is PASS
    run.attempt(2, resumed_from=100)
    run.train(2, 101, 150)
    assert run.look(run.result(2, 1, 150)).outcome is PASS  # those steps do not count any more


def test_a_scaler_makes_a_few_infinite_gradients_normal(run):
    run.attempt(1)
    run.train(1, 1, 3, grad_norm="inf", scaled=True)
    run.train(1, 4, 50, scaled=True)
    assert outcomes(run.look(run.result(1, 1, 50)))["finite_gradients"] is PASS


@pytest.mark.parametrize(("lost", "since"), [(0, 50), (500, 50), (3000, 4000)])
def test_a_jump_after_a_restore(run, lost, since):
    """Also where much was trained before it, thrown away, and trained since."""
    run.attempt(1)
    run.train(1, 1, 3000 + lost)
    run.attempt(2, resumed_from=3000)  # it did not come to a step
    run.attempt(3, resumed_from=3000)
    run.train(3, 3001, 3000 + since, loss=9.0, grad_norm=40.0)
    found = outcomes(run.look(run.result(3, 1, 3000 + since)))
    assert (found["loss_after_restore"], found["gradient_norm_after_restore"]) == (FAIL, FAIL)


@pytest.mark.parametrize(("again", "expected"), [({}, FAIL), ({"ranks": 1}, UNKNOWN), ({"host": "node-2"}, UNKNOWN)])
def test_speed_is_compared_with_attempts_that_were_alike(run, again, expected):
    run.attempt(1)
    run.train(1, 1, 300)
    run.attempt(2, resumed_from=300, **again)
    run.train(2, 301, 380, seconds=2.0)
    assert outcomes(run.look(run.result(2, 1, 380)))["throughput"] is expected


def test_weights_saves_and_ranks(run):
    run.attempt(1)
    run.train(1, 1, 100)
    for step in range(1, 21):
        run.saved(1, step, 2.0 + step)
    report = run.look(run.result(1, 1, 100), weights=False, beats=[beat(0, 0.1), beat(1, 0.3)])
    found = outcomes(report)
    assert (found["finite_weights"], found["save_time"], found["slow_rank"]) == (FAIL, FAIL, FAIL)
    assert "rank 1" in report.sentence


@pytest.mark.parametrize("silent", [None, beat(1, None), beat(1, 0.3, attempt=2), beat(1, 0.3, age=100.0)])
def test_a_rank_that_did_not_tell_is_not_measured(run, silent):
    run.attempt(1)
    found = outcomes(run.look(run.result(1, 1, 10), beats=[beat(0, 0.1), silent]))
    assert found["slow_rank"] is UNKNOWN


def test_foreign_and_torn_lines_cost_only_themselves(run):
    run.attempt(1)
    run.train(1, 1, 50)
    foreign = [
        "3",
        "[]",
        '{"attempt": 1}',
        '{"attempt": "1", "step": 2, "time": 1, "loss": "nan"}',
        '{"torn": ',
        "\0\0",
    ]
    foreign.append('{"attempt": 1, "step": 3, "time": 1, "loss": "bad"}')
    foreign.append('{"attempt": 9, "step": 3, "time": 1, "loss": "nan"}')  # an attempt that is none of ours
    jsonl.append(run.places.metrics, foreign)
    run.train(1, 51, 60)
    run.places.saves.write_text("torn")
    report = run.look(run.result(1, 1, 60))
    (check,) = (check for check in report.checks if check.name == "finite_loss")
    assert (check.outcome, check.figures["measured"]) == (PASS, 60)


@pytest.mark.parametrize("size", [0, 1, 1000, 200_000, 3_000_000, 10_000_000_000])
def test_little_is_read_of_much(size):
    parts = step_rows._parts(size, [size // 3, size // 2])
    assert all(begin < end for begin, end in parts)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(parts))
    assert (parts[-1][1] if parts else 0) == size
    assert sum(end - begin for begin, end in parts) <= min(size, 650_000)


def test_a_long_run_is_judged_at_once(run):
    """100,000 steps: under 50 ms on a machine with nothing else to do; the plateau and the speed of the whole run are seen."""
    run.attempt(1)
    run.train(1, 1, 60_000, seconds=0.5)
    run.attempt(2, resumed_from=50_000)
    run.train(2, 50_001, 100_000, seconds=0.5)
    for step in range(99_000, 100_000, 50):
        run.saved(2, step, 2.0)
    run.result(2, 99, 99_000)
    result = run.result(2, 100, 100_000)
    took = []
    for _ in range(7):
        began = time.process_time()
        report = run.look(result, steps=100_000)
        took.append(time.process_time() - began)
    found = outcomes(report)
    assert found == dict.fromkeys(found, PASS) | {"slow_rank": UNKNOWN}
    restore = next(check for check in report.checks if check.name == "gradient_norm_after_restore")
    assert restore.figures["restored_step"] == 50_000
    assert report.seconds > 0
    print(f"a look at 100,000 steps takes {1000 * min(took):.1f} ms")
    assert min(took) < 0.2
