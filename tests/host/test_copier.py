import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric

from everstep.core.checkpoint import Key, State, Verification
from everstep.core.job import CheckpointPolicy
from everstep.host.backlog import pending, unmarked
from everstep.host.copier import Copier, CopierSpec
from everstep.store import checkpoint, jsonl, marks
from everstep.store.layout import RunPlaces

PATIENCE = 20


@pytest.fixture
def places(tmp_path):
    found = fabric.places(tmp_path, with_object=True)
    found.structure.write_text(fabric.structure().to_json())
    fabric.claim(found, 1)
    return found


def spec(places, keep=3, parent=None):
    return CopierSpec(
        name=fabric.JOB,
        run=fabric.RUN,
        run_dir=str(places.persistent),
        local_dir=str(places.local),
        policy=CheckpointPolicy(keep=keep),
        parent_pid=os.getpid() if parent is None else parent,
    )


@contextlib.contextmanager
def copier(places, plan=None, tmp_path=None, **how):
    """A copier process; ended with the block."""
    environment = dict(os.environ)
    if plan is not None:
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        environment["EVERSTEP_FAULTS"] = str(tmp_path / "plan.json")
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep.host.copier"],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        process.stdin.write(spec(places, **how).model_dump_json().encode() + b"\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process):
    process.stdin.close()
    process.stdin = None
    return process.wait(PATIENCE)


def save(places, step, attempt=1, **how):
    key = Key(step, attempt)
    folder = places.checkpoint("local", key)
    beside = fabric.checkpoint(folder.parent.with_name("saving") / folder.name, **how)
    folder.parent.mkdir(exist_ok=True)
    beside.rename(folder)
    return key


def until(condition, seconds=PATIENCE):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.01)


def is_durable(places, key, tier="persistent"):
    return State.durable in marks.states(places).get((key.folder, tier), set())


def is_whole(places, key, tier="persistent"):
    return checkpoint.verify(places.checkpoint(tier, key), fabric.structure(), run=fabric.RUN, job=fabric.JOB).ok


def rows(places, kind):
    return [row for row in jsonl.read(places.persistent / "copier.jsonl") if row["kind"] == kind]


def test_checkpoints_become_verified_and_durable_as_they_come(places):
    with copier(places) as process:
        for step in (10, 20):
            key = save(places, step)
            until(lambda key=key: is_durable(places, key))
            assert is_whole(places, key)
        assert finish(process) == 0
    assert marks.states(places) == {
        (f"step-000000{step}.a1", tier): {State.verified} | ({State.durable} if tier == "persistent" else set())
        for step in (10, 20)
        for tier in ("local", "persistent")
    }
    assert [row["checkpoint"] for row in rows(places, "checkpoint.durable")] == ["step-00000010.a1", "step-00000020.a1"]
    assert marks.copying(places) == set()


def test_the_end_of_input_means_finish_what_is_pending_and_leave(places):
    keys = [save(places, step) for step in (10, 20, 30)]
    with copier(places) as process:
        assert finish(process) == 0
    assert all(is_durable(places, key) for key in keys)
    assert pending(places, {1: 0}, CheckpointPolicy(keep=3)) == []


def test_no_line_means_leave_quietly():
    done = subprocess.run([sys.executable, "-m", "everstep.host.copier"], input=b"", capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.sampled
@pytest.mark.parametrize("point", ["copy.begin", "copy.mid_file", "copy.verify", "copy.before_manifest", "verify.mid"])
def test_a_copier_killed_anywhere_is_taken_up_by_the_next(places, tmp_path, point):
    key = save(places, 10)
    with copier(places, [{"point": point}], tmp_path) as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    assert not is_durable(places, key)
    assert pending(places, {1: 0}, CheckpointPolicy(keep=3)) == [key]
    assert marks.copying(places) == {key}
    with copier(places) as process:
        assert finish(process) == 0
    assert is_durable(places, key)
    assert is_whole(places, key)
    assert marks.copying(places) == set()


def test_killed_between_commit_and_mark_the_copy_is_read_again_and_marked(places):
    key = save(places, 10)
    with copier(places) as process:
        finish(process)
    shutil.rmtree(places.persistent / "marks")
    with copier(places) as process:
        finish(process)
    assert is_durable(places, key)
    assert rows(places, "checkpoint.durable")[-1]["bytes"] == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failing_far_end_is_reported_and_tried_again(places, tmp_path, number):
    key = save(places, 10)
    plan = [{"point": "copy.mid_file", "hit": hit, "do": f"errno:{number}"} for hit in (1, 2)]
    with copier(places, plan, tmp_path) as process:
        assert finish(process) == 0
    assert is_durable(places, key)
    told = rows(places, "copier.error")
    assert [row["errno"] for row in told] == [number, number]
    assert told[0]["text"].endswith("trying again.")


def test_a_run_directory_that_cannot_be_written_is_waited_for(places):
    """Marks, reports and copies all fail; nothing is lost when it is back."""
    key = save(places, 10)
    away = places.persistent.with_name("away")
    places.persistent.rename(away)
    places.persistent.write_text("not a folder")
    with copier(places) as process:
        assert b"copier.error" in process.stderr.readline()
        places.persistent.unlink()
        away.rename(places.persistent)
        until(lambda: is_durable(places, key))
        assert finish(process) == 0
    assert rows(places, "copier.error")


def test_sigterm_leaves_at_once_also_in_the_middle_of_a_file(places, tmp_path):
    key = save(places, 10)
    with copier(places, [{"point": "copy.mid_file", "do": "sleep:60"}], tmp_path) as process:
        until(lambda: list(places.checkpoints("persistent").glob("*/.*.part")))
        began = time.monotonic()
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - began < 2
    assert not is_durable(places, key)
    assert not list(places.checkpoints("persistent").glob("*/.*.part"))


def test_it_dies_with_its_parent(places, tmp_path):
    code = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "everstep.host.copier"], stdin=subprocess.PIPE)
child.stdin.write(sys.argv[1].replace('"parent_pid":0', f'"parent_pid":{os.getpid()}').encode() + b"\\n")
child.stdin.flush()
print(child.pid, flush=True)
sys.stdin.read()
"""
    line = spec(places, parent=0).model_dump_json()
    parent = subprocess.Popen([sys.executable, "-c", code, line], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    handle = os.pidfd_open(pid)
    until((places.local / "copier.lock").exists)
    parent.kill()
    parent.communicate()
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1])
    os.close(handle)


def test_a_copier_whose_parent_is_gone_before_it_starts_leaves(places):
    save(places, 10)
    with copier(places, parent=2**22) as process:
        assert process.wait(PATIENCE) == 0
    assert not list(places.checkpoints("persistent").glob("*"))


def test_two_copiers_of_one_run_come_one_after_the_other(places):
    handle = os.open(places.local / "copier.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    key = save(places, 10)
    with copier(places) as process:
        time.sleep(0.7)
        assert not is_durable(places, key)
        os.close(handle)
        assert finish(process) == 0
    assert is_durable(places, key)


def test_a_damaged_local_checkpoint_is_quarantined_by_name_and_not_copied(places):
    bad, good = save(places, 10), save(places, 20)
    path = places.checkpoint("local", bad) / "rank-0-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with copier(places) as process:
        assert finish(process) == 0
    assert marks.states(places)[bad.folder, "local"] == {State.quarantined}
    assert "rank-0-1.safetensors" in marks.reason(places, bad.folder, "local", State.quarantined)
    assert [row["checkpoint"] for row in rows(places, "checkpoint.quarantined")] == [bad.folder]
    assert not places.checkpoint("persistent", bad).exists()
    assert is_durable(places, good)


def test_a_verified_one_that_is_damaged_afterwards_never_arrives(places):
    key = save(places, 10)
    folder = places.checkpoint("local", key)
    digest = checkpoint.manifest_digest(folder)
    marks.verified(places, key.folder, "local", Verification(ok=True, manifest_digest=digest))
    (folder / "rank-0.json").write_bytes((folder / "rank-0.json").read_bytes()[:-1] + b" ")
    with copier(places) as process:
        assert finish(process) == 0
    assert State.quarantined in marks.states(places)[key.folder, "local"]
    assert not (places.checkpoint("persistent", key) / "manifest.json").exists()


def test_abandoned_and_overtaken_ones_are_not_copied(places):
    for step in (10, 20, 30, 40, 50, 60):
        save(places, step)
    save(places, 40, attempt=2)
    fabric.claim(places, 2, resumed_from=30)
    assert pending(places, {1: 0, 2: 30}, CheckpointPolicy(keep=2)) == [Key(30, 1), Key(40, 2)]
    with copier(places, keep=2) as process:
        assert finish(process) == 0
    assert checkpoint.find(places.checkpoints("persistent"))[0] == [Key(30, 1), Key(40, 2)]


def test_it_works_when_only_the_persistent_checkpoints_are_left(places):
    good, bad = Key(10, 1), Key(20, 1)
    for key in (good, bad):
        fabric.checkpoint(places.checkpoint("persistent", key))
    (places.checkpoint("persistent", bad) / "rank-0.json").unlink()
    for path in places.persistent.iterdir():
        if path.name != "checkpoints":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    places.structure.write_text(fabric.structure().to_json())
    shutil.rmtree(places.local)
    assert unmarked(places, {}, CheckpointPolicy(keep=3)) == [good, bad]
    with copier(places) as process:
        assert finish(process) == 0
    assert marks.states(places) == {
        (good.folder, "persistent"): {State.verified, State.durable},
        (bad.folder, "persistent"): {State.quarantined},
    }


def test_one_that_retention_removes_meanwhile_is_no_damage(places):
    key = save(places, 10)
    one = Copier(spec(places))
    shutil.rmtree(places.checkpoint("local", key))
    one._bring(key)
    assert marks.states(places) == {}


def test_one_that_cannot_be_copied_holds_up_no_other(places):
    stuck, free = save(places, 10), save(places, 20)
    places.checkpoint("persistent", stuck).mkdir(parents=True)
    (places.checkpoint("persistent", stuck) / "foreign").write_text("x")
    with copier(places) as process:
        until(lambda: is_durable(places, free))
        assert process.poll() is None
    assert "foreign is not part of the checkpoint; move it away" in rows(places, "copier.error")[0]["text"]
    assert pending(places, {1: 0}, CheckpointPolicy(keep=3)) == [stuck]


def test_while_nothing_changes_nothing_but_a_glance_is_taken(places, monkeypatch):
    one = Copier(spec(places))
    assert one.turn() is False
    monkeypatch.setattr(Copier, "_work", lambda self: pytest.fail("it looked around"))
    assert [one.turn() for _ in range(50)] == [False] * 50


def test_a_spec_that_is_none_is_refused_in_a_sentence(places):
    done = subprocess.run(
        [sys.executable, "-m", "everstep.host.copier"], input=b"{}\n", capture_output=True, check=False
    )
    assert b"line 1 is not a readable CopierSpec" in done.stderr
    assert done.returncode == 2


steps = st.sets(st.integers(1, 6), max_size=6)


@settings(max_examples=60, deadline=None)
@given(local=steps, far=steps, bad=steps, keep=st.integers(1, 3), resumed=st.integers(0, 6))
def test_pending_is_a_part_of_what_is_here_and_not_there(tmp_path_factory, local, far, bad, keep, resumed):
    tmp = tmp_path_factory.mktemp("pending")
    places = RunPlaces.of(str(tmp / "l"), str(tmp / "p"), None, fabric.JOB, fabric.RUN)
    for tier, held in (("local", local), ("persistent", far)):
        for step in held:
            folder = places.checkpoint(tier, Key(step, 1))
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text(str(step))
            if tier == "persistent":
                marks.durable(places, folder.name, tier, checkpoint.manifest_digest(folder))
    for step in bad:
        marks.quarantine(places, Key(step, 1).folder, "local", "bad")
    found = [key.step for key in pending(places, {1: 0, 2: resumed}, CheckpointPolicy(keep=keep))]
    assert found == sorted(found)
    assert set(found) <= local - far - bad
    assert all(step <= resumed for step in found)
    assert len(found) <= keep
    newest = max((step for step in (local - bad) | far if step <= resumed), default=None)
    assert newest is None or newest in found or newest in far


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random_moments_what_is_committed_at_the_far_end_is_always_whole(places, seed):
    dice = random.Random(seed)
    scale = 40_000
    places.structure.write_text(fabric.structure(scale).to_json())
    key = save(places, 10, scale=scale)
    with copier(places) as process:
        until(lambda: places.checkpoint("persistent", key).exists())
        process.kill()
    for _ in range(4):
        with copier(places) as process:
            until((places.persistent / "copying.json").exists)
            time.sleep(0.35 + dice.random() * 0.25)
        committed, _ = checkpoint.find(places.checkpoints("persistent"))
        for held in committed:
            result = checkpoint.verify(places.checkpoint("persistent", held), fabric.structure(scale))
            assert result.ok, result.why
    with copier(places) as process:
        assert finish(process) == 0
    assert is_durable(places, key)
