"""Gradients: cleared, averaged over the ranks in one fixed order, clipped. No wrapper is put around the model.

Every chunk's loss is weighted with its share of the step's samples before `backward`, so the average is a plain sum.
One flat buffer for each dtype and device holds all parameters in their order; what a rank lacks counts as zero. Flags
in the same buffer tell whether any rank has a gradient for a parameter: where none has, it stays None, as it would on
one rank. The loss rides along.

Parameters that `fully_shard` has cut are left out: FSDP adds their gradients up in the backward pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from everstep.trainer import sharding
from everstep.trainer.program import Program, ProgramError
from everstep.trainer.ranks import Ranks

NORM_EVERY = 16
"""Where nothing is clipped, the norm of the gradients is taken in each step whose number this divides, on all ranks."""


def trainable(program: Program) -> list[nn.Parameter]:
    """The parameters that training changes: the model's in its order, then others that the optimizer holds."""
    found = {id(one): one for one in program.model.parameters() if one.requires_grad}
    for group in program.optimizer.param_groups:
        found |= {id(one): one for one in group["params"] if one.requires_grad and id(one) not in found}
    return list(found.values())


@dataclass(frozen=True)
class _Bucket:
    """Parameters of one dtype and device, and the buffer for their gradients, flags and the loss."""

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    flags: Tensor


class Gradients:
    """The gradients of one rank's parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self.parameters = list(parameters)
        plain = [one for one in self.parameters if not sharding.is_sharded(one)]
        self._buckets = _buckets(plain) if ranks.size > 1 else []
        with_room = [one for one in self._buckets if one.flat.dtype in (torch.float32, torch.float64)]
        alone = torch.zeros(1, device=self.parameters[0].device)
        self._tail = with_room[0].flat[-1:] if with_room else alone
        self._tail_rides = bool(with_room)

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def average(self, loss: Tensor, ready: Callable[[], None] = lambda: None) -> Tensor:
        """Sum the weighted gradients and the weighted loss over all ranks; returns the loss. For several ranks only.

        `ready` is called when this rank has done its own part and is about to join the others.
        """
        for bucket in self._buckets:
            _fill(bucket)
        ready()
        self._tail.copy_(loss.view(1))
        for bucket in self._buckets:
            dist.all_reduce(bucket.flat)
        if not self._tail_rides:
            dist.all_reduce(self._tail)
        for bucket in self._buckets:
            _spread(bucket)
        return self._tail.clone()


def clip(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradients down to the norm `limit`. Returns the norm they had, on their device."""
    if not any(sharding.is_sharded(one) for one in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    parts, wholes = _sharded(parameters)
    total = _norm_sharded(parts, wholes, parameters[0].device)
    scale = torch.clamp(limit / (total + 1e-6), max=1.0)
    torch._foreach_mul_([*parts, *wholes], scale)
    return total


def norm(parameters: list[nn.Parameter]) -> Tensor | None:
    """The norm of all gradients, on their device. It reads only. Where some are sharded, all ranks call it together.

    None where a gradient is sparse: no norm is worth an error.
    """
    if any(sharding.is_sharded(one) for one in parameters):
        return _norm_sharded(*_sharded(parameters), parameters[0].device)
    grads = [one.grad for one in parameters if one.grad is not None]
    return torch.nn.utils.get_total_norm(grads) if all(one.layout is torch.strided for one in grads) else None


def _sharded(parameters: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """Of gradients that are cut the parts of this rank, and the gradients that every rank has whole."""
    parts: list[Tensor] = []
    wholes: list[Tensor] = []
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is not None and sharding.is_sharded(grad):
            parts.append(grad.to_local())
        elif grad is not None:
            wholes.append(grad)
    return parts, wholes


def _norm_sharded(parts: list[Tensor], wholes: list[Tensor], device: torch.device) -> Tensor:
    """As `get_total_norm` does, over the parts on all ranks and what every rank has whole."""
    square = _square(parts, device)
    if dist.get_world_size() > 1:
        dist.all_reduce(square)
    square += _square(wholes, square.device)
    return square.sqrt()


def _square(grads: list[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements."""
    return torch.nn.utils.get_total_norm(grads).to(device, torch.float32).square()


def _buckets(parameters: list[nn.Parameter]) -> list[_Bucket]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return [_bucket(group) for group in groups.values()]


def _bucket(parameters: list[nn.Parameter]) -> _Bucket:
    sizes = [parameter.numel() for parameter in parameters]
    first = parameters[0]
    flat = torch.zeros(sum(sizes) + len(sizes) + 1, dtype=first.dtype, device=first.device)
    parts = torch.split(flat[: sum(sizes)], sizes)
    views = [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
    return _Bucket(parameters, flat, views, flat[sum(sizes) : -1])


def _fill(bucket: _Bucket) -> None:
    flags = []
    targets, sources, absent = [], [], []
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        grad = parameter.grad
        flags.append(0.0 if grad is None else 1.0)
        if grad is None:
            absent.append(view)
            continue
        if grad.layout is not torch.strided:
            raise ProgramError("model: gives sparse gradients, which several ranks cannot average; use dense ones.")
        targets.append(view)
        sources.append(grad)
    bucket.flags.copy_(torch.tensor(flags, dtype=bucket.flat.dtype))
    bucket.flat[-1] = 0
    if targets:
        torch._foreach_copy_(targets, sources)
    if absent:
        torch._foreach_zero_(absent)


def _spread(bucket: _Bucket) -> None:
    targets, sources = [], []
    absent = any(parameter.grad is None for parameter in bucket.parameters)
    somewhere = bucket.flags.tolist() if absent else [1.0] * len(bucket.parameters)  # asking makes a GPU wait
    for parameter, view, flag in zip(bucket.parameters, bucket.views, somewhere, strict=True):
        if flag == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        targets.append(parameter.grad)
        sources.append(view)
    if targets:
        torch._foreach_copy_(targets, sources)
