"""Which tensors an encoded state refers to, and which of them are parts of a whole that several ranks hold.

The words are those of `trainer.tree`: `{"$tensor": name}`, and for a part of a sharded tensor beside it
`"shard": {"shape": [of the whole], "offset": [of this part], "dim": the dimension that is cut, or null}`. Shapes are as
stored: a complex tensor has a last dimension of 2. The part's own shape is that of the stored tensor. A sharded tensor
has one name on all ranks, though each may have stored its part under another (tied) name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shard:
    """Where a part lies in its whole. `dim` None: the whole is on every rank, and rank 0 keeps it."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    dim: int | None

    @classmethod
    def parse(cls, value: Any) -> "Shard":
        """Raises ValueError for what is no such word."""
        if not isinstance(value, Mapping) or value.keys() != {"shape", "offset", "dim"}:
            raise ValueError(f"{value!r:.80} says no place in a whole")
        shape, offset, dim = value["shape"], value["offset"], value["dim"]
        fits = _are_lengths(shape) and _are_lengths(offset) and len(shape) == len(offset)
        if not fits or not (dim is None or (type(dim) is int and 0 <= dim < len(shape))):
            raise ValueError(f"{value!r:.80} says no place in a whole")
        return cls(tuple(shape), tuple(offset), dim)

    def word(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "offset": list(self.offset), "dim": self.dim}


def of(tree: Any) -> dict[str, Shard | None]:
    """The names of all tensors and arrays in an encoded tree. Raises ValueError for a shard that says no place."""
    named: dict[str, Shard | None] = {}
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            for word in ("$tensor", "$array"):
                if isinstance(one.get(word), str):
                    named[one[word]] = Shard.parse(one["shard"]) if "shard" in one else None
            waiting += one.values()
    return named


def _are_lengths(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
