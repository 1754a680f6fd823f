"""Sharded tensors: parameters that `fully_shard` has cut (DTensors) and what optimizers keep for them.

A tensor may be cut along one dimension over a mesh of all ranks, as FSDP2 does. `torch.distributed.tensor` is imported
by the programs that use it, and never from here, since that takes more than a second.
"""

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from everstep.core.box import Box
from everstep.store import tensors as stored
from everstep.store.references import Shard
from everstep.trainer.program import ProgramError

_NOTHING = object()


@dataclass(frozen=True)
class Piece:
    """In a state that was read back: a sharded tensor, whose values are still in the ranks' files."""

    name: str
    shard: Shard
    complex: bool = False


def is_sharded(value: Any) -> bool:
    """Whether `value` is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def local(value: Any, path: str) -> tuple[Tensor, Shard]:
    """The local part of a DTensor, over the same memory, and where it lies, as stored. Raises ProgramError.

    No rank asks another: the cut follows from the number of ranks, as in `torch.chunk`.
    """
    value = value.detach()
    part: Tensor = value.to_local()
    shape, dim = tuple(value.shape), dimension(value, path)
    box = Box.whole(shape) if dim is None else chunk(value, dim)
    if tuple(part.shape) != box.shape or stored.word(part.dtype) == "F4":
        raise ProgramError(f"state: {path} is sharded in a way that a checkpoint cannot hold; use fully_shard.")
    pair = (2,) if value.is_complex() else ()
    return part, Shard((*shape, *pair), (*box.offset, *(0 for _ in pair)), dim)


def dimension(value: Any, path: str) -> int | None:
    """The dimension along which a DTensor is cut; None if every rank has all of it. Raises ProgramError."""
    mesh, placements = value.device_mesh, value.placements
    if mesh.ndim != 1 or mesh.size() != dist.get_world_size():
        raise ProgramError(
            f"state: {path} is sharded over a mesh of {'x'.join(map(str, mesh.shape))}, but only one dimension over all "
            f"{dist.get_world_size()} ranks can be saved and resumed; call fully_shard without a mesh."
        )
    (placement,) = placements
    if placement.is_replicate():
        return None
    dim: int = getattr(placement, "dim", 0)
    if type(placement).__name__ != "Shard":
        raise ProgramError(f"state: {path} is sharded as {placement}, which a checkpoint cannot hold; use fully_shard.")
    return dim % len(value.shape)


def check(model: nn.Module, *, scaled: bool) -> None:
    """Refuse a model that is sharded in another way than by FSDP2 over all ranks. Raises ProgramError.

    `scaled`: gradients go through a GradScaler, which takes none of a model that is sharded in part.
    """
    sharded = {name: one for name, one in model.named_parameters() if is_sharded(one)}
    for name, parameter in sharded.items():
        dimension(parameter, f"model/{name}")
        if not any(fully_sharded(model)):
            raise ProgramError(
                f"model: {name} is a sharded parameter, but no module was given to fully_shard, which alone makes ranks "
                "with different samples train one model."
            )
    whole = [name for name, one in model.named_parameters() if one.requires_grad and name not in sharded]
    if scaled and sharded and whole:
        raise ProgramError(
            f"scaler: a GradScaler cannot work with {whole[0]}, which is whole, beside sharded parameters; give the model "
            "itself to fully_shard, too."
        )


def fully_sharded(model: nn.Module) -> Iterator[Any]:
    """The modules that `fully_shard` was called on."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    if loaded is not None:
        yield from (one for one in model.modules() if isinstance(one, loaded.FSDPModule))


def sum_gradients(model: nn.Module) -> None:
    """Let FSDP add gradients up instead of averaging them: each loss has its weight in the step already."""
    for module in fully_sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def settle(model: nn.Module) -> None:
    """Give whole parameters back after a forward pass without a backward pass: the model has its sharded ones again."""
    for module in fully_sharded(model):
        module.reshard()


def mesh_of(model: nn.Module) -> Any:
    """The mesh of a sharded model, or None."""
    sharded: Iterator[Any] = (one for one in model.parameters() if is_sharded(one))
    return next((one.device_mesh for one in sharded), None)


def own(state: Any) -> Any:
    """What of a state is this rank's part of a whole: the same tree with nothing in it but cut DTensors.

    Keys and places stay, so that a part has the same name on all ranks. Where there is none the tree is empty.
    """
    found = _own(state)
    return {} if found is _NOTHING else found


def _own(value: Any) -> Any:
    if is_sharded(value):
        return _NOTHING if all(one.is_replicate() for one in value.placements) else value
    if isinstance(value, dict):
        pairs = {key: kept for key, one in value.items() if (kept := _own(one)) is not _NOTHING}
        return pairs or _NOTHING
    if isinstance(value, list | tuple | deque):
        items = [_own(one) for one in value]
        return (
            _NOTHING if all(one is _NOTHING for one in items) else [None if one is _NOTHING else one for one in items]
        )
    return _NOTHING


def chunk(value: Any, dim: int) -> Box:
    """The local part of a DTensor that is cut along `dim`."""
    mesh = value.device_mesh
    return Box.chunk(tuple(value.shape), dim, mesh.get_local_rank(), mesh.size())


def distributed(part: Tensor, mesh: Any, dim: int | None, shape: tuple[int, ...]) -> Any:
    """A DTensor of `shape`, of which this rank has `part`."""
    module: Any = sys.modules["torch.distributed.tensor"]
    placement = module.Replicate() if dim is None else module.Shard(dim)
    stride = torch.empty(shape, device="meta").stride()
    part = part.to(mesh.device_type)
    return module.DTensor.from_local(part, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)
