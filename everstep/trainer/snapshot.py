"""A copy of the state at one step, on the CPU, taken by the training thread between two steps."""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.trainer import rng
from everstep.trainer.program import Program


@dataclass(frozen=True)
class Snapshot:
    """What one rank hands to its writer. `state` shares no memory with the living state.

    `finished`: the program said that it is done. `must`: training may not go on without it (segment end, stop, last
    step). `segment` is the number of the segment that ends here, or 0; `shown` the program's text at its end.
    """

    step: int
    samples: int
    epoch: int
    state: dict[str, Any]
    probe: dict[str, Any]
    time: float
    metrics: dict[str, float] = field(default_factory=dict)
    loss: Any = None
    finished: bool = False
    must: bool = False
    segment: int = 0
    shown: str = ""


def living(program: Program, rank: int) -> dict[str, Any]:
    """The state of a rank, not yet copied. Rank 0 holds what all share; the others what is theirs alone."""
    state: dict[str, Any] = {"rng": rng.capture()}
    if program.loader is not None:
        state["loader"] = program.loader.state_dict()
    if rank > 0:
        return state | {"buffers": buffers(program.model)}
    state["model"] = dict(program.model.state_dict())
    state["optimizer"] = program.optimizer.state_dict()
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


def copied(state: Any) -> Any:
    """The same containers and values over CPU copies of the tensors. Tied tensors stay one object."""
    return _Copier().copy(state)


class _Copier:
    def __init__(self) -> None:
        self._tensors: dict[Any, Tensor] = {}

    def copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        kind = type(value)
        if isinstance(value, dict):
            pairs = {key: self.copy(one) for key, one in value.items()}
            return kind(pairs) if kind in (OrderedDict, Counter) else pairs
        if kind in (list, tuple, set, frozenset):
            return kind(self.copy(one) for one in value)
        if kind is deque:
            return deque((self.copy(one) for one in value), value.maxlen)
        if isinstance(value, np.ndarray):
            return value.copy()
        return value

    def _tensor(self, value: Tensor) -> Tensor:
        value = value.detach()
        if value.layout is not torch.strided or not value.numel():
            return value.clone()
        key = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if key not in self._tensors:
            self._tensors[key] = value.clone() if value.device.type == "cpu" else value.to("cpu", copy=True)
        return self._tensors[key]
