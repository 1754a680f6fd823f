"""Gives a state that was read back the form that it has in this program on this number of ranks."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from everstep.core.box import Box
from everstep.trainer import sharding
from everstep.trainer.sharding import Piece


class Fit:
    """`want` gives memory for a box of a sharded tensor; `mesh` is the program's own, if it shards its model."""

    def __init__(self, want: Callable[[str, Box], Tensor], mesh: Any = None) -> None:
        self._want = want
        self._mesh = mesh

    def fit(self, saved: Any, living: Any = None) -> Any:
        """`saved` with sharded tensors as parts for this rank, or whole where the program does not shard them.

        `living` is the program's own state of the same form, as far as it has one: tensors are cut as they are there.
        """
        if isinstance(saved, Piece):
            return self._piece(saved, living)
        if isinstance(saved, Tensor):
            return self._cut(saved, living) if sharding.is_sharded(living) and living.shape == saved.shape else saved
        if isinstance(saved, dict):
            known = living if isinstance(living, Mapping) else {}
            pairs = {key: self.fit(one, known.get(key)) for key, one in saved.items()}
            return type(saved)(pairs) if type(saved) in (OrderedDict, Counter) else pairs
        if type(saved) in (list, tuple, deque):
            known = dict(enumerate(living)) if isinstance(living, list | tuple | deque) else {}
            items = [self.fit(one, known.get(index)) for index, one in enumerate(saved)]
            return deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)
        return saved

    def optimizer(self, saved: Any, optimizer: Any) -> Any:
        """An optimizer's state, in torch's form: what has a parameter's shape is cut as the parameter is."""
        parameters = dict(enumerate(one for group in optimizer.param_groups for one in group["params"]))
        if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
            return self.fit(saved)
        state = {key: self._beside(one, parameters.get(key)) for key, one in saved["state"].items()}
        return {key: self.fit(one) for key, one in saved.items() if key != "state"} | {"state": state}

    def _beside(self, saved: Any, parameter: Any) -> Any:
        if not isinstance(saved, dict) or parameter is None:
            return self.fit(saved)
        return {
            key: self.fit(one, parameter if _shape(one) == tuple(parameter.shape) else None)
            for key, one in saved.items()
        }

    def _piece(self, saved: Piece, living: Any) -> Tensor:
        if sharding.is_sharded(living) and tuple(living.shape) == _shape(saved):
            mesh, dim = living.device_mesh, sharding.dimension(living, saved.name)
        elif living is None:
            mesh, dim = self._mesh, saved.shard.dim
        else:
            mesh = dim = None
        shape = saved.shard.shape
        if mesh is None or dim is None:
            box = Box.whole(shape)
        else:
            box = Box.chunk(shape, dim, mesh.get_local_rank(), mesh.size())
        found = self._want(saved.name, box)
        found = torch.view_as_complex(found) if saved.complex else found
        return found if mesh is None else sharding.distributed(found, mesh, dim, _piece_shape(saved))

    def _cut(self, saved: Tensor, living: Any) -> Any:
        """A tensor that one rank kept whole, where the program now shards it."""
        dim = sharding.dimension(living, "state")
        if dim is None:
            return sharding.distributed(saved, living.device_mesh, None, tuple(saved.shape))
        box = sharding.chunk(living, dim)
        shape = tuple(saved.shape)
        part = saved[box.within(Box.whole(shape))].clone()
        return sharding.distributed(part, living.device_mesh, dim, shape)


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Piece):
        return _piece_shape(value)
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _piece_shape(piece: Piece) -> tuple[int, ...]:
    return piece.shard.shape[:-1] if piece.complex else piece.shard.shape
