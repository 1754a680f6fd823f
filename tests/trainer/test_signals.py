"""What a rank tells about its training: the norm of its gradients, its own work in a step, its GPU."""

import pytest
import torch
from rigs.ranks import HERE
from torch import nn

from everstep.core.segment import AttemptSpec, Heartbeat
from everstep.store import jsonl
from everstep.trainer import device, gradients, vitals
from everstep.trainer.stopwatch import PENDING, Stopwatch
from everstep.trainer.vitals import FEW, RECENT, Vitals

PROGRAM = f"{HERE / 'signals.py'}:build"
EVERY = gradients.NORM_EVERY


def trained(make_run, ranks=1, **config):
    run = make_run(**config)
    gang = run.run(ranks=ranks, program=PROGRAM, steps=40, lease=(40,))
    assert gang.wait() == [0] * ranks, gang.logs()
    return run


def norms(run):
    return {row["step"]: row["grad_norm"] for row in jsonl.read(run.places.metrics) if "grad_norm" in row}


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_clipping_a_row_now_and_then_carries_the_norm(make_run, ranks):
    run = trained(make_run, ranks, norms=True)
    seen = [float.fromhex(row["norm"]) for row in run.parts(0)[0] if "norm" in row]
    assert norms(run) == {step: pytest.approx(seen[step - 1], rel=1e-6) for step in (EVERY, 2 * EVERY)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_clipping_each_row_carries_the_norm_before_it(make_run, ranks):
    run = trained(make_run, ranks, norms=True, clip=1e9)  # nothing is so large: the optimizer sees what was measured
    seen = [float.fromhex(row["norm"]) for row in run.parts(0)[0] if "norm" in row]
    assert norms(run) == {step: pytest.approx(value, rel=1e-6) for step, value in enumerate(seen, start=1)}
    assert len(seen) == 40
    run = trained(lambda **more: make_run("clipped", **more), ranks, norms=True, clip=0.1)
    after = [float.fromhex(row["norm"]) for row in run.parts(0)[0] if "norm" in row]
    assert max(after) < 0.1001 < min(norms(run).values())


@pytest.mark.parametrize(("clip", "measured"), [(None, 0), (1e9, 40)])
def test_gradients_that_are_scaled_are_never_measured(make_run, clip, measured):
    run = trained(make_run, norms=True, scaler=True, clip=clip)
    assert len(norms(run)) == measured
    assert all(row["scaled"] for row in jsonl.read(run.places.metrics))
    if measured:  # the scale is 1,024, the losses are a few units
        assert max(norms(run).values()) < 100


def test_a_norm_that_is_no_number_is_a_word(make_run):
    run = trained(make_run, clip=1.0, blows_up_at=40)
    assert norms(run)[40] == "nan"
    assert norms(run)[39] > 0


def test_a_slow_rank_shows_in_its_work_and_not_in_its_steps(make_run):
    run = make_run(slow_rank=1, slow=0.03)
    gang = run.start(ranks=2, program=PROGRAM, lease=(30,))
    run.until(lambda: all(run.places.heartbeat(rank).exists() and run.heartbeat(rank)["step"] == 30 for rank in (0, 1)))
    run.until(lambda: run.heartbeat(0)["phase"] == "wait")
    quick, slow = (Heartbeat.model_validate(run.heartbeat(rank)) for rank in (0, 1))
    gang.kill()
    assert quick.work_seconds < 0.015
    assert slow.work_seconds > 0.03
    assert quick.step_seconds == pytest.approx(slow.step_seconds, rel=0.2)
    assert (quick.gpu, slow.gpu) == ("", "")


@pytest.mark.parametrize(("ranks", "program"), [(1, PROGRAM), (2, f"{HERE / 'sharded.py'}:build")])
def test_work_is_unknown_for_one_rank_and_for_a_sharded_model(make_run, ranks, program):
    run = make_run()
    gang = run.start(ranks=ranks, program=program, lease=(20,))
    run.until(lambda: run.places.heartbeat(0).exists() and run.heartbeat(0)["step"] == 20)
    assert run.heartbeat(0)["work_seconds"] is None
    gang.kill()


def spec():
    return AttemptSpec(
        name="a", run="r", attempt=1, rank=0, world_size=2, local_rank=0, program="a:b", search_path="/", config={},
        data="/", steps=1, seed=0, threads=1, run_dir="/", local_dir="/", parent_pid=1,
    )  # fmt: skip


def test_work_is_a_median_that_one_slow_step_does_not_move(monkeypatch):
    one = Vitals(spec(), 1)
    one.worked([0.1] * (FEW - 1))
    assert one.heartbeat().work_seconds is None
    one.worked([9.0])
    assert one.heartbeat().work_seconds == 0.1
    one.worked([0.1] * RECENT)
    one.worked([5.0] * 1000)  # within a moment: hardly one of them is kept
    assert one.heartbeat().work_seconds == 0.1
    monkeypatch.setattr(vitals, "WORK_EVERY", 0.0)
    one.worked([5.0] * RECENT)
    assert one.heartbeat().work_seconds == 5.0


class Event:
    """A moment in a stream that runs behind its host."""

    clock, passed = 0.0, 0.0

    def record(self):
        self.at = Event.clock

    def query(self):
        return self.at <= Event.passed

    def elapsed_time(self, other):
        return (other.at - self.at) * 1000


def test_on_a_gpu_work_is_read_when_it_has_passed_and_never_waited_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", lambda enable_timing: Event())
    watch = Stopwatch(torch.device("cuda", 0))
    for step in range(PENDING + 5):
        Event.clock = float(step)
        watch.start()
        Event.clock += 0.25
        watch.stop()
    assert list(watch.passed()) == []
    Event.passed = 9.9
    assert list(watch.passed()) == [0.25] * 10
    Event.passed = 1000.0
    assert len(list(watch.passed())) == PENDING - 10


def test_the_uuid_is_as_nvml_prints_it(monkeypatch):
    assert device.uuid(torch.device("cpu")) == ""
    for told, said in (
        ("1c2d3e4f-0000-1111-2222-333344445555", "GPU-1c2d3e4f-0000-1111-2222-333344445555"),
        ("GPU-1c2d", "GPU-1c2d"),
        ("MIG-1c2d", "MIG-1c2d"),
        ("", ""),
    ):
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda _, told=told: type("P", (), {"uuid": told}))
        assert device.uuid(torch.device("cuda", 0)) == said


def test_norms_are_torchs_own_and_read_only():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(2, 2))  # the last one has no gradient
    model[:2](torch.randn(4, 5)).square().mean().backward()
    parameters = list(model.parameters())
    before = [one.grad.clone() for one in parameters if one.grad is not None]
    expected = torch.nn.utils.get_total_norm(before)
    assert torch.equal(gradients.norm(parameters), expected)
    assert all(torch.equal(one.grad, was) for one, was in zip(parameters, before, strict=False))
    assert torch.equal(gradients.clip(parameters, 0.01), expected)
    assert gradients.norm(parameters).item() == pytest.approx(0.01, rel=1e-3)


def test_a_sparse_gradient_has_no_norm_and_breaks_nothing():
    words = nn.Embedding(5, 3, sparse=True)
    words(torch.tensor([1, 2])).sum().backward()
    assert gradients.norm(list(words.parameters())) is None
