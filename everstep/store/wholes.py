"""Sharded tensors of a checkpoint: the parts that the ranks hold, and whether they make a whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.core.box import Box, flaw
from everstep.core.errors import Damaged
from everstep.store.references import Shard

if TYPE_CHECKING:
    from everstep.store.tensors import Tensor


@dataclass(frozen=True)
class Held:
    """A tensor and the file that holds it."""

    path: str
    tensor: "Tensor"


@dataclass(frozen=True)
class Share:
    """What one rank has of a checkpoint: the tensors in its files, what its state refers to, and its tied names."""

    held: dict[str, Held]
    named: dict[str, Shard | None]
    aliases: dict[str, str]


@dataclass(frozen=True)
class Piece:
    """A part of a sharded tensor."""

    rank: int
    held: Held
    box: Box


@dataclass(frozen=True)
class Whole:
    """A tensor of the state: dtype and shape as stored, and where its parts are. One that is not sharded has one part."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, held: Held) -> "Whole":
        """A tensor that rank 0 keeps for all."""
        tensor = held.tensor
        return cls(tensor.dtype, tensor.shape, (Piece(0, held, Box.whole(tensor.shape)),))


def find(folder: Path, shares: Sequence[Share]) -> dict[str, Whole]:
    """The sharded tensors by name. Raises Damaged, naming the file, unless the ranks' parts tile each of them."""
    names = {name for share in shares for name, shard in share.named.items() if shard is not None}
    return {name: _whole(folder, name, shares) for name in sorted(names)}


def _whole(folder: Path, name: str, shares: Sequence[Share]) -> Whole:
    pieces = []
    first = shares[0].named.get(name)
    if first is None:
        raise Damaged(folder.name, "rank-0.json", f"has no part of the sharded tensor {name!r}")
    for rank, share in enumerate(shares):
        shard = share.named.get(name)
        if shard is None:
            if first.dim is None:
                continue
            raise Damaged(folder.name, f"rank-{rank}.json", f"has no part of the sharded tensor {name!r}")
        held = share.held.get(share.aliases.get(name, name))
        if held is None:
            raise Damaged(folder.name, f"rank-{rank}.json", f"refers to {name!r}, which no file holds")
        pieces.append(Piece(rank, held, Box(shard.offset, held.tensor.shape)))
        is_, should = (held.tensor.dtype, shard.shape), (pieces[0].held.tensor.dtype, first.shape)
        if is_ != should:
            why = f"has a part of {name!r} as {is_[0]} {list(is_[1])}, but rank 0 as {should[0]} {list(should[1])}"
            raise Damaged(folder.name, held.path, why)
    wrong = flaw(first.shape, [piece.box for piece in pieces])
    if wrong is not None:
        blamed = pieces[-1 if wrong.index is None else wrong.index].held.path
        raise Damaged(folder.name, blamed, f"has a part of the sharded tensor {name!r}, but {wrong.why}")
    return Whole(pieces[0].held.tensor.dtype, first.shape, tuple(pieces))
