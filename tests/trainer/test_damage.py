"""A checkpoint that is not what was committed is refused by name; nothing is filled in."""

import json
import shutil

import blake3
import pytest

from everstep.core.checkpoint import Manifest
from everstep.core.errors import Damaged
from everstep.trainer.reading import load_checkpoint


@pytest.fixture
def saved(make_run):
    """A run with a checkpoint of step 10, and its folder."""
    run = make_run()
    run.lease(1, 10)
    assert run.run(1, lease=(), steps=10).wait() == [0]
    run.restore = run.places.checkpoints("local") / "step-00000010.a1"
    return run


def end_of(driver, **more):
    gang = driver.run(2, "step-00000010.a1", lease=(20,), **more)
    assert gang.wait() == [1], gang.logs()
    assert "Traceback" in gang.logs()
    return gang.end()


def edit(folder, name, change):
    """Change a member and the manifest with it, as a program that writes its own would."""
    path = folder / name
    document = json.loads(path.read_text())
    change(document)
    data = json.dumps(document).encode()
    path.write_bytes(data)
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    files = tuple(
        one.model_copy(update={"size": len(data), "blake3": blake3.blake3(data).hexdigest()})
        if one.path == name
        else one
        for one in manifest.files
    )
    (folder / "manifest.json").write_text(Manifest(**{**dict(manifest), "files": files, "seal": ""}).to_json())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "hurt",
    [
        lambda folder: (folder / "rank-0.json").unlink(),
        lambda folder: edit(folder, "rank-0.json", lambda one: one["progress"].update(epoch=-1)),
        lambda folder: edit(folder, "rank-0.json", lambda one: one["tree"].update(model={"$python": "os.system"})),
        lambda folder: flip(folder / "rank-0.safetensors"),
        lambda folder: (folder / "manifest.json").unlink(),
    ],
)
def test_one_damaged_member_makes_the_whole_damaged(saved, hurt):
    """BC-005: never a default position; the end names the folder, so that the one before can be taken.

    Whatever else may be damaged, and how, is in `tests/store/test_mutations.py`.
    """
    hurt(saved.restore)
    end = end_of(saved)
    assert (end.outcome, end.cause.kind, end.cause.key) == ("failed", "damaged", "step-00000010.a1")
    assert "step-00000010.a1" in end.cause.message


def test_another_runs_checkpoint(saved):
    end = end_of(saved, run="r2")
    assert (end.cause.kind, "run r1" in end.cause.message) == ("damaged", True)


def test_damage_in_another_ranks_part(make_run):
    """Every file is checked, also by a rank that does not need it."""
    run = make_run()
    run.lease(1, 10)
    assert run.run(1, lease=(), ranks=2, steps=10).wait() == [0, 0]
    flip(run.places.checkpoints("local") / "step-00000010.a1" / "rank-1.safetensors")
    end = end_of(run)
    assert (end.cause.kind, "rank-1.safetensors" in end.cause.message) == ("damaged", True)


def test_another_model_than_was_saved_gives_another_probe_loss(saved):
    """The digests are right, the values are not: the loss on the fixed batch tells."""
    edit(saved.restore, "rank-0.json", lambda one: one["probe"].update(loss=(1.5).hex()))
    end = end_of(saved)
    assert (end.cause.kind, end.cause.key) == ("probe", "step-00000010.a1")
    gang = saved.run(3, "step-00000010.a1", lease=(20,), check_probe=False, steps=20)
    assert gang.wait() == [0]


def test_probe_in_another_environment_has_a_tolerance(saved):
    def change(document):
        document["environment"]["threads"] = 5
        document["probe"]["loss"] = (float.fromhex(document["probe"]["loss"]) * 1.0005).hex()

    edit(saved.restore, "rank-0.json", change)
    assert saved.run(2, "step-00000010.a1", lease=(20,), steps=20).wait() == [0]


def test_load_checkpoint(saved, tmp_path):
    weights = load_checkpoint(saved.restore)
    assert sorted(weights) == ["0.bias", "0.weight", "3.bias", "3.weight"]
    assert load_checkpoint(saved.restore.as_uri()).keys() == weights.keys()
    moved = shutil.copytree(saved.restore, tmp_path / "step-00000010.a1")
    flip(moved / "rank-0.safetensors")
    with pytest.raises(Damaged, match=r"rank-0\.safetensors"):
        load_checkpoint(str(moved))
    with pytest.raises(ValueError, match="neither a folder"):
        load_checkpoint("gs://bucket/step")
    with pytest.raises(ValueError, match="names no checkpoint"):
        load_checkpoint("s3://bucket/step")
