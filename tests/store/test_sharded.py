"""Checkpoints whose tensors are shared out over the ranks: verified, digested and put together as wholes."""

import shutil
import tempfile
from pathlib import Path

import fabric
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.box import Box
from everstep.core.errors import Damaged
from everstep.store import checkpoint, tensors
from everstep.trainer.reading import Reading, load_checkpoint

NAME = "step-00000040.a2"
CUT = ("model/embed.weight", "model/norm.bias", "optimizer/state/0/exp_avg")
EMBED = "model/embed.weight"


def rows(ranks):
    """The same tensors cut along their rows, as FSDP2 does."""
    whole = fabric.weights(40)
    return {name: [Box.chunk(whole[name].shape, 0, rank, ranks) for rank in range(ranks)] for name in CUT}


def verify(folder):
    return checkpoint.verify(folder, fabric.structure(), run=fabric.RUN, job=fabric.JOB)


def whole_model():
    model = {name.removeprefix("model/"): one for name, one in fabric.weights(40).items() if name.startswith("model/")}
    state = {name: torch.from_numpy(one) for name, one in model.items()}
    return state | {"head.weight": state["embed.weight"]}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_sharded_checkpoint_is_that_of_its_whole_tensors(tmp_path, ranks):
    """Five ranks: some hold nothing of the eight elements of a bias. A tied weight is stored once and known twice."""
    folder = fabric.sharded(tmp_path / NAME, rows(ranks))
    outcome = verify(folder)
    assert (outcome.ok, outcome.why) == (True, "")
    state = whole_model()
    assert tensors.weights_digest_of(folder) == tensors.weights_digest(state)
    loaded = load_checkpoint(folder)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    replicas = fabric.checkpoint(tmp_path / "whole" / NAME, ranks=ranks)
    assert tensors.weights_digest_of(replicas) == tensors.weights_digest_of(folder)


@st.composite
def cuts(draw, shape):
    """A number of ranks and a box for each of them, cut anywhere."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for begin, length in ((0, at), (at, box.shape[dim] - at)):
            offset, part = list(box.offset), list(box.shape)
            offset[dim], part[dim] = offset[dim] + begin, length
            boxes.append(Box(tuple(offset), tuple(part)))
    return draw(st.permutations(boxes))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_is_put_together_from_any_parts(data):
    shape = (16, 8)
    parts = data.draw(cuts(shape))
    wanted = data.draw(st.lists(st.sampled_from(data.draw(cuts(shape))), min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as place:
        folder = fabric.sharded(Path(place) / NAME, {EMBED: parts})
        assert verify(folder).ok
        assert tensors.weights_digest_of(folder) == tensors.weights_digest(whole_model())
        reading = Reading(folder, checkpoint.read_manifest(folder))
        if data.draw(st.booleans()):
            reading.part(0)  # then what lies beside rank 0's own tensors is kept, and not read again
        memory = [reading.want(EMBED, box) for box in wanted]
        reading.fill()
        reading.check_rest()
    whole = fabric.weights(40)[EMBED]
    for box, found in zip(wanted, memory, strict=True):
        assert np.array_equal(found.numpy(), whole[box.within(Box.whole(shape))])


def _change(rank, do):
    return lambda at, held, tree: do(held, tree) if at == rank else None


def _move(by):
    def do(held, tree):
        tree[EMBED]["shard"]["offset"][0] += by

    return do


def _drop(held, tree):
    for name in ("optimizer/state/0/exp_avg",):
        del held[name], tree[name]


def _shorter(held, tree):
    held[EMBED] = held[EMBED][:-1].copy()


def _dtype(held, tree):
    held[EMBED] = held[EMBED].astype(np.float64)


def _word(**changed):
    def do(held, tree):
        tree[EMBED]["shard"] |= changed

    return do


def _plain(held, tree):
    del tree[EMBED]["shard"]


def _nan(held, tree):
    held["optimizer/state/0/exp_avg"][0, 0] = np.nan


def _more(held, tree):
    held["model/new"] = np.zeros(1, np.float32)
    tree["model/new"] = {"$tensor": "model/new", "shard": {"shape": [1], "offset": [0], "dim": 0}}


FAULTS = {
    "an optimizer shard is missing": (
        _change(1, _drop),
        "rank-1.json",
        "has no part of the sharded tensor 'optimizer/",
    ),
    "rank 0 has none": (_change(0, _drop), "rank-0.json", "has no part of the sharded tensor 'optimizer/"),
    "overlap": (_change(1, _move(-1)), "rank-1.safetensors", "another part holds, too"),
    "gap": (_change(1, _shorter), "rank-2.safetensors", "8 of its 128 elements are in no part"),
    "outside": (_change(2, _move(1)), "rank-2.safetensors", "lies outside of it"),
    "another dtype": (_change(1, _dtype), "rank-1.safetensors", "as F64 [16, 8], but rank 0 as F32 [16, 8]"),
    "another whole": (_change(1, _word(shape=[17, 8])), "rank-1.safetensors", "as F32 [17, 8], but rank 0 as"),
    "whole on one rank": (_change(1, _plain), "rank-1.json", "has no part of the sharded tensor 'model/embed.weight'"),
    "no place": (_change(1, _word(offset=[-1, 0])), "rank-1.json", "says no place in a whole"),
    "half a place": (_change(1, _word(offset=[6])), "rank-1.json", "says no place in a whole"),
    "more than a place": (_change(1, _word(more=1)), "rank-1.json", "says no place in a whole"),
    "nan in one part": (_change(2, _nan), "rank-2.safetensors", "NaN or infinity in optimizer/state/0/exp_avg"),
    "only on one rank": (_change(2, _more), "rank-0.json", "has no part of the sharded tensor 'model/new'"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_parts_that_make_no_whole_are_refused_and_named(tmp_path, kind):
    """BC-057: a shard that is missing is an error of the checkpoint, also where every digest is right."""
    change, name, said = FAULTS[kind]
    folder = fabric.sharded(tmp_path / NAME, rows(3), change=change)
    result = verify(folder)
    assert (result.ok, result.file) == (False, name), result.why
    assert said in result.why
    if "nan" in kind:
        return
    with pytest.raises(Damaged, match=name):
        whole_read(folder)


def whole_read(folder):
    """As a rank that continues from it does."""
    reading = Reading(folder, checkpoint.read_manifest(folder))
    reading.part(0)
    for name, whole in reading.sharded.items():
        reading.want(name, Box.whole(whole.shape))
    reading.fill()


@pytest.mark.parametrize("path", ["rank-0.safetensors", "rank-1.safetensors", "rank-2.json"])
def test_a_flip_or_a_cut_in_any_file_is_blamed_on_that_file(tmp_path, path):
    """The header counts, too: it is believed before the file has been read."""
    folder = fabric.sharded(tmp_path / NAME, rows(3))
    good = (folder / path).read_bytes()
    for at in range(0, len(good), 7):
        flipped = bytearray(good)
        flipped[at] ^= 1 << at % 8
        (folder / path).write_bytes(flipped)
        with pytest.raises(Damaged, match=path):
            whole_read(folder)
    (folder / path).write_bytes(good[:-1])
    with pytest.raises(Damaged, match=path):
        whole_read(folder)
    (folder / path).unlink()
    assert verify(folder).file == path
    with pytest.raises(Damaged, match=path):
        load_checkpoint(folder)


def test_another_ranks_file_is_no_file_of_ones_own(tmp_path):
    folder = fabric.sharded(tmp_path / NAME, rows(2))
    shutil.copy(folder / "rank-0.safetensors", folder / "rank-1.safetensors")
    with pytest.raises(Damaged, match=r"rank-1\.safetensors"):
        load_checkpoint(folder)
