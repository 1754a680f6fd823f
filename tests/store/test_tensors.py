import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from everstep.core.errors import Damaged
from everstep.store import digest, tensors


def file_of(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "no header": (b"", None),
    "header longer than the file": (b"{}", 3),
    "header of 2**63 bytes": (b"{}", 2**63),
    "not json": (b"{", None),
    "not utf-8": (b'{"\xff": 1}', None),
    "deep": (b"[" * 100_000, None),
    "a list": (b"[]", None),
    "huge number": (b'{"a": ' + b"9" * 5000 + b"}", None),
    "twice": (b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', None),
    "not an object": ({"a": 3}, None),
    "unknown field": ({"a": entry() | {"more": 1}}, None),
    "unknown dtype": ({"a": entry(dtype="Q7")}, None),
    "dtype is a list": ({"a": entry() | {"dtype": []}}, None),
    "negative shape": ({"a": entry(shape=(-1, -1))}, None),
    "shape of booleans": ({"a": entry() | {"shape": [True]}}, None),
    "shape of floats": ({"a": entry() | {"shape": [1.0]}}, None),
    "many dimensions": ({"a": entry(shape=[2**62] * 10_000)}, None),
    "shape and bytes differ": ({"a": entry(shape=(2,))}, None),
    "offsets reversed": ({"a": entry(offsets=(4, 0))}, None),
    "offsets beyond the file": ({"a": entry(shape=(2,), offsets=(0, 8))}, None),
    "three offsets": ({"a": entry(offsets=(0, 4, 4))}, None),
    "overlap": ({"a": entry(), "b": entry()}, None),
    "gap": ({"a": entry(shape=(0,), offsets=(0, 0)), "b": entry(offsets=(1, 5))}, None),
    "bytes that nobody owns": ({}, None),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers_are_refused_by_name(tmp_path, kind):
    header, length = HOSTILE[kind]
    path = file_of(tmp_path / "rank-0.safetensors", header, b"\0" * 4, length)
    with pytest.raises(Damaged, match=r"rank-0\.safetensors (has|gives|says|describes)"):
        tensors.read_header(path)


def test_files_shorter_than_a_header_are_refused(tmp_path):
    for size in range(8):
        (tmp_path / "x").write_bytes(b"\0" * size)
        with pytest.raises(Damaged, match="too few"):
            tensors.read_header(tmp_path / "x")


def test_headers_of_the_library_are_read(tmp_path):
    state = {"a": torch.zeros(3, 2), "b": torch.ones((), dtype=torch.int64), "c": torch.zeros(0, 5)}
    save_file(state, tmp_path / "x", metadata={"format": "pt"})
    found = tensors.read_header(tmp_path / "x")
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        "a": ("F32", (3, 2)),
        "b": ("I64", ()),
        "c": ("F32", (0, 5)),
    }
    assert (tmp_path / "x").read_bytes()[found["b"].begin : found["b"].end] == struct.pack("<q", 1)


FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_pattern_is_judged_as_torch_judges_it(tmp_path, dtype):
    """All 8- and 16-bit patterns, and for wider types all exponents with some mantissas: one file for each answer."""
    size = dtype.itemsize
    if size <= 2:
        bits = torch.arange(2 ** (8 * size)).to({1: torch.uint8, 2: torch.uint16}[size])
    else:
        top = torch.arange(2**16).to(torch.int64)
        low = torch.tensor([0, 1, 2 ** (8 * size - 17)])
        bits = (top[:, None] * 2 ** (8 * size - 16) + low).flatten().to({4: torch.uint32, 8: torch.uint64}[size])
    values = bits.view(dtype)
    finite = torch.isfinite(values.to(torch.float64) if size == 1 else values)
    save_file({"good": values[finite].clone(), "also": values[finite][:1].clone()}, tmp_path / "good")
    assert tensors.non_finite(tmp_path / "good", ["good", "also"]) == []
    for index in torch.nonzero(~finite).flatten()[:: 1 if size == 1 else 4099].tolist():
        state = {"a": values[finite][:3].clone(), "b": values[index : index + 1].clone()}
        save_file(state, tmp_path / "bad")
        assert tensors.non_finite(tmp_path / "bad", ["a", "b"]) == ["b"]


@given(cuts=st.lists(st.integers(1, 40), max_size=30), bad=st.integers(0, 29), odd=st.integers(0, 9))
def test_values_across_chunks_are_found(cuts, bad, odd):
    """However the bytes are cut, and where a tensor begins at an odd offset."""
    values = np.arange(10, dtype=np.float64)
    doubles = [values.copy() for _ in range(3)]
    doubles[bad // 10][bad % 10] = np.nan
    data = bytes(odd) + b"".join(one.tobytes() for one in doubles)
    table = [tensors.Tensor(str(i), "F64", (10,), odd + 80 * i, odd + 80 * (i + 1)) for i in range(3)]
    scan = tensors.Scan(table)
    at = 0
    for cut in [*cuts, len(data)]:
        scan.see(memoryview(data)[at : at + cut])
        at += cut
    assert scan.found == {str(bad // 10)}


def test_a_big_tensor_is_judged_in_bounded_memory(tmp_path):
    values = torch.zeros(3 * digest.CHUNK // 4 + 5)
    values[-1] = float("inf")
    save_file({"a": values}, tmp_path / "x")
    assert tensors.non_finite(tmp_path / "x", ["a"]) == ["a"]


def digest_twice(tmp_path, state, aliases=None):
    """Of the state dict, and of a checkpoint's folder that holds it."""
    aliases = aliases or {}
    tmp_path.mkdir(exist_ok=True)
    stored = {
        f"model/{name}": (torch.view_as_real(one) if one.is_complex() else one).contiguous()
        for name, one in state.items()
        if name not in aliases
    }
    save_file(stored | {"optimizer/x": torch.ones(3)}, tmp_path / "rank-0.safetensors")
    ties = {f"model/{new}": f"model/{old}" for new, old in aliases.items()}
    tree = {name: {"$tensor": name} for name in [*stored, *ties, "optimizer/x"]}
    (tmp_path / "rank-0.json").write_text(json.dumps({"aliases": ties, "tree": tree, "world_size": 1}))
    return tensors.weights_digest(state), tensors.weights_digest_of(tmp_path)


def test_weights_have_one_digest_in_memory_and_on_disk(tmp_path):
    base = torch.randn(6, 4)
    kinds = {str(dtype): torch.zeros(4, dtype=torch.uint8).view(dtype) for dtype in FLOATS if dtype.itemsize <= 4}
    state = kinds | {
        "b": base,
        "a": base.T,
        "scalar": torch.tensor(3),
        "none": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "u16": torch.tensor([1, 2], dtype=torch.uint16),
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "half": torch.randn(5, requires_grad=True),
    }
    first, second = digest_twice(tmp_path, state)
    assert first == second


def test_tied_weights_have_one_digest(tmp_path):
    weight = torch.randn(4, 4)
    tied = {"embed": weight, "head": weight}
    assert len(set(digest_twice(tmp_path, tied, {"head": "embed"}))) == 1
    assert tensors.weights_digest(tied) == tensors.weights_digest({"head": weight.clone(), "embed": weight.clone()})


def test_two_different_states_have_different_digests(tmp_path):
    state = {"a": torch.zeros(4), "b": torch.ones(2)}
    others = [
        {"a": torch.zeros(4), "c": torch.ones(2)},
        {"a": torch.zeros(2, 2), "b": torch.ones(2)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(4), "b": torch.ones(2) + 1e-7},
        {"a": torch.zeros(4)},
        {"a": -torch.zeros(4), "b": torch.ones(2)},
    ]
    found = [tensors.weights_digest(one) for one in (state, *others)]
    assert len(set(found)) == len(found)


def test_a_state_dict_of_the_library_has_the_same_digest_after_a_round_trip(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    save_file(model.state_dict(), tmp_path / "x")
    assert tensors.weights_digest(model.state_dict()) == tensors.weights_digest(load_file(tmp_path / "x"))
    assert tensors.weights_digest(model.state_dict() | {"_extra_state": {"a": 1}}) == tensors.weights_digest(
        model.state_dict()
    )


def test_a_dtype_without_a_word_is_refused():
    with pytest.raises(ValueError, match="convert the tensor first"):
        tensors.weights_digest({"a": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)})
