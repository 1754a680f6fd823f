"""State as a JSON tree beside named tensors, and back. Exact, and no code is run to read it.

What JSON has no word for is a dict with one key that begins with `$`:

    {"$tensor": name, "stride": [...]?, "complex": true?}   a tensor, by its name in the safetensors files
    {"$tensor": name, "shard": {...}, "complex": true?}      this rank's part of a sharded tensor (`store.references`)
    {"$array": name}  {"$scalar": [dtype, value]}            NumPy arrays and scalars
    {"$float": "nan" | "inf" | "-inf"}  {"$complex": [re, im]}  {"$bytes": base64}
    {"$tuple" | "$size" | "$set" | "$frozenset": [...]}  {"$deque": [maxlen, [...]]}
    {"$dict" | "$ordered" | "$counter": [[key, value], ...]}    dicts with other than plain string keys
    {"$dtype" | "$device": word}
"""

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.store import tensors as stored
from everstep.store.references import Shard
from everstep.trainer import sharding
from everstep.trainer.program import ProgramError
from everstep.trainer.sharding import Piece


@dataclass
class Encoded:
    """A tree, its tensors by name (as they live: on any device, with any strides), and names for another one's bytes.

    `parts` are the tensors that are this rank's parts of sharded ones.
    """

    tree: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)


def encode(value: Any) -> Encoded:
    """The tree of `value`. Tensors are named by their path in it, joined with slashes. Raises ProgramError.

    Scalars, containers and arrays are copied into the tree; tensors are not: whoever wants to keep their values copies
    them. Tensors over the same bytes are tied.
    """
    encoder = _Encoder()
    encoder.found.tree = encoder.node(value, "")
    return encoder.found


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value again, with a `Piece` for each part of a sharded tensor.

    `tensors` has aliases resolved. Raises ValueError or KeyError for a tree that is none.
    """
    match tree:
        case list():
            return [decode(one, tensors) for one in tree]
        case dict():
            tag = next((key for key in tree if key.startswith("$")), None)
            if tag is None:
                return {key: decode(one, tensors) for key, one in tree.items()}
            return _tagged(tag, tree, tensors)
        case _:
            return tree


class _Encoder:
    def __init__(self) -> None:
        self.found = Encoded()
        self._names: dict[Any, str] = {}

    def node(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return self.tensor(value, path)
        if kind is np.ndarray:
            return self.array(value, path)
        return self.container(value, path)

    def container(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is list:
            return self.items(value, path)
        if kind in _SEQUENCES:
            ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
            return {_SEQUENCES[kind]: self.items(ordered, path)}
        if kind in _PAIRS:
            return {_PAIRS[kind]: self.pairs(value, path)}
        if isinstance(value, dict):  # defaultdict and the like: their content
            return self.mapping(value, path)
        if kind is deque:
            return {"$deque": [value.maxlen, self.items(value, path)]}
        return self.leaf(value, path)

    def leaf(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _WORDS:
            tag, word = _WORDS[kind]
            return {tag: word(value)}
        if kind is complex:
            return {"$complex": [self.node(value.real, path), self.node(value.imag, path)]}
        if isinstance(value, np.generic):
            return {"$scalar": [value.dtype.str, self.node(value.item(), path)]}
        raise ProgramError(
            f"state: {path} holds a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; "
            "give numbers, strings, lists, dicts, tensors or arrays in state_dict()."
        )

    def items(self, values: Any, path: str) -> list[Any]:
        return [self.node(one, _join(path, str(index))) for index, one in enumerate(values)]

    def pairs(self, value: dict[Any, Any], path: str) -> list[Any]:
        return [[self.node(key, path), self.node(one, _join(path, _word(key)))] for key, one in value.items()]

    def mapping(self, value: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.node(one, _join(path, key)) for key, one in value.items()}
        return {"$dict": self.pairs(value, path)}

    def tensor(self, value: Tensor, path: str) -> Any:
        if value.layout is not torch.strided or value.is_quantized:
            raise ProgramError(f"state: {path} is a sparse or quantized tensor, which a checkpoint cannot hold.")
        node: dict[str, Any] = {"$tensor": self._free_name(path)}
        if sharding.is_sharded(value):
            value, shard = sharding.local(value, path)
            node["shard"] = shard.word()
            self.found.parts.add(node["$tensor"])
        value = value.detach()
        if "shard" not in node and not value.is_contiguous() and _is_dense(value):
            node["stride"] = list(value.stride())
        if value.is_complex():
            node["complex"] = True
        self._store(node["$tensor"], value, _place(value))
        return node

    def array(self, value: "np.ndarray[Any, Any]", path: str) -> Any:
        name = self._free_name(path)
        try:
            tensor = torch.from_numpy(np.ascontiguousarray(value).copy())
        except TypeError:
            why = f"state: {path} is an array of {value.dtype}, which a checkpoint cannot hold; convert it to numbers."
            raise ProgramError(why) from None
        self._store(name, tensor.view(value.shape), None)
        return {"$array": name}

    def _store(self, name: str, value: Tensor, place: Any) -> None:
        """Tensors over the same bytes are stored once."""
        first = self._names.setdefault(place, name) if place is not None and value.numel() else name
        if first != name:
            self.found.aliases[name] = first
            return
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.resolve_neg()
        stored.word(value.dtype)
        self.found.tensors[name] = value

    def _free_name(self, path: str) -> str:
        name, count = path, 1
        while name in self.found.tensors or name in self.found.aliases:
            count += 1
            name = f"{path}~{count}"
        return name


_SEQUENCES: dict[type, str] = {tuple: "$tuple", torch.Size: "$size", set: "$set", frozenset: "$frozenset"}
_PAIRS: dict[type, str] = {OrderedDict: "$ordered", Counter: "$counter"}
_WORDS: dict[type, tuple[str, Callable[[Any], str]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
}

_Tensors = Mapping[str, Tensor]


def _pairs(content: Any, tensors: _Tensors) -> list[tuple[Any, Any]]:
    return [(decode(key, tensors), decode(one, tensors)) for key, one in content]


_DECODERS: dict[str, Callable[[Any, _Tensors], Any]] = {
    "$array": lambda content, tensors: tensors[content].numpy().copy(),
    "$scalar": lambda content, tensors: np.dtype(content[0]).type(decode(content[1], tensors)),
    "$float": lambda content, _: float(content),
    "$complex": lambda content, tensors: complex(*(decode(one, tensors) for one in content)),
    "$bytes": lambda content, _: base64.b64decode(content),
    "$deque": lambda content, tensors: deque(decode(content[1], tensors), content[0]),
    "$dtype": lambda content, _: _dtype(content),
    "$device": lambda content, _: torch.device(content),
    "$tuple": lambda content, tensors: tuple(decode(content, tensors)),
    "$size": lambda content, _: torch.Size(content),
    "$set": lambda content, tensors: set(decode(content, tensors)),
    "$frozenset": lambda content, tensors: frozenset(decode(content, tensors)),
    "$dict": lambda content, tensors: dict(_pairs(content, tensors)),
    "$ordered": lambda content, tensors: OrderedDict(_pairs(content, tensors)),
    "$counter": lambda content, tensors: Counter(dict(_pairs(content, tensors))),
}


def _tagged(tag: str, tree: dict[str, Any], tensors: _Tensors) -> Any:
    if tag == "$tensor":
        if "shard" in tree:
            return Piece(tree[tag], Shard.parse(tree["shard"]), bool(tree.get("complex")))
        return _tensor(tree, tensors[tree[tag]])
    if tag not in _DECODERS:
        raise ValueError(f"the state has an unknown kind of value, {tag!r}")
    return _DECODERS[tag](tree[tag], tensors)


def _tensor(node: dict[str, Any], found: Tensor) -> Tensor:
    if node.get("complex"):
        found = torch.view_as_complex(found)
    if "stride" not in node:
        return found
    return torch.empty_strided(found.shape, node["stride"], dtype=found.dtype).copy_(found)


def _dtype(word: str) -> torch.dtype:
    found = getattr(torch, word, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"the state has an unknown dtype, {word!r}")
    return found


def _is_dense(value: Tensor) -> bool:
    """Whether the strides are a permutation of contiguous ones, so that they can be given again."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _place(value: Tensor) -> Any:
    """What two tensors have in common that are the same bytes seen in the same way."""
    storage = value.untyped_storage()
    seen = value.storage_offset(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()
    return storage.data_ptr(), value.device, *seen


def _join(path: str, key: str) -> str:
    return f"{path}/{key}" if path else key


def _word(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)
