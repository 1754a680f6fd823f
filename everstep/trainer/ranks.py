"""The ranks of an attempt: rendezvous, and what they do together.

A single rank has no process group. A program that needs one there (`fully_shard` does) gets it from PyTorch itself, which
finds in the environment what torchrun would have put there.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everstep.core.segment import AttemptSpec
from everstep.trainer import sharding

RENDEZVOUS = timedelta(minutes=10)
FOREVER = timedelta(days=30)  # a hang is judged by the supervisor, from heartbeats, and not by a collective
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Ranks:
    """Who we are, and the groups: gradients use the default group, `control` agrees, `saving` is the writers' own."""

    rank: int = 0
    size: int = 1
    control: Any = None
    saving: Any = None

    @classmethod
    def join(cls, spec: AttemptSpec, device: torch.device) -> "Ranks":
        """Meet the others. Sets the environment that torchrun would set, for programs that read it."""
        set_environment(spec)
        if spec.world_size == 1:
            return cls()
        store = dist.TCPStore(  # type: ignore[attr-defined]
            spec.master_addr,
            spec.master_port,
            spec.world_size,
            spec.rank == 0,
            timeout=RENDEZVOUS,
            master_listen_fd=spec.listen_fd if spec.rank == 0 else None,
        )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=spec.rank, world_size=spec.world_size, timeout=FOREVER)
        control = dist.new_group(backend="gloo", timeout=FOREVER)
        saving = dist.new_group(backend="gloo", timeout=FOREVER)
        return cls(spec.rank, spec.world_size, control, saving)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks rank 0's values, bit for bit, whatever their dtypes. Parts of a sharded tensor are left alone:
        each is on one rank only.
        """
        if self.size == 1:
            return
        for group in _by_device(one for one in tensors if not sharding.is_sharded(one)):
            flat = torch.cat([_bytes(one) for one in group])
            dist.broadcast(flat, 0)
            at = 0
            for one in group:
                size = one.numel() * one.element_size()
                one.copy_(flat[at : at + size].view(one.dtype).view(one.shape))
                at += size

    def agree(self, value: bool) -> bool:
        """Whether rank 0 says so."""
        if self.size == 1:
            return value
        word = torch.tensor([int(value)])
        dist.broadcast(word, 0, group=self.control)
        return bool(word.item())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON) on every rank; used by the writer threads only."""
        if self.size == 1:
            return [value]
        data = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.saving)
        longest = max(int(size.item()) for size in sizes)
        mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.saving)
        return [json.loads(bytes(part.numpy())) for part in parts]

    def meet(self, seconds: float) -> None:
        """A barrier before leaving: the first to go must not get the others killed."""
        if self.size > 1:
            work = dist.all_reduce(torch.zeros(1), group=self.control, async_op=True)
            work.wait(timedelta(seconds=seconds))


def set_environment(spec: AttemptSpec) -> None:
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.local_rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(spec.world_size),
        MASTER_ADDR=spec.master_addr,
        MASTER_PORT=str(spec.master_port),
    )
    if spec.master_addr == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks for the host's name, which may not resolve


def _by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Large elements first, so that each tensor's bytes lie where its dtype allows."""
    groups: dict[torch.device, list[Tensor]] = {}
    for one in tensors:
        if one.numel():
            groups.setdefault(one.device, []).append(one.detach())
    return [sorted(group, key=lambda one: -one.element_size()) for group in groups.values()]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
