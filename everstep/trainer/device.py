"""The device of a rank, and moving batches to it."""

from typing import Any

import torch
from torch import Tensor

from everstep.core.segment import AttemptSpec
from everstep.trainer.program import ProgramError

CPU = torch.device("cpu")


def choose(spec: AttemptSpec) -> torch.device:
    """`cuda:<local rank>` where there is one and the job does not say `cpu`."""
    if spec.device not in ("auto", "cpu", "cuda"):
        raise ProgramError(f"device: {spec.device!r} is not one of auto, cpu, cuda.")
    there = torch.cuda.device_count() if spec.device != "cpu" and torch.cuda.is_available() else 0
    if spec.device == "cuda" and spec.local_rank >= there:
        raise ProgramError(
            f"device: the job asks for cuda, but this machine shows {there} device(s) to rank {spec.local_rank}; "
            "use device: auto or fewer ranks."
        )
    if there and spec.local_rank >= there:
        raise ProgramError(f"ranks: rank {spec.local_rank} has no GPU, as this machine has {there}; use fewer ranks.")
    if not there:
        return CPU
    device = torch.device("cuda", spec.local_rank)
    torch.cuda.set_device(device)
    return device


def uuid(device: torch.device) -> str:
    """The UUID of a CUDA device as NVML prints it; empty for a CPU, and where PyTorch does not tell it."""
    if device.type != "cuda":
        return ""
    told = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return told if not told or told.startswith(("GPU-", "MIG-")) else f"GPU-{told}"


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; containers and objects with a `to` are followed."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(one, device) for one in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(one, device) for one in batch)
    if isinstance(batch, dict):
        return {key: moved(one, device) for key, one in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch
