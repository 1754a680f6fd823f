"""The writer, killed or refused at each of its file operations, one by one; and a rank, killed at any of its own."""

import os
import random
import sys
from pathlib import Path

import pytest
from rigs import syscalls

sys.path.insert(0, str(Path(__file__).parent))
from test_resume import exact
from test_saving import Rig, frozen

from everstep.core.checkpoint import Key
from everstep.store import checkpoint as committed
from everstep.trainer import saver, snapshot, structure

ALL = "EVERSTEP_ALL" in os.environ


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A rank that has saved once, so that its writer is up."""
    syscalls.needed()
    monkeypatch.setattr(saver, "PAUSE", 0.01)
    one = Rig(tmp_path)
    save(one, 1)
    yield one
    one.saver._scribe.close()
    one.saver._hands.shutdown()


def save(run, step):
    """Train a step and save; the state that is to be kept."""
    run.step()
    expected = frozen(snapshot.living(run.program, 0))
    run.save(step)
    run.saver.finish()
    return expected


def operations_of(run, log):
    """The file operations of the writer for a save."""
    with syscalls.watching(run.saver._scribe.pid, log) as seen:
        save(run, 2)
    found = seen.operations
    assert len(found) > 10, found
    return found


def some(operations, few):
    return operations if ALL else random.Random(len(operations)).sample(operations, few)


def is_whole(run, step, tier):
    folder = run.places.checkpoint(tier, Key(step, 1))
    return (folder / "manifest.json").exists() and committed.verify(folder, structure.of(run.program, 1)).ok


@pytest.mark.timeout(900)
def test_a_writer_killed_at_each_file_operation_costs_no_checkpoint(run, tmp_path):
    operations, last = operations_of(run, tmp_path / "strace.log"), save(run, 3)
    for step, at in enumerate(some(operations, 8), start=4):
        before = last
        with syscalls.watching(run.saver._scribe.pid, tmp_path / "strace.log", syscalls.KILL, at):
            last = save(run, step)
        assert run.saver._scribe.deaths == step - 3, at
        assert frozen(run.kept(step)) == last, at
        assert frozen(run.kept(step - 1)) == before, at
        left = [path.name for path in run.places.checkpoint("local", Key(step, 1)).iterdir() if path.name[0] == "."]
        assert left == [], at


@pytest.mark.timeout(900)
@pytest.mark.parametrize("error", syscalls.ERRORS)
def test_a_writer_refused_at_each_file_operation_loses_nothing_and_saves_again(run, tmp_path, error):
    """Refused is an error that is told, or a checkpoint elsewhere: never a broken one, and never the one before."""
    operations, last = operations_of(run, tmp_path / "strace.log"), save(run, 3)
    for step, at in zip(range(4, 1000, 2), some(operations, 4), strict=False):
        told = len(run.errors)
        with syscalls.watching(run.saver._scribe.pid, tmp_path / "strace.log", error, at) as seen:
            save(run, step)
        assert seen.injected, at
        whole = [tier for tier in ("local", "persistent") if is_whole(run, step, tier)]
        assert whole or len(run.errors) > told, at
        for tier in {"local", "persistent"} - {*whole}:
            assert not (run.places.checkpoint(tier, Key(step, 1)) / "manifest.json").exists(), at
        assert frozen(run.kept(step - 1)) == last, at
        last = save(run, step + 1)
        assert frozen(run.kept(step + 1)) == last, at
    assert run.saver._scribe.deaths == 0


@pytest.mark.timeout(900)
def test_a_rank_killed_at_any_file_operation_ends_with_the_same_bits(untouched, make_run, same, tmp_path):
    syscalls.needed()
    operations = [(call, nth) for call in ("openat", "write", "rename", "fsync") for nth in range(1, 40, 3)]
    for at in some(operations, 3):
        run = make_run(f"killed-{at[0]}-{at[1]}", pause=0.01)
        gang = run.start(1, None, 1)
        with syscalls.watching(gang.pids[0], tmp_path / "strace.log", syscalls.KILL, at):
            run.until(gang.dead)
            gang.wait(120)
        last = run.committed()[-1] if run.committed() else None
        for folder in run.committed():
            run.weights(folder)
        began = [0, int(last[5:13]) if last else 0]
        assert run.start(2, last, 1).wait(60) == [0]
        assert same(run.weights(run.committed()[-1]), untouched()[2]), at
        if len(run.parts(0)) == len(began):  # the first one had come to a step
            exact(same, untouched(), run, began)
