"""The parts of the test of one device: what is computed there, and compared with what must come out.

CPU and GPU take the same way; where a CPU has nothing to measure (a copy to its host) the part says so.
"""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from everstep.core.exam import Measured, Part, Task
from everstep.core.floors import Speed
from everstep.trainer import exam_ranks
from everstep.trainer.exam_device import Device, Tally, flip, release, seconds_of

ENOUGH = 64 << 20  # bytes; smaller buffers say nothing of a GPU's speed, as they fit into its caches
LARGE = 4096  # rows; smaller products say nothing of a GPU's speed
SIZES = (8192, 4096, 2048, 1024, 512)
SIZES_CPU = (128, 256, 512, 1024)
ENTRIES = {torch.bfloat16: 127, torch.float16: 15, torch.float32: 127}
"""The greatest entry of a matrix: itself, products and all sums are exact in float32, and a float16 result is finite."""

SPEEDS = {torch.bfloat16: Speed.bf16, torch.float16: Speed.fp16, torch.float32: Speed.fp32}
COPIES = 3  # at least: a bus that was idle takes some time to get up to its speed
CHUNK = 1 << 22  # elements that are compared at once
MIX = 0x9E3779B1 - (1 << 32)  # odd, so that no two places of a buffer hold the same pattern


def parts(task: Task, device: Device) -> Iterator[tuple[Part, Callable[[float], Measured]]]:
    """The parts in their order; each is told how many seconds it may measure."""
    yield Part.matmul, lambda seconds: matmul(device, seconds)
    release(device)
    yield Part.memory, lambda seconds: memory(device, seconds)
    release(device)
    yield Part.host_copy, lambda seconds: host_copy(task, device, seconds)
    release(device)
    yield Part.all_reduce, lambda seconds: exam_ranks.all_reduce(task, device, seconds)


# -- products ---------------------------------------------------------------------------------------------------------


def matmul(device: Device, seconds: float) -> Measured:
    """Products of integer matrices in the types that the device is good at, every element compared."""
    kinds = [torch.bfloat16, torch.float16, torch.float32]
    if device.is_cpu:
        kinds.remove(torch.float16)  # emulated there, a thousand times slower
    elif torch.cuda.get_device_capability(device.torch) < (8, 0):
        kinds.remove(torch.bfloat16)
    found = [_products(device, kind, seconds / len(kinds)) for kind in kinds]
    worst = max(found, key=lambda one: one.wrong)
    return Measured(
        part=Part.matmul,
        speeds={speed: value for one in found for speed, value in one.speeds.items()},
        compared=sum(one.compared for one in found),
        wrong=sum(one.wrong for one in found),
        greatest_error=worst.greatest_error if worst.wrong else 0.0,
        why=next((one.why for one in found if one.why), ""),
    )


def _products(device: Device, kind: torch.dtype, seconds: float) -> Measured:
    until = time.perf_counter() + seconds
    fitting = [n for n in SIZES if n * n * (3 * kind.itemsize + 3) <= device.memory]
    if not device.is_cpu and not fitting:
        return Measured(part=Part.matmul, why=f"only {device.memory >> 20} MiB may be taken")
    tally, rates, n = Tally(), [0.0], 0
    for n in SIZES_CPU if device.is_cpu else fitting[:1]:
        left, right, expected = problem(n, kind, device.torch)
        out = torch.empty(n, n, dtype=kind, device=device.torch)
        spent = _product(device, left, right, out, expected, tally)
        rates = [2 * n**3 / spent / 1e12]
        if 20 * spent > until - time.perf_counter():  # the next size takes eight times as long, twice
            break
    while time.perf_counter() < until:
        rates.append(2 * n**3 / _product(device, left, right, out, expected, tally) / 1e12)
    large = device.is_cpu or n >= LARGE
    why = "" if large else f"only {device.memory >> 20} MiB may be taken, too few for a speed"
    return tally.measured(Part.matmul, {SPEEDS[kind]: median(rates)} if large else {}, why)


def _product(device: Device, left: Tensor, right: Tensor, out: Tensor, expected: Tensor, tally: Tally) -> float:
    """Seconds that a product takes, after one that warms up; both are compared."""
    torch.mm(left, right, out=out)
    flip("exam.matmul", out)
    tally.compare(out, expected)
    spent = seconds_of(device, lambda: torch.mm(left, right, out=out))
    tally.compare(out, expected)
    return spent


def problem(n: int, kind: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices of integers and their product, known by a closed form: `c[(i + j) mod n]`, rounded once.

    `left[i, k] = a[(i + k) mod n]` and `right[k, j] = b[(k - j) mod n]`, so that an element of the product is a sum over
    `a` and `b` alone. `c` is computed on the host in 64-bit integers. Every element is below 2**24.
    """
    most = ENTRIES[kind]
    dice = torch.Generator().manual_seed(n)
    a = torch.randint(-most, most + 1, (n,), generator=dice)
    b = torch.randint(-most, most + 1, (n,), generator=dice)
    around = torch.cat([a, a])
    c = torch.cat([(around.unfold(0, n, 1)[at : min(at + 256, n)] * b).sum(1) for at in range(0, n, 256)])
    left = _hankel(a.to(device=device, dtype=kind)).contiguous()
    right = _hankel(b.flip(0).to(device=device, dtype=kind)).flip(0).contiguous()
    expected = _hankel(c.to(torch.float32).to(device).to(kind))
    return left, right, expected


def _hankel(values: Tensor) -> Tensor:
    """The matrix of `values[(i + j) mod n]`; it takes no memory."""
    n = len(values)
    return torch.cat([values, values]).unfold(0, n, 1)[:n]


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(device: Device, seconds: float) -> Measured:
    """A pattern and its inverse written, copied and read back; bytes read and written over the time of the copy.

    On a CPU that is busy the buffer is smaller: as large as can be gone through in the time.
    """
    until = time.perf_counter() + seconds
    whole = device.memory // 2 // 4
    count = min(whole, CHUNK // 4) if device.is_cpu else whole
    tally = Tally()
    while True:
        source = torch.empty(count, dtype=torch.int32, device=device.torch)
        target = torch.empty_like(source).fill_(1)  # its pages are there before anything is timed
        began = time.perf_counter()
        rates = [_pass(device, source, target, tally, inverse=False)]
        left = until - time.perf_counter()
        if count == whole or 3 * (time.perf_counter() - began) > left:
            break
        count = min(2 * count, whole)
    while time.perf_counter() < until:
        rates.append(_pass(device, source, target, tally, inverse=len(rates) % 2 == 1))
    large = device.is_cpu or 4 * count >= ENOUGH
    why = "" if large else f"only {device.memory >> 20} MiB may be taken, too few for a speed"
    return tally.measured(Part.memory, {Speed.memory: median(rates)} if large else {}, why)


def _pass(device: Device, source: Tensor, target: Tensor, tally: Tally, *, inverse: bool) -> float:
    """Once through the buffers; GB/s of the copy."""
    _write(source, inverse=inverse)
    spent = seconds_of(device, lambda: target.copy_(source))
    flip("exam.memory", target)
    _read(tally, target, inverse=inverse)
    return 2 * 4 * len(source) / spent / 1e9


def _write(into: Tensor, *, inverse: bool) -> None:
    for at, part in _chunks(into):
        part.copy_(_pattern(at, len(part), into.device, inverse=inverse))


def _read(tally: Tally, found: Tensor, *, inverse: bool) -> None:
    for at, part in _chunks(found):
        tally.compare(part, _pattern(at, len(part), found.device, inverse=inverse))


def _chunks(whole: Tensor) -> Iterator[tuple[int, Tensor]]:
    for at in range(0, len(whole), CHUNK):
        yield at, whole[at : at + CHUNK]


def _pattern(at: int, count: int, device: torch.device, *, inverse: bool) -> Tensor:
    found = torch.arange(at, at + count, dtype=torch.int32, device=device).mul_(MIX)
    return found.bitwise_not_() if inverse else found


# -- the way to the host ----------------------------------------------------------------------------------------------


def host_copy(task: Task, device: Device, seconds: float) -> Measured:
    """Pinned memory to the device and back, one rank at a time: GPUs may share their way to the host."""
    if device.is_cpu:
        return Measured(part=Part.host_copy, why="a CPU has no way to its host")
    count = min(device.memory // 4, ENOUGH) // 4
    there = torch.empty(count, dtype=torch.int32, device=device.torch)
    out, back = (torch.empty(count, dtype=torch.int32, pin_memory=True) for _ in range(2))
    tally = Tally()
    down: list[float] = []
    up: list[float] = []
    with _turn(task) as alone:
        until = time.perf_counter() + seconds / task.world_size
        while len(down) < COPIES or time.perf_counter() < until:
            inverse = len(down) % 2 == 1
            _write(out, inverse=inverse)
            down.append(4 * count / seconds_of(device, lambda: there.copy_(out, non_blocking=True)) / 1e9)
            _read(tally, there, inverse=inverse)
            up.append(4 * count / seconds_of(device, lambda: back.copy_(there, non_blocking=True)) / 1e9)
            _read(tally, back, inverse=inverse)
    if not alone or 4 * count < ENOUGH // 2:
        why = "others were copying too" if not alone else f"only {device.memory >> 20} MiB may be taken"
        return tally.measured(Part.host_copy, {}, why)
    return tally.measured(Part.host_copy, {Speed.h2d: max(down), Speed.d2h: max(up)})


@contextmanager
def _turn(task: Task) -> Iterator[bool]:
    """Wait for this rank's turn; false where it did not come, because another rank hangs in its own."""
    if task.turn_fd is None:
        yield task.world_size == 1
        return
    until = time.perf_counter() + task.patience / 2
    while True:
        try:
            fcntl.lockf(task.turn_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.perf_counter() >= until:
                yield False
                return
            time.sleep(0.005)
    try:
        yield True
    finally:
        fcntl.lockf(task.turn_fd, fcntl.LOCK_UN)
