"""Order of samples, loaders, random state, trees and shards, each by itself."""

import itertools
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset, default_collate

from everstep.core.dataset import FileEntry
from everstep.store import tensors as stored
from everstep.trainer import loader, order, rng, shards, snapshot, tree, writer
from everstep.trainer.buffers import Buffer
from everstep.trainer.copying import Copying
from everstep.trainer.order import Order
from everstep.trainer.program import ProgramError


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return index, torch.randn(()).item(), np.random.randn(), random.gauss(0, 1)


def batches(dataset, how, samples, count, workers=0, collate=None):
    program = SimpleNamespace(dataset=dataset, workers=workers, collate=collate)
    steps = loader.steps(program, how, samples, count, pin=False)
    return [(step.epoch, step.total, step.chunks) for step in steps]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 50),
    ranks=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    drop_last=st.booleans(),
    skip=st.integers(0, 7),
)
def test_each_sample_once_an_epoch_for_any_number_of_ranks(size, batch, ranks, accumulation, drop_last, skip):
    if drop_last and batch > size:
        batch = size
    one = Order(size, batch, 3, drop_last)
    steps = -(-one.per_epoch // batch) if not drop_last else size // batch
    alone = list(itertools.islice(order.shares(one, 0), 2 * steps))
    for epoch in range(2):
        seen = [index for share in alone if share.epoch == epoch for chunk in share.chunks for index in chunk]
        assert len(set(seen)) == len(seen) == one.per_epoch
    samples = sum(share.total for share in alone[:skip])
    several = [Order(size, batch, 3, drop_last, rank, ranks, accumulation) for rank in range(ranks)]
    for together in zip(*(itertools.islice(order.shares(how, samples), 5) for how in several), strict=True):
        expected = next(order.shares(one, samples))
        assert [index for share in together for chunk in share.chunks for index in chunk] == expected.chunks[0]
        assert {(share.epoch, share.total) for share in together} == {(expected.epoch, expected.total)}
        sizes = [len(chunk) for share in together for chunk in share.chunks]
        assert max(sizes) - min(sizes) <= 1
        samples += expected.total


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [order.permutation(50, seed, epoch).tolist() for seed in (0, 1, 2**62) for epoch in (0, 1, 2)]
    assert len({tuple(one) for one in orders}) == 9


def test_noise_is_keyed_on_the_sample_and_the_programs_generators_are_untouched():
    how = Order(23, 5, 1)
    states = []
    found = []
    for workers, start in ((0, 0), (2, 0), (0, 5)):
        rng.seed_all(11)
        np.random.randn()  # leaves a second normal number behind, which must survive
        found.append(batches(Noisy(), how, start, 12 - start // 5, workers))
        states.append((torch.rand(3).tolist(), np.random.randn(3).tolist(), random.random()))
    rng.seed_all(11)
    np.random.randn()
    untouched = (torch.rand(3).tolist(), np.random.randn(3).tolist(), random.random())
    assert states == [untouched] * 3
    assert repr(found[0]) == repr(found[1])
    assert repr(found[0][1:]) == repr(found[2])


def test_generators_that_the_program_uses_between_two_steps():
    """The quick way to lend NumPy's generator must notice that the program has drawn from it."""
    drawn = []
    for lend in (False, True):
        rng.seed_all(5)
        aside = rng.Aside()
        part = []
        for count in (1, 1, 0, 2, 3, 0, 1):
            part += [np.random.randn() for _ in range(count)]
            if lend:
                with aside:
                    rng.seed_sample(3)
                    np.random.randn()
        drawn.append(part)
    assert drawn[0] == drawn[1]


def test_rows_of_tensors_are_taken_as_one_by_one():
    data = TensorDataset(torch.randn(23, 3), torch.arange(23))
    how = Order(23, 5, 1, accumulation=2)
    quick = batches(data, how, 0, 6)
    slow = batches(data, how, 0, 6, collate=default_collate)
    assert repr(quick) == repr(slow)


def test_a_chunk_without_samples_is_no_batch():
    how = Order(5, 4, 1, rank=0, ranks=4)
    (first, last) = batches(Noisy(), how, 0, 2)
    assert first[2][0][1] == 1
    assert last[2] == ((None, 0.0),)
    with_workers = batches(Noisy(), how, 0, 2, workers=1)
    assert with_workers[1][2] == ((None, 0.0),)


def test_own_loader_without_batches():
    program = SimpleNamespace(loader=[], grad_accumulation=1)
    with pytest.raises(ProgramError, match="gave no batch"):
        next(loader.OwnLoader(program, 4, 1).steps(1))


def test_random_state_is_put_back():
    rng.seed_all(3)
    np.random.randn()
    random.gauss(0, 1)
    encoded = tree.encode(rng.capture())
    before = (torch.rand(2).tolist(), np.random.randn(2).tolist(), random.gauss(0, 1))
    rng.restore(tree.decode(json.loads(json.dumps(encoded.tree)), encoded.tensors))
    assert (torch.rand(2).tolist(), np.random.randn(2).tolist(), random.gauss(0, 1)) == before


STATE = {
    "plain": [None, True, 3, -0.0, 1e-310, "text", 10**30],
    "odd floats": [float("inf"), -float("inf"), float("nan")],
    "tuple": (1, (2, "three"), torch.Size([4, 5])),
    "keys": {0: "int", "0": "str", (1, 2): "tuple", None: 1, 2.5: 2},
    "dollar": {"$tensor": "not a tag"},
    "kinds": [OrderedDict(b=1, a=2), Counter({3: 2}), deque([1, 2], 5), {1, 2}, frozenset("ab"), b"\0bytes", 1 + 2j],
    "torch": [torch.float16, torch.device("cpu"), torch.tensor(3), torch.zeros(0, 3), torch.tensor([True])],
    "more": [torch.randn(2, 3, dtype=torch.bfloat16), torch.randn(2, dtype=torch.complex128), torch.randn(4, 3).t()],
    "numpy": [np.arange(4, dtype=np.uint32).reshape(2, 2), np.float32(0.1), np.int64(7), np.array(5.5), np.bool_(True)],
    "a/b": {"c": torch.ones(1)},
    "a": {"b/c": torch.zeros(1)},
}


def test_trees_are_exact():
    encoded = tree.encode(STATE)
    text = json.dumps(encoded.tree, allow_nan=False)
    for value in encoded.tensors.values():
        stored.word(value.dtype)
    back = tree.decode(json.loads(text), encoded.tensors)
    assert_equal(STATE, back)


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple | deque):
        for mine, its in zip(one, other, strict=True):
            assert_equal(mine, its)
    else:
        assert repr(one) == repr(other)


def test_what_a_tree_cannot_hold_is_named():
    for value, said in (
        ({"x": [object()]}, "x/0 holds a builtins.object"),
        ({"x": torch.zeros(2).to_sparse()}, "x is a sparse"),
        ({"x": np.array(["a"])}, "x is an array of <U1"),
        ({"x": lambda: 0}, "x holds a builtins.function"),
    ):
        with pytest.raises(ProgramError, match=said):
            tree.encode(value)
    assert tree.encode(defaultdict(list, a=[1])).tree == {"a": [1]}
    with pytest.raises(ValueError, match="unknown kind"):
        tree.decode({"$eval": "1"}, {})


def test_a_state_is_encoded_with_its_ties_and_its_scalars_are_copied():
    weight = torch.randn(3, 3)
    state = {"a": weight, "b": weight.view(3, 3), "part": weight[:2], "list": [[1]], "array": np.ones(2)}
    encoded = tree.encode(state)
    state["list"][0].append(2)
    state["array"][0] = 5
    assert encoded.aliases == {"b": "a"}
    assert encoded.tensors["a"].data_ptr() == weight.data_ptr()
    assert "part" in encoded.tensors
    assert encoded.tree["list"] == [[1]]
    assert encoded.tensors["array"].tolist() == [1.0, 1.0]


def test_shards(tmp_path):
    tensors = {f"t{index}": torch.randn(5, index) for index in range(6)} | {"half": torch.ones(3, dtype=torch.bfloat16)}
    plan = snapshot.plan(tree.encode(tensors))
    groups = shards.split(plan.placed, 200)
    assert all(sum(one.size for one in group) <= 200 for group in groups)
    assert list(itertools.chain.from_iterable(groups)) == list(plan.placed)
    assert shards.split(()) == [[]]
    buffer = Buffer(plan.size, pinned=False)
    Copying(buffer, [(one, tensors[one.name]) for one in plan.placed], lambda *_: True).join()
    seen = []
    places = [[one.name, one.dtype, one.shape, one.begin, one.size] for one in plan.placed]
    content = memoryview(bytes(buffer.bytes.numpy()))
    (entry,) = writer.write(tmp_path, [{"path": "x.safetensors", "tensors": places}], content, seen.append)
    entry = FileEntry.model_validate(entry)
    buffer.close()
    assert sum(seen) == entry.size
    assert set(stored.read_header(tmp_path / "x.safetensors")) == set(tensors)
    back = shards.load(tmp_path, entry, shards.empty)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_keys_are_well_mixed():
    keys = {rng.mix(*parts) for parts in itertools.product(range(8), range(8), range(8))}
    assert len(keys) == 512
    assert rng.mix(1, 2) != rng.mix(2, 1)
    bits = np.mean([[key >> bit & 1 for bit in range(64)] for key in keys])
    assert math.isclose(bits, 0.5, abs_tol=0.02)
