import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fabric
import numpy as np
import pytest

from everstep.core.checkpoint import MANIFEST, Key
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.store import checkpoint

NAME = "step-00000040.a2"


@pytest.fixture
def folder(tmp_path):
    return fabric.checkpoint(tmp_path / NAME, ranks=2)


def verify(folder):
    return checkpoint.verify(folder, fabric.structure(), run=fabric.RUN, job=fabric.JOB)


def test_a_good_checkpoint_verifies_again_and_again(folder):
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST)
    for _ in range(3):
        result = verify(folder)
        assert (result.ok, result.why, result.bytes) == (True, "", size)
        assert result.manifest_digest == checkpoint.manifest_digest(folder)
    assert checkpoint.read_manifest(folder).key == Key(40, 2)


def _other_job(folder):
    (folder / MANIFEST).unlink()
    fabric.commit(folder, job="another", ranks=2)


def _recommit(change, ranks=2):
    """A writer's own fault: everything is consistent but what is held."""

    def do(folder):
        (folder / MANIFEST).unlink()
        change(folder)
        fabric.commit(folder, ranks=ranks)

    return do


def _tensors(**changed):
    def do(folder):
        shutil.rmtree(folder)
        held = {name: one for name, one in (fabric.weights(40) | changed).items() if one is not None}
        fabric.checkpoint(folder, tensors=held)

    return do


NAMES = tuple(fabric.weights())


def _rank(names=NAMES, rank=0, step=40, **changed):
    return _recommit(lambda folder: fabric.write_rank(folder, rank, 2, names, step, **changed))


NAN = np.full((16, 8), np.nan, np.float32)

DAMAGES = {
    "another job's": (_other_job, MANIFEST),
    "empty json": (_recommit(lambda f: (f / "rank-0.json").write_text("{")), "rank-0.json"),
    "nan in json": (_recommit(lambda f: (f / "rank-1.json").write_text('{"a": NaN}')), "rank-1.json"),
    "json is a list": (_recommit(lambda f: (f / "rank-1.json").write_text("[]")), "rank-1.json"),
    "a rank is missing": (_recommit(lambda f: (f / "rank-1.json").unlink()), "rank-1.json"),
    "position of another step": (_rank(step=39), "rank-0.json"),
    "negative position": (_rank(progress={"step": 40, "samples": -1}), "rank-0.json"),
    "no position": (_rank(progress=None), "rank-0.json"),
    "another rank's": (_rank(rank=0, world_size=3), "rank-0.json"),
    "tensor without reference": (_rank(names=list(fabric.weights())[1:]), "rank-0-0.safetensors"),
    "reference without tensor": (_rank(names=[*fabric.weights(), "rng/cuda"]), "rank-0.json"),
    "tie to nothing": (_rank(aliases={"model/head.weight": "model/nothing"}), "rank-0.json"),
    "nan in a parameter": (_tensors(**{"model/embed.weight": NAN}), "rank-0-0.safetensors"),
    "nan in the optimizer": (_tensors(**{"optimizer/state/0/exp_avg": NAN}), "rank-0-1.safetensors"),
    "another shape": (_tensors(**{"model/norm.bias": np.zeros(9, np.float16)}), "rank-0-0.safetensors"),
    "another dtype": (_tensors(**{"model/norm.bias": np.zeros(8, np.float32)}), "rank-0-0.safetensors"),
    "a tensor too many": (_tensors(**{"model/new": np.zeros(1, np.float32)}), "rank-0-0.safetensors"),
    "a tensor too few": (_tensors(**{"model/norm.bias": None}), "rank-0.json"),
    "not safetensors": (_recommit(lambda f: (f / "rank-1.safetensors").write_bytes(b"\0" * 9)), "rank-1.safetensors"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_a_writer_got_wrong_is_refused_and_named(folder, kind):
    """All digests are right. What may happen to the bytes afterwards is in `test_mutations.py`."""
    hurt, name = DAMAGES[kind]
    assert verify(folder).ok
    hurt(folder)
    result = verify(folder)
    assert (result.ok, result.file) == (False, name)
    assert result.why.startswith(f"{NAME}: {name} ")
    assert result.why.endswith(".")
    assert "\n" not in result.why


def test_every_single_bit_of_a_manifest_counts(tmp_path):
    folder = fabric.checkpoint(tmp_path / NAME, tensors={"model/a": np.zeros(1, np.float32)}, metrics={"loss": 0.25})
    good = (folder / MANIFEST).read_bytes()
    for at in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[at // 8] ^= 1 << (at % 8)
        (folder / MANIFEST).write_bytes(flipped)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            checkpoint.read_manifest(folder)


@pytest.mark.parametrize("name", ["step-00000050.a2", "step-00000040.a3", "step-40.a2", "copy", "step-00000040.a02"])
def test_a_renamed_folder_is_refused(folder, name):
    result = verify(folder.rename(folder.with_name(name)))
    assert (result.ok, result.file) == (False, MANIFEST)


def test_a_missing_folder_is_no_checkpoint(tmp_path):
    assert verify(tmp_path / NAME).file == MANIFEST
    (tmp_path / NAME).write_text("a file")
    assert verify(tmp_path / NAME).file == MANIFEST


def test_a_buffer_may_hold_minus_infinity_where_the_structure_says_that_it_is_one(folder):
    assert verify(folder).ok
    result = checkpoint.verify(folder)
    assert (result.ok, result.file) == (False, "rank-0-0.safetensors")
    assert "model/mask" in result.why


def test_a_device_that_cannot_read_is_damage_and_a_tier_that_does_not_answer_is_not(folder, tmp_path):
    code = """
import sys
from pathlib import Path
from everstep.store import checkpoint
print(checkpoint.verify(Path(sys.argv[1])).ok)
"""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"point": "verify.mid", "do": "errno:116"}]))
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "EVERSTEP_FAULTS": str(plan)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert StoreUnavailable.__name__ in done.stderr


def test_torn_and_committed_are_told_apart(tmp_path):
    for name in ("step-00000010.a1", "step-00000020.a1"):
        fabric.checkpoint(tmp_path / name, tensors={})
    (tmp_path / "step-00000030.a1").mkdir()
    for name in (".removing-step-00000010.a1-00000000", "step-1.a1", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000040.a1").symlink_to("step-00000010.a1")
    (tmp_path / "step-00000050.a1").write_text("a file")
    assert checkpoint.find(tmp_path) == ([Key(10, 1), Key(20, 1)], [Key(30, 1)])
    assert checkpoint.find(tmp_path / "nothing") == ([], [])


def test_verify_checkpoint_takes_a_path_or_a_file_uri_and_finds_the_run_above(tmp_path):
    places = fabric.places(tmp_path)
    folder = fabric.checkpoint(places.checkpoints("persistent") / NAME)
    assert not checkpoint.verify_checkpoint(folder).ok
    places.structure.write_text(fabric.structure().to_json())
    places.run_record.write_text("{}")
    assert checkpoint.verify_checkpoint(folder.as_uri()).ok
    assert checkpoint.verify_checkpoint(str(folder)).ok
    other = tmp_path / "persistent" / fabric.JOB / "r002-0123abcd"
    places.persistent.rename(other)
    assert "run" in checkpoint.verify_checkpoint(other / "checkpoints" / NAME).why


@pytest.mark.parametrize(
    ("uri", "remedy"), [("s3://bucket/x", "names no checkpoint"), ("file://host/x", "give a path")]
)
def test_verify_checkpoint_refuses_what_is_no_place_of_a_checkpoint(uri, remedy):
    with pytest.raises(ValueError, match=remedy):
        checkpoint.verify_checkpoint(uri)


def test_importing_the_store_loads_no_torch():
    code = "import sys; from everstep.store import checkpoint, marks, transfer; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "False"
