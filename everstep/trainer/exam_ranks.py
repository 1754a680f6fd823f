"""The part of the test that all ranks of a machine take together: a sum over them."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everstep.core.exam import Measured, Part, Task
from everstep.core.floors import Speed
from everstep.trainer.exam_device import Device, Tally, flip, seconds_of

MOST_CPU, MOST_GPU = 16 << 20, 256 << 20  # bytes
ENOUGH = 64 << 20  # bytes; a smaller message says nothing of the links of GPUs
MOST_ROUNDS = 500


def all_reduce(task: Task, device: Device, seconds: float) -> Measured:
    """Sums of integers over all ranks, each element compared. Bus bandwidth as nccl-tests has it: 2 (n - 1) / n."""
    ranks = task.world_size
    if ranks == 1:
        return Measured(part=Part.all_reduce, why="there is one rank only")
    try:
        store = _meet(task, device)
    except RuntimeError as error:
        return Measured(part=Part.all_reduce, why=str(error).splitlines()[0][:300])
    count = min(device.memory // 4, MOST_CPU if device.is_cpu else MOST_GPU) // 4
    places = torch.arange(count, dtype=torch.int32, device=device.torch).remainder_(97).to(torch.float32)
    expected = places * ranks + ranks * (ranks + 1) // 2
    values, tally, rates = torch.empty_like(places), Tally(), [0.0]
    rounds = at = 0
    while at == 0 or at <= rounds:
        torch.add(places, task.rank + 1, out=values)
        spent = seconds_of(device, lambda: dist.all_reduce(values))
        flip("exam.all_reduce", values)
        tally.compare(values, expected)
        if at == 0:  # it made the connections, and tells how many more fit
            rounds = _agreed(store, task.rank, min(MOST_ROUNDS, max(2, int(seconds / spent))))
        else:
            rates.append(2 * (ranks - 1) / ranks * 4 * count / spent / 1e9)
        at += 1
    with suppress(RuntimeError):  # rank 0 has taken the store with it: it left when all had come so far
        _wait(store, "left", task)  # the first to leave must not take the connections away
    large = device.is_cpu or 4 * count >= ENOUGH
    why = "" if large else f"only {device.memory >> 20} MiB may be taken, too few for a speed"
    return tally.measured(Part.all_reduce, {Speed.all_reduce: max(rates)} if large else {}, why)


def _meet(task: Task, device: Device) -> Any:
    """Join the other ranks. Raises RuntimeError, with who is missing, where they do not come in time."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        task.master_addr,
        task.master_port,
        task.world_size,
        task.rank == 0,
        timeout=timedelta(seconds=task.patience),
        wait_for_workers=False,
        master_listen_fd=task.listen_fd if task.rank == 0 else None,
    )
    if missing := _wait(store, "here", task):
        others = ", ".join(str(rank) for rank in missing)
        raise RuntimeError(f"rank {others} did not come within {task.patience:.0f} s")
    dist.init_process_group(
        "gloo" if device.is_cpu else "nccl",
        store=dist.PrefixStore("exam", store),  # type: ignore[attr-defined]
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.patience),
    )
    return store


def _wait(store: Any, word: str, task: Task) -> list[int]:
    """Say the word, and wait until all have said it; those who have not in time."""
    store.set(f"{word}/{task.rank}", "1")
    try:
        store.wait([f"{word}/{rank}" for rank in range(task.world_size)], timedelta(seconds=task.patience))
    except RuntimeError:
        return [rank for rank in range(task.world_size) if not store.check([f"{word}/{rank}"])]
    return []


def _agreed(store: Any, rank: int, rounds: int) -> int:
    if rank == 0:
        store.set("rounds", str(rounds))
    return int(store.get("rounds"))
