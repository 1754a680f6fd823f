"""Programs that shard their model: they train as a whole one does, are resumed bit for bit, and on any number of ranks."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from everstep.core.errors import Damaged
from everstep.store import checkpoint as committed
from everstep.store import jsonl
from everstep.store import tensors as stored
from everstep.store.tensors import weights_digest, weights_digest_of
from everstep.trainer.fitting import Fit
from everstep.trainer.reading import Reading, load_checkpoint

PROGRAM = f"{Path(__file__).with_name('sharded.py')}:build"
FOUR = [1, 2, 1, 3, 1, 4, 2, 3, 2, 4, 3, 4, 1]  # every change of 1, 2, 3 and 4 ranks to another number, once

LEG = 3


def gathered(run, name):
    """The shared state in a checkpoint's files, sharded tensors whole."""
    folder = run.places.checkpoints("local") / name
    reading = Reading(folder, committed.read_manifest(folder))
    state = Fit(reading.want).fit(reading.part(0).state)
    reading.fill()
    reading.check_rest()
    return state


def equal(one, other, path=""):
    """Whether two states are equal bit for bit; random numbers are another test's."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        for index, (mine, its) in enumerate(zip(one, other, strict=True)):
            equal(mine, its, f"{path}/{index}")
    else:
        assert repr(one) == repr(other), path


def ids_of(parts, ranks):
    """The samples of each step in the order of the ranks. A rank that stands in for nobody's sample notes 0 and 1."""
    found = {}
    for rank in range(ranks):
        for row in parts[rank]:
            found.setdefault(row["step"], [])
            found[row["step"]] += [] if row["ids"] == [0, 1] else row["ids"]
    return found


def trained(make_run, name, ranks, steps=30, **config):
    run = make_run(name, **config)
    gang = run.run(ranks=ranks, program=PROGRAM, steps=steps, lease=(20, steps))
    assert gang.wait(60) == [0] * ranks, gang.logs()
    return run


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, {}),
        (2, {"clip": 0.5, "tied": True}),
        (3, {"accumulation": 2}),  # six chunks of four samples: two ranks always have one without
        (2, {"shard": "some", "clip": 0.5}),
        (2, {"shard": "columns", "scaler": True, "clip": 0.5, "average": True}),
    ],
)
def test_it_trains_as_a_whole_model_does(make_run, ranks, config):
    """Losses and weights differ by rounding only, also over the short tail of an epoch, where a rank has no sample."""
    same = {"optimizer": "sgd", "drop": 0.0}
    whole = trained(make_run, "whole", 1, **(config | same | {"shard": "none"}))
    run = trained(make_run, "sharded", ranks, **(config | same))
    rows, expected = run.rows([(1, 0)]), whole.rows([(1, 0)])
    assert [row["samples"] for row in rows.values()] == [row["samples"] for row in expected.values()]
    for step, row in rows.items():
        assert row["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4)
    state, should = gathered(run, "step-00000030.a1"), gathered(whole, "step-00000030.a1")
    for name, value in state["model"].items():
        assert torch.allclose(value, should["model"][name], rtol=1e-4, atol=1e-6), name
    assert ids_of([run.parts(rank)[0] for rank in range(ranks)], ranks) == ids_of([whole.parts(0)[0]], 1)


def test_what_is_saved_by_its_ranks_is_one_model(make_run):
    """Each rank writes its own part; verification, digests and `load_checkpoint` see whole tensors."""
    run = trained(make_run, "a", 3, tied=True, norm=True, average=True, batch_size=12, drop_last=True)
    folder = run.places.checkpoints("local") / "step-00000030.a1"
    structure = committed.read_structure(run.places.persistent)
    outcome = committed.verify(folder, structure)
    assert (outcome.ok, outcome.why) == (True, "")
    assert structure.model["inner.weight"].shape == (15, 8)
    weights = load_checkpoint(folder)
    assert {name: tuple(one.shape) for name, one in weights.items()}["again.weight"] == (15, 15)
    assert weights["same.weight"].data_ptr() == weights["again.weight"].data_ptr()
    assert weights["scale.by"].dtype == torch.complex64
    assert weights_digest(weights) == weights_digest_of(folder)
    of_rank_0 = [stored.read_header(folder / f"rank-0-{index}.safetensors") for index in (0, 1)]
    of_rank_1 = stored.read_header(folder / "rank-1.safetensors")
    assert "model/norm.running_mean" in of_rank_0[0]
    assert "optimizer/state/0/step" in of_rank_0[0]
    assert "model/inner.weight" in of_rank_0[1]
    assert all(name.startswith("rng/") for name in of_rank_0[0].keys() & of_rank_1.keys())
    assert of_rank_0[1].keys() < of_rank_1.keys()


SHAPES = {
    "one rank": {"ranks": 1, "average": True},
    "two ranks": {"ranks": 2, "tied": True, "clip": 0.5, "average": True, "noisy": True},
    "two ranks, batch norm, workers": {"ranks": 2, "norm": True, "drop_last": True, "workers": 2},
    "two ranks, partly sharded": {"ranks": 2, "shard": "some", "accumulation": 3, "clip": 0.5},
    "two ranks, copied beside the next step": {"ranks": 2, "wide": 70_001},  # 17 MB of state on each rank
    "four ranks, columns": {"ranks": 4, "shard": "columns", "noisy": True, "scaler": True},
}


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_killed_in_mid_epoch_and_resumed(make_run, shape):
    """The same bits as of a run that was never touched: rows, samples, random numbers, weights, moments."""
    config = {"batch_size": 8} | SHAPES[shape]  # an epoch ends in step 13, with one sample
    ranks = config.pop("ranks")
    more = {"ranks": ranks, "program": PROGRAM, "steps": 20, "lease": (20,), "save_every_steps": 5}
    reference = make_run("reference", **config)
    gang = reference.run(**more)
    assert gang.wait(60) == [0] * ranks, gang.logs()
    run = make_run("killed", **config)
    gang = run.start(faults=[{"point": "train.step_end", "hit": 12, "rank": ranks - 1, "do": "sleep:60"}], **more)
    run.held(1, 10)
    os.kill(gang.pids[-1], 9)
    gang.kill()
    gang.wait()
    gang = run.run(2, "step-00000010.a1", **more)
    assert gang.wait(60) == [0] * ranks, gang.logs()
    assert run.rows([(1, 0), (2, 10)]) == reference.rows([(1, 0)])
    for rank in range(ranks):
        assert run.journal(rank, [0, 10]) == reference.journal(rank, [0])
    equal(gathered(reference, "step-00000020.a1"), gathered(run, "step-00000020.a2"))
    if "wide" in config:
        assert any(row["overlapped"] for row in jsonl.read(reference.places.saves))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("walk", "config"),
    [
        (FOUR, {"average": True, "tied": True}),
        (FOUR, {"shard": "none"}),
        ([3, 1, 2], {"shard": "if several"}),
        ([2, 4, 1], {"shard": "columns"}),
    ],
)
def test_another_number_of_ranks(make_run, walk, config):
    """BC-054: whole weights and moments at each load are, bit for bit, what the other ranks saved; the samples, the
    schedule and the counters go on, in mid-epoch; no sample is lost or seen twice."""
    config["batch_size"] = 8
    run = make_run("walk", **config)
    last, rows, parts = None, [], []
    for attempt, ranks in enumerate(walk, start=1):
        dump = run.folder / f"dump-{attempt}.pt"
        run.config["dump"] = str(dump)
        end = LEG * attempt
        gang = run.run(attempt, last, ranks, program=PROGRAM, steps=end, lease=(end,))
        assert gang.wait(60) == [0] * ranks, gang.logs()
        if last is not None:
            loaded, saved = torch.load(dump, weights_only=True), gathered(run, last)
            equal(loaded["model"], saved["model"])
            equal(loaded["optimizer"], saved["optimizer"]["state"])
            if "average" in config:
                equal(loaded["average"], saved["state"]["average"])
        rows.append((attempt, end - LEG))
        parts.append([run.parts(rank)[-1] for rank in range(ranks)])
        last = f"step-{end:08d}.a{attempt}"
        assert run.committed()[-1] == last
    alone = trained(make_run, "alone", 1, LEG * len(walk), shard="none", batch_size=8)
    mine, its = run.rows(rows), alone.rows([(1, 0)])
    for key in ("step", "samples", "epoch", "lr"):
        assert [row[key] for row in mine.values()] == [row[key] for row in its.values()]
    seen = {}
    for part, ranks in zip(parts, walk, strict=True):
        seen |= ids_of(part, ranks)
    assert seen == ids_of([alone.parts(0)[0]], 1)
    if len(seen) >= 13:
        assert sorted(itertools.chain.from_iterable(seen[step] for step in range(1, 14))) == list(range(97))


@pytest.fixture(scope="module")
def saved(zygote, tmp_path_factory):
    """A run of two ranks with a checkpoint of step 10."""
    from rigs.ranks import Driver

    run = Driver(zygote, tmp_path_factory.mktemp("saved") / "run")
    gang = run.run(ranks=2, program=PROGRAM, steps=10, lease=(10,))
    assert gang.wait(60) == [0, 0], gang.logs()
    return run


def test_a_probe_in_one_process_puts_the_model_together(saved):
    """Before a release the loss is computed by one process that joins nobody."""
    spec = saved.spec(1, "step-00000010.a1", program=PROGRAM, parent_pid=os.getpid())
    answer = saved.folder / "answer.json"
    environment = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "everstep.trainer.reprobe", str(answer)],
        input=spec.model_dump_json() + "\n",
        text=True,
        capture_output=True,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(answer.read_text())
    assert found["ok"], found
    kept = json.loads((saved.places.checkpoints("local") / "step-00000010.a1" / "rank-0.json").read_text())
    assert found["loss"] == float.fromhex(kept["probe"]["loss"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"shard": "two dimensions"}, "sharded over a mesh of 2x1, but only one dimension over all 2 ranks"),
        ({"shard": "by hand"}, "no module was given to fully_shard"),
        ({"shard": "some", "scaler": True}, "scaler: a GradScaler cannot work with again.weight, which is whole"),
    ],
)
def test_what_cannot_be_resharded_is_refused_in_a_sentence(make_run, config, said):
    run = make_run(**config)
    gang = run.run(ranks=2, program=PROGRAM)
    assert gang.wait(60) == [2, 2], gang.logs()
    end = gang.end()
    assert (end.cause.kind, said in end.cause.message) == ("user", True), end.cause.message


def test_a_loader_of_its_own_keeps_its_number_of_ranks(make_run):
    rich = f"{Path(__file__).with_name('rich.py')}:build"
    run = make_run(loader=True)
    assert run.run(ranks=2, program=rich, steps=5, lease=(5,)).wait(60) == [0, 0]
    gang = run.run(2, "step-00000005.a1", 1, program=rich, steps=10, lease=(10,))
    assert gang.wait(60) == [2]
    assert "own loader cannot change the number of ranks" in gang.end().cause.message


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_shard_that_is_missing_is_an_error(make_run, saved, ranks):
    """BC-057: never a warning and a fresh optimizer."""
    import shutil

    run = make_run("hurt")
    folder = run.places.checkpoints("local") / "step-00000010.a1"
    shutil.copytree(saved.places.checkpoints("local") / folder.name, folder)
    (folder / "rank-1.safetensors").unlink()
    gang = run.run(2, folder.name, ranks, program=PROGRAM)
    assert gang.wait(60)[0] == 1, gang.logs()
    end = gang.end()
    assert (end.cause.kind, end.cause.key) == ("damaged", folder.name)
    assert "rank-1.safetensors is missing" in end.cause.message
    with pytest.raises(Damaged, match=r"rank-1\.safetensors is missing"):
        load_checkpoint(folder)
