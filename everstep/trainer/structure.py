"""What every checkpoint of a run must hold, and the environment that its bits depend on."""

import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.core.checkpoint import Structure, TensorShape
from everstep.store import tensors as stored
from everstep.trainer.program import Program, ProgramError


def of(program: Program, world_size: int) -> Structure:
    tensors = {name: one for name, one in program.model.state_dict().items() if isinstance(one, Tensor)}
    return Structure(
        batch_size=program.batch_size,
        model={name: _shape(one) for name, one in tensors.items()},
        parameters=tuple(name for name, _ in program.model.named_parameters(remove_duplicate=False)),
        world_size=world_size,
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        processor=processor(),
    )


def environment(program: Program, world_size: int, device: torch.device) -> dict[str, Any]:
    """Equal environments compute equal bits."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "world_size": world_size,
        "grad_accumulation": program.grad_accumulation,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def compare(path: Path, now: Structure) -> None:
    """Refuse to go on with another model or batch size than the run began with. Raises ProgramError."""
    try:
        before = Structure.parse(path.read_bytes(), path.parent.name, path.name)
    except FileNotFoundError:
        return
    if before.batch_size != now.batch_size:
        raise ProgramError(
            f"batch_size: is {now.batch_size}, but this run began with {before.batch_size}; put it back, or start a new "
            "run with fresh: true."
        )
    for name in sorted(before.model.keys() | now.model.keys()):
        was, has = before.model.get(name), now.model.get(name)
        if was != has:
            raise ProgramError(
                f"model: {name} is {_words(has)}, but this run began with {_words(was)}; put the program back, or start a "
                "new run with fresh: true."
            )


@lru_cache(maxsize=1)
def processor() -> str:
    """The processor's model name: another kind may round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _shape(tensor: Tensor) -> TensorShape:
    """As it is stored, and whole if it is sharded: a complex tensor with a last dimension of two."""
    return TensorShape(dtype=stored.word(tensor.dtype), shape=stored.shape_of(tensor))


def _words(one: TensorShape | None) -> str:
    return f"{one.dtype} {list(one.shape)}" if one else "absent"
