import errno
import json
import os
import subprocess
import sys

import fabric
import pytest

from everstep.core.checkpoint import MANIFEST
from everstep.core.errors import Damaged
from everstep.store import checkpoint, transfer

NAME = "step-00000040.a2"

CODE = """
import sys
from pathlib import Path
from everstep.store import transfer
print(transfer.copy(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.fixture
def source(tmp_path):
    return fabric.checkpoint(tmp_path / "near" / NAME)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "far" / NAME


def good(target):
    return checkpoint.verify(target, fabric.structure(), run=fabric.RUN).ok


def run(source, target, plan_file, plan):
    plan_file.write_text(json.dumps(plan))
    environment = {**os.environ, "EVERSTEP_FAULTS": str(plan_file)}
    command = [sys.executable, "-c", CODE, str(source), str(target)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_copy_verifies_and_a_second_one_moves_nothing(source, target):
    assert transfer.copy(source, target) == checkpoint.read_manifest(source).bytes
    assert good(target)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    assert transfer.copy(source, target) == 0
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before


@pytest.mark.parametrize(
    ("point", "hit"),
    [("copy.begin", 1), ("copy.mid_file", 1), ("copy.mid_file", 3), ("copy.verify", 1), ("copy.before_manifest", 1)],
)
def test_a_copier_killed_anywhere_leaves_no_checkpoint_and_the_next_one_completes_it(
    source, target, tmp_path, point, hit
):
    killed = run(source, target, tmp_path / "plan.json", [{"point": point, "hit": hit}])
    assert killed.returncode == -9
    assert not (target / MANIFEST).exists()
    done = run(source, target, tmp_path / "none.json", [])
    moved = int(done.stdout)
    assert good(target)
    whole = checkpoint.read_manifest(source).bytes
    assert (moved == whole) == ((point, hit) in {("copy.begin", 1), ("copy.mid_file", 1)})


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_a_failing_far_end_is_an_error_and_leaves_nothing_half_done(source, target, tmp_path, number):
    plan = [{"point": "copy.mid_file", "do": f"errno:{number}"}]
    assert f"[Errno {number}]" in run(source, target, tmp_path / "plan.json", plan).stderr
    assert list(target.iterdir()) == []
    transfer.copy(source, target)
    assert good(target)


def test_a_damaged_source_is_never_committed_at_the_far_end(source, target):
    path = source / "rank-0.json"
    path.write_bytes(path.read_bytes().replace(b'"epoch": 0', b'"epoch": 1'))
    with pytest.raises(Damaged, match=r"rank-0\.json"):
        transfer.copy(source, target)
    assert not (target / MANIFEST).exists()


def test_a_damaged_far_end_is_mended(source, target):
    transfer.copy(source, target)
    path = target / "rank-0-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert transfer.copy(source, target) == len(data)
    assert good(target)


def test_leftovers_of_a_killed_copier_go_and_foreign_files_stay(source, target):
    target.mkdir(parents=True)
    (target / ".rank-0.json.part").write_text("half")
    (target / ".manifest.json.0a1b2c3d.tmp").write_text("half")
    transfer.copy(source, target)
    assert good(target)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(Damaged, match=r"notes\.txt"):
        transfer.copy(source, target)
    assert (target / "notes.txt").exists()


def test_another_checkpoint_of_the_same_name_is_set_aside_whole(source, target):
    fabric.checkpoint(target, run="r002-ffffffff")
    transfer.copy(source, target)
    assert good(target)
    (aside,) = target.parent.glob(".aside-*")
    assert checkpoint.read_manifest(aside).run == "r002-ffffffff"


def test_a_link_at_the_far_end_is_not_followed(source, target, tmp_path):
    (tmp_path / "other").mkdir()
    target.parent.mkdir()
    target.symlink_to(tmp_path / "other")
    with pytest.raises(Damaged, match="symbolic link"):
        transfer.copy(source, target)
    assert list((tmp_path / "other").iterdir()) == []
