"""Programs with everything that may be stateful are resumed bit for bit too."""

from pathlib import Path

import pytest
import torch

from everstep.store import checkpoint as committed
from everstep.store.tensors import weights_digest, weights_digest_of
from everstep.trainer.reading import Reading

PROGRAM = f"{Path(__file__).with_name('rich.py')}:build"
MORE = {"program": PROGRAM, "steps": 20, "save_every_steps": 5, "lease": (20,)}


def state(run, folder, rank=0):
    path = run.places.checkpoints("local") / folder
    return Reading(path, committed.read_manifest(path)).part(rank).state


def equal(one, other, path=""):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
        assert one.stride() == other.stride(), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        for index, (mine, its) in enumerate(zip(one, other, strict=True)):
            equal(mine, its, f"{path}/{index}")
    else:
        assert type(one) is type(other), path
        assert repr(one) == repr(other), path


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("own_loader", [False, True])
def test_everything_stateful(make_run, ranks, own_loader):
    """BC-053: scheduler, scaler, average, buffers of every rank, tied weights, own loader: the final states are equal."""
    reference = make_run("reference", loader=own_loader)
    gang = reference.run(ranks=ranks, **MORE)
    assert gang.wait() == [0] * ranks, gang.logs()
    run = make_run("killed", loader=own_loader)
    hold = [{"point": "train.step_end", "hit": 13, "do": "sleep:60"}]
    gang = run.start(ranks=ranks, faults=hold, **MORE)
    run.held(1, 10)
    gang.kill()
    gang.wait()
    gang = run.run(2, "step-00000010.a1", ranks=ranks, **MORE)
    assert gang.wait() == [0] * ranks, gang.logs()
    for rank in range(ranks):
        equal(state(reference, "step-00000020.a1", rank), state(run, "step-00000020.a2", rank))
    assert run.rows([(1, 0), (2, 10)]) == reference.rows([(1, 0)])
    if not own_loader:  # the two parameters that no rank has a gradient for got no optimizer state
        assert len(state(run, "step-00000020.a2")["optimizer"]["state"]) == 7


def test_tied_weights_are_stored_once_and_digests_agree(make_run):
    run = make_run()
    run.run(**MORE)
    folder = run.places.checkpoints("local") / "step-00000020.a1"
    weights = run.weights(folder.name)
    assert weights["out.weight"].data_ptr() == weights["words.weight"].data_ptr()
    assert weights_digest(weights) == weights_digest_of(folder)
    document = (folder / "rank-0.json").read_text()
    assert '"model/out.weight":"model/words.weight"' in document.replace(" ", "")
    assert "model/never.weight" in document
