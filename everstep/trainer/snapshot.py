"""What a checkpoint holds at one step: the living state of a rank, and where each tensor of it goes in a buffer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everstep.store import tensors as stored
from everstep.trainer import rng, sharding
from everstep.trainer.program import Program
from everstep.trainer.tree import Encoded

ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Snapshot:
    """What one rank hands to its writer beside its state.

    `finished`: the program said that it is done. `must`: training may not go on without it (segment end, stop, last
    step). `patient`: it was asked for after this very step, and not by the clock, which may as well ask a little later.
    `segment` is the number of the segment that ends here, or 0; `shown` the program's text at its end.
    """

    step: int
    samples: int
    epoch: int
    probe: dict[str, Any]
    time: float
    metrics: dict[str, float] = field(default_factory=dict)
    loss: Any = None
    finished: bool = False
    must: bool = False
    patient: bool = True
    segment: int = 0
    shown: str = ""


@dataclass(frozen=True)
class Placed:
    """A tensor's place in a buffer: safetensors' dtype, shape as it is stored, first byte and number of bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True)
class Plan:
    """Where everything of one snapshot goes: tensors into `size` bytes of a buffer, the rest into JSON.

    The first `whole` tensors are not sharded.
    """

    placed: tuple[Placed, ...]
    whole: int
    size: int
    tree: Any
    aliases: dict[str, str]


def plan(encoded: Encoded) -> Plan:
    """Places for the tensors of a state: parts of sharded ones last, so that they have files of their own; large elements
    before small ones, so that tensors lie close in a file as they do here.
    """
    placed: list[Placed] = []
    at = whole = 0
    for sharded in (False, True):
        at += -at % ALIGNMENT
        names = (name for name in encoded.tensors if (name in encoded.parts) is sharded)
        for name in sorted(names, key=lambda name: -encoded.tensors[name].element_size()):
            tensor = encoded.tensors[name]
            placed.append(Placed(name, stored.word(tensor.dtype), stored.shape_of(tensor), at, tensor.nbytes))
            at += tensor.nbytes
        whole = whole if sharded else len(placed)
    return Plan(tuple(placed), whole, at, encoded.tree, encoded.aliases)


def changed_by_the_optimizer(program: Program) -> Callable[[Placed, Tensor], bool]:
    """Tells the tensors of a state that only `optimizer.step()` changes: parameters and the optimizer's own."""
    parameters = {f"model/{name}" for name, _ in program.model.named_parameters(remove_duplicate=False)}
    return lambda placed, _: placed.name in parameters or placed.name.startswith("optimizer/")


def living(program: Program, rank: int) -> dict[str, Any]:
    """The state of a rank, not yet copied. Rank 0 holds what all share; the others what is theirs alone, and their parts
    of what is sharded.
    """
    state: dict[str, Any] = {"rng": rng.capture()}
    if program.loader is not None:
        state["loader"] = program.loader.state_dict()
    if rank == 0:
        return state | shared(program)
    state["buffers"] = buffers(program.model)
    return state if sharding.mesh_of(program.model) is None else state | sharding.own(shared(program))


def shared(program: Program) -> dict[str, Any]:
    """What all ranks have in common, or their parts of it."""
    state = {"model": dict(program.model.state_dict()), "optimizer": program.optimizer.state_dict()}
    if program.scheduler is not None:
        state["scheduler"] = program.scheduler.state_dict()
    if program.scaler is not None:
        state["scaler"] = program.scaler.state_dict()
    if program.state:
        state["state"] = {name: one.state_dict() for name, one in program.state.items()}
    return state


def buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the state (running means, for example): every rank has its own."""
    kept = model.state_dict().keys()
    return {name: one for name, one in model.named_buffers(remove_duplicate=False) if name in kept}
