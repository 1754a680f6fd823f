"""What was saved can be loaded by any later Everstep: plain tensors and JSON, proven before and while saving."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from everstep.store import checkpoint as committed
from everstep.trainer import rng
from everstep.trainer.reading import Reading

HERE = Path(__file__).parent

FRESH = """
import pickle, random, sys
from pathlib import Path

def refuse(*_, **__):
    raise AssertionError("a checkpoint was unpickled")

pickle.load = pickle.loads = pickle.Unpickler = refuse
import numpy as np
import torch
torch.load = refuse
from everstep.store import checkpoint as committed
from everstep.trainer import rng
from everstep.trainer.reading import Reading

folder = Path(sys.argv[1])
rng.restore(Reading(folder, committed.opened(folder)).part(0).state["rng"])
print(np.random.rand().hex(), random.random().hex(), torch.rand(()).item().hex())
"""

ODD = """
import sys
sys.path.insert(0, {here!r})
from tiny import Tiny

class Odd:
    def __init__(self, program):
        self.program = program

    def state_dict(self):
        return {{"thing": object() if self.program.scheduler.last_epoch >= {since} else 1}}

    def load_state_dict(self, state):
        pass

def build(config, data):
    program = Tiny(config, data)
    program.state["odd"] = Odd(program)
    return program
"""


def words(tree):
    """The tags in an encoded tree."""
    if isinstance(tree, list):
        return set().union(*map(words, tree)) if tree else set()
    if isinstance(tree, dict):
        return {key for key in tree if key.startswith("$")} | words(list(tree.values()))
    return set()


def test_random_state_is_loaded_in_a_fresh_process_without_pickle(make_run):
    """BC-058: generators of NumPy, Python and torch are plain tensors and numbers."""
    run = make_run(noisy=True)
    assert run.run(steps=10, lease=(10,)).wait() == [0]
    folder = run.places.checkpoints("local") / "step-00000010.a1"
    document = json.loads((folder / "rank-0.json").read_text())
    assert words(document["tree"]["rng"]) == {"$tensor", "$array", "$tuple"}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder)],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    import random

    with rng.forked():
        rng.restore(Reading(folder, committed.opened(folder)).part(0).state["rng"])
        expected = [np.random.rand().hex(), random.random().hex(), torch.rand(()).item().hex()]
    assert done.stdout.split() == expected


@pytest.mark.parametrize(("since", "step"), [(0, 0), (7, 5)])
def test_what_could_not_be_loaded_is_refused_when_it_would_be_saved(make_run, tmp_path, since, step):
    """BC-058: before the first step, or at the save at which it first appears; what was committed before stays."""
    program = tmp_path / "odd.py"
    program.write_text(ODD.format(here=str(HERE), since=since))
    run = make_run()
    gang = run.run(program=f"{program}:build", steps=20, lease=(20,), save_every_steps=5)
    assert gang.wait() == [2], gang.logs()
    end = gang.end()
    assert end.cause.kind == "user"
    assert "state: state/odd/thing holds a builtins.object, which a checkpoint cannot hold" in end.cause.message
    assert run.committed() == ([f"step-{step:08d}.a1"] if step else [])
