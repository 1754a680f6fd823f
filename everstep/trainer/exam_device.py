"""The device that is put to the test: made ready, timed by its own clock, and its results compared."""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from everstep.core.exam import Measured, Part, Task
from everstep.core.floors import Speed
from everstep.store import faults

MOST_CPU, MOST_GPU = 256 << 20, 2 << 30  # bytes
SHARE_OF_FREE = 0.1


@dataclass(frozen=True)
class Device:
    """Where the test runs. `memory` is what one part may take, in bytes."""

    torch: torch.device
    model: str
    memory: int

    @property
    def is_cpu(self) -> bool:
        return self.torch.type == "cpu"


def prepare(task: Task) -> Device:
    """Make the device ready. Raises RuntimeError where there is none, or too little of its memory is free."""
    faults.identify(task.rank)
    faults.point("exam.start")
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    if device.type == "cpu":
        return Device(device, _cpu_model(), min(task.memory_bytes or MOST_CPU, MOST_CPU))
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no such GPU here")
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    _move_near(device)
    torch.zeros(1, device=device).sum().item()
    free, _ = torch.cuda.mem_get_info(device)
    memory = min(task.memory_bytes or MOST_GPU, MOST_GPU, int(free * SHARE_OF_FREE))
    return Device(device, torch.cuda.get_device_name(device), memory)


def release(device: Device) -> None:
    """Give back what a part has taken before the next one takes its own."""
    if not device.is_cpu:
        torch.cuda.empty_cache()


class Tally:
    """Elements compared, and those that were wrong. Bit for bit, save that zero has two forms."""

    def __init__(self) -> None:
        self._compared = 0
        self._wrong = 0
        self._greatest = 0.0

    def compare(self, found: Tensor, expected: Tensor) -> None:
        self._compared += found.numel()
        differ = found != expected
        if wrong := int(differ.sum()):
            self._wrong += wrong
            error = float((found[differ].double() - expected[differ].double()).abs().max())
            self._greatest = max(self._greatest, error if math.isfinite(error) else math.inf)

    def measured(self, part: Part, speeds: dict[Speed, float], why: str = "") -> Measured:
        """What was found; an infinite error, or one that is no number, is told as none."""
        greatest = self._greatest if math.isfinite(self._greatest) else None
        return Measured(
            part=part, speeds=speeds, compared=self._compared, wrong=self._wrong, greatest_error=greatest, why=why
        )


def seconds_of(device: Device, work: Callable[[], object]) -> float:
    """How long it takes, by the device's own clock where it has one."""
    if device.is_cpu:
        began = time.perf_counter()
        work()
        return max(time.perf_counter() - began, 1e-9)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    work()
    last.record()
    last.synchronize()
    return max(float(first.elapsed_time(last)) / 1e3, 1e-9)


def flip(point: str, values: Tensor) -> None:
    """A drill's plan may spoil one element here (`do: errno:5`)."""
    try:
        faults.point(point)
    except OSError:
        flat = values.view(-1)
        flat[len(flat) // 2] += 1 << 12


def _move_near(device: torch.device) -> None:
    """Run on the cores beside the GPU, where the system tells which: memory of another socket is slower to copy."""
    told = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(told, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return
    with suppress(OSError, ValueError):
        text = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/local_cpulist").read_text()
        spans = [part.partition("-") for part in text.strip().split(",") if part]
        cores = {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}
        if near := cores & os.sched_getaffinity(0):
            os.sched_setaffinity(0, near)


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "CPU"
