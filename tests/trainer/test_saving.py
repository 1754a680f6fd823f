"""The saver with its buffers and its writer process: what is kept, what it costs, and what it survives."""

import hashlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from everstep.core.checkpoint import Key, Manifest, SaveCost
from everstep.core.segment import AttemptSpec
from everstep.store import checkpoint as committed
from everstep.store import faults, jsonl
from everstep.store.layout import RunPlaces
from everstep.trainer import rng, saver, snapshot, structure
from everstep.trainer.commit import Target
from everstep.trainer.failure import SaveFailed
from everstep.trainer.program import Program
from everstep.trainer.ranks import Ranks
from everstep.trainer.reading import Reading
from everstep.trainer.saver import Saver
from everstep.trainer.snapshot import Snapshot
from everstep.trainer.vitals import Vitals

WIDE = 1200  # a layer of 5.8 MB, with its moments 17 MB: enough to be copied beside the training


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, batch):
        return self.norm(self.layer(batch))


class Rig:
    """One rank's saver and a program that trains on noise."""

    def __init__(self, folder, width=16, plan=None, overlap=True):
        torch.manual_seed(0)
        self.model = Model(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.extra = {"count": 0}
        keeper = SimpleNamespace(state_dict=lambda: self.extra, load_state_dict=self.extra.update)
        self.program = Program(
            model=self.model, optimizer=self.optimizer, dataset=[1], batch_size=1, loss=lambda batch: batch,
            scheduler=self.scheduler, state={"extra": keeper},
        )  # fmt: skip
        self.places = RunPlaces(persistent=folder / "run", local=folder / "local")
        for place in (self.places.persistent, self.places.local):
            place.mkdir(parents=True, exist_ok=True)
        spec = AttemptSpec(
            name="job", run="run", attempt=1, rank=0, world_size=1, local_rank=0, program="p:build", search_path=".",
            config={}, data=".", steps=10, seed=0, threads=2, run_dir=str(self.places.persistent),
            local_dir=str(self.places.local), parent_pid=os.getpid(),
        )  # fmt: skip
        self.vitals = Vitals(spec, os.getpid())
        target = Target(self.places, Ranks(), structure.of(self.program, 1), {})
        later = snapshot.changed_by_the_optimizer(self.program) if overlap else None
        self.saver = Saver(self.vitals, target, None, later=later, threads=2)
        self.saver.start()
        self.width = width

    def step(self):
        """Forward and backward, the fence, and the optimizer's step: the order of the training loop."""
        self.forward()
        self.saver.fence()
        self.update()

    def forward(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, self.width)).square().mean().backward()

    def update(self):
        self.optimizer.step()
        self.scheduler.step()
        self.extra["count"] += 1

    def save(self, step, **more):
        of = Snapshot(step=step, samples=step, epoch=0, probe={}, time=1.0, **more)
        self.saver.take(snapshot.living(self.program, 0), of)

    def kept(self, step, tier="local"):
        """The state in a committed checkpoint, after it has been verified."""
        folder = self.places.checkpoint(tier, Key(step, 1))
        outcome = committed.verify(folder, structure.of(self.program, 1))
        assert (outcome.ok, outcome.why) == (True, "")
        return Reading(folder, committed.read_manifest(folder)).part(0).state

    @property
    def costs(self):
        return [SaveCost.model_validate(row) for row in jsonl.read(self.places.saves)]

    @property
    def errors(self):
        return [row["error"] for row in jsonl.read(self.places.persistent / "save-errors.jsonl")]


@pytest.fixture
def rig(tmp_path, monkeypatch):
    made = []

    def make(*, plan=None, **more):
        if plan:
            file = tmp_path / "faults.json"
            file.write_text(json.dumps(plan))
            monkeypatch.setattr(faults, "_PLAN", str(file))
        made.append(Rig(tmp_path / f"rig-{len(made)}", **more))
        return made[-1]

    yield make
    for one in made:
        one.saver._scribe.close()
        one.saver._hands.shutdown()


def frozen(state):
    """A deep copy of a state, by other means than the product's."""

    def digest(value):
        return [
            str(value.dtype),
            list(value.shape),
            hashlib.sha256(torch.as_tensor(value).detach().numpy().tobytes()).hexdigest(),
        ]

    return json.loads(json.dumps(state, default=digest))


@pytest.mark.parametrize("width", [16, WIDE])
def test_what_is_kept_is_the_state_when_it_was_taken(rig, width):
    """BC-027: everything is changed right after the call returns, as early as the training loop may do it."""
    run = rig(width=width)
    expected = {}
    for step in (1, 2, 3):
        run.step()
        expected[step] = frozen(snapshot.living(run.program, 0))
        run.save(step)
        run.forward()
        with torch.no_grad():
            run.model.norm.running_mean.add_(5)
        torch.manual_seed(99)
        random.seed(99)
        run.extra["count"] = -7
        run.optimizer.param_groups[0]["lr"] = 0.5
        run.saver.fence()
        run.update()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.fill_(step)
    run.saver.finish()
    for step, state in expected.items():
        assert frozen(run.kept(step)) == state
    assert [cost.overlapped for cost in run.costs] == [False, width == WIDE, width == WIDE]


def test_a_copy_that_the_fence_has_to_finish(rig):
    """No helper copies anything: the training thread does it all at the fence, and nothing is lost."""
    run = rig(width=WIDE)
    run.step()
    run.save(1)
    run.step()
    run.saver._hands.submit = lambda _: None
    weights = run.model.layer.weight.detach().clone()
    run.save(2)
    run.step()
    assert not torch.equal(weights, run.model.layer.weight)
    run.saver.finish()
    assert torch.equal(run.kept(2)["model"]["layer.weight"], weights)
    assert run.costs[1].fence_seconds > 0


@pytest.mark.parametrize("change", ["in place", "behind autograd's back"])
def test_a_program_that_changes_parameters_in_its_forward_pass_is_never_overlapped(rig, change):
    run = rig(width=WIDE)
    for step in (1, 2):
        run.step()
        weights = run.model.layer.weight.detach().clone()
        run.save(step)
        with torch.no_grad():
            (run.model.layer.weight if change == "in place" else run.model.layer.weight.data).mul_(0.5)
        run.step()
        run.saver.finish()
        assert torch.equal(run.kept(step)["model"]["layer.weight"], weights)
    assert [cost.overlapped for cost in run.costs] == [False, False]


def test_a_torn_snapshot_is_never_committed(rig):
    """The program was well-behaved at first. An optional save is given up; one that must be ends the attempt, once."""
    run = rig(width=WIDE)
    run.step()
    run.save(1)
    run.step()
    run.saver._hands.submit = lambda _: None
    for step, must in ((2, False), (3, True)):
        run.saver._may_overlap = True
        run.save(step, must=must)
        with torch.no_grad():
            run.model.layer.weight.mul_(0.5)
        run.saver.fence()
        if must:
            with pytest.raises(SaveFailed, match="changed its parameters"):
                run.saver.finish()
        else:
            run.saver.finish()
        assert not run.places.checkpoint("local", Key(step, 1)).joinpath("manifest.json").exists()
    again = Saver(run.vitals, run.saver._target, None, later=lambda *_: True)
    assert not again._may_overlap


@pytest.mark.parametrize("point", ["begin", "mid_file", "written", "before_manifest", "rename", "after_commit"])
def test_a_writer_that_dies_is_started_again(rig, point):
    """SIGKILL of the writer at each of its points: the same snapshot is written by the next one, and it is told."""
    run = rig(plan=[{"point": f"writer.{point}", "hit": 1}])
    run.step()
    run.save(1)
    expected = frozen(snapshot.living(run.program, 0))
    run.step()
    run.save(2)
    run.saver.finish()
    assert frozen(run.kept(1)) == expected
    run.kept(2)
    assert run.saver._scribe.deaths == 1
    assert run.errors == ["the writer process ended with signal 9"]
    assert [path.name for path in run.places.checkpoint("local", Key(1, 1)).iterdir() if path.name[0] == "."] == []


def test_a_writer_that_always_dies_ends_the_attempt_only_where_it_must(rig, monkeypatch):
    monkeypatch.setattr(saver, "PAUSE", 0.01)
    run = rig(plan=[{"point": "writer.mid_file", "hit": 1} for _ in range(8)])
    run.save(1)
    run.saver.finish()
    assert not run.places.checkpoint("local", Key(1, 1)).exists()
    run.save(2, must=True)
    with pytest.raises(SaveFailed, match="signal 9"):
        run.saver.finish()


def test_a_full_local_tier_sends_the_checkpoint_to_the_persistent_one(rig):
    """BC-023: nothing partial is left behind, and the segment's result says where its checkpoint is."""
    run = rig(plan=[{"point": "save.mid_file", "hit": 1, "do": "errno:28"}])
    run.step()
    run.save(10, must=True, segment=1)
    run.saver.finish()
    run.kept(10, "persistent")
    assert not run.places.checkpoint("local", Key(10, 1)).exists()
    assert json.loads(run.places.result(1).read_bytes())["tier"] == "persistent"
    (error,) = run.errors
    assert "bytes free" in error
    assert "are needed" in error


def test_a_third_snapshot_waits_for_a_place_and_the_wait_is_told(rig):
    run = rig(plan=[{"point": "writer.begin", "hit": hit, "do": "sleep:0.3"} for hit in (1, 2)])
    for step in (1, 2, 3):
        run.step()
        run.save(step)
    run.saver.finish()
    assert [cost.step for cost in run.costs] == [1, 2, 3]
    assert run.costs[2].wait_seconds > 0.1
    assert max(cost.held for cost in run.costs) <= 2 * (run.costs[0].bytes + 4096)


def test_a_hanging_writer_holds_up_no_training(rig, monkeypatch):
    """Optional saves are given up, by the clock at once, by the step after a while; when the disk is back all is well."""
    monkeypatch.setattr(saver, "PATIENCE", 0.3)
    run = rig()
    run.save(1)
    run.saver.finish()
    os.kill(run.saver._scribe.pid, signal.SIGSTOP)
    run.save(2)
    run.save(3)
    began = time.monotonic()
    run.save(4, patient=False)
    assert time.monotonic() - began < 0.25
    assert not run.saver.has_room
    run.save(5)
    os.kill(run.saver._scribe.pid, signal.SIGCONT)
    run.saver.finish()
    run.save(6)
    run.saver.finish()
    assert [cost.step for cost in run.costs] == [1, 2, 3, 6]
    assert len([error for error in run.errors if "nothing moves" in error]) == 2


def test_many_saves_take_no_more_memory_descriptors_or_threads(rig):
    """BC-029: buffers are reused."""
    run = rig(width=700)
    seen = []
    for step in range(1, 61):
        run.step()
        run.save(step)
        run.saver.finish()
        if step in (10, 60):
            seen.append((_resident(), len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
    (before, *small), (after, *large) = seen
    assert small == large
    assert after - before < run.costs[0].bytes


def test_the_manifest_is_the_trainers_own(rig):
    run = rig()
    run.step()
    run.save(7, metrics={"loss": float("inf")})
    run.saver.finish()
    manifest = committed.read_manifest(run.places.checkpoint("local", Key(7, 1)))
    assert isinstance(manifest, Manifest)
    assert (manifest.step, manifest.world_size, manifest.metrics["loss"]) == (7, 1, "inf")
    rng.restore(run.kept(7)["rng"])


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
