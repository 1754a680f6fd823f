"""Batches for one rank, from a position in the run to its end. Worker processes live as long as the run does.

Random numbers in a data set are keyed on (seed, epoch, sample): they do not depend on who fetches a sample, or when.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from everstep.trainer import order, rng
from everstep.trainer.order import Order
from everstep.trainer.program import Program, ProgramError

_SAMPLE = 0x73616D706C65
PR_SET_PDEATHSIG = 1

Fetch = Callable[[int, list[int]], Any]


@dataclass(frozen=True)
class Step:
    """What one rank trains on in one optimizer step: pairs of a batch (None: no samples) and its number of samples."""

    epoch: int
    total: int
    chunks: tuple[tuple[Any, float], ...]


def steps(program: Program, how: Order, samples: int, count: int, *, pin: bool) -> Iterator[Step]:
    """The next `count` steps from the position `samples` on."""
    if count <= 0:
        return iter(())
    if program.workers == 0:
        return _here(program, how, samples, count)
    return _by_workers(program, how, samples, count, pin=pin)


def fetcher(program: Program, seed: int) -> Fetch:
    """A function (epoch, indices) -> batch, or None for no indices. It leaves the generators in any state."""
    collate = program.collate or default_collate
    dataset = program.dataset
    if _is_plain(program):
        return lambda _, indices: [one[indices] for one in dataset.tensors] if indices else None

    def fetch(epoch: int, indices: list[int]) -> Any:
        samples = []
        for index in indices:
            rng.seed_sample(rng.mix(_SAMPLE, seed, epoch, index))
            samples.append(dataset[index])
        return collate(samples) if samples else None

    return fetch


def _is_plain(program: Program) -> bool:
    """Rows of tensors: taken all at once, bit for bit what one by one gives, and nothing random in it."""
    return type(program.dataset) is TensorDataset and program.collate is None


def _here(program: Program, how: Order, samples: int, count: int) -> Iterator[Step]:
    fetch = fetcher(program, how.seed)
    aside = nullcontext() if _is_plain(program) else rng.Aside()
    for share in islice(order.shares(how, samples), count):
        with aside:
            batches = [(fetch(share.epoch, chunk), float(len(chunk))) for chunk in share.chunks]
        yield Step(share.epoch, share.total, tuple(batches))


def _by_workers(program: Program, how: Order, samples: int, count: int, *, pin: bool) -> Iterator[Step]:
    """One DataLoader over the whole rest of the run; it hands out one chunk after the other, in order."""
    loader: DataLoader[Any] = DataLoader(
        _Keyed(fetcher(program, how.seed)),  # type: ignore[arg-type]
        batch_size=None,
        sampler=_Chunks(how, samples, count),
        collate_fn=_as_it_is,
        num_workers=program.workers,
        multiprocessing_context="fork",
        worker_init_fn=_Worker(os.getpid()),
        generator=torch.Generator().manual_seed(rng.mix(_SAMPLE, how.seed) >> 1),
        pin_memory=pin,
    )
    batches = iter(loader)
    for share in islice(order.shares(how, samples), count):
        yield Step(share.epoch, share.total, tuple((next(batches), float(len(chunk))) for chunk in share.chunks))


@dataclass(frozen=True)
class _Chunks:
    """Iterates over (epoch, indices), as often as it is asked to: one for each chunk of this rank."""

    how: Order
    samples: int
    count: int

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for share in islice(order.shares(self.how, self.samples), self.count):
            for chunk in share.chunks:
                yield share.epoch, chunk

    def __len__(self) -> int:
        return self.count * self.how.accumulation


@dataclass(frozen=True)
class _Keyed:
    """A data set whose items are whole batches, for a DataLoader that does not batch."""

    fetch: Fetch

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        epoch, indices = key
        return self.fetch(epoch, indices)


@dataclass(frozen=True)
class _Worker:
    """First act of a worker: it dies with its rank, and it leaves signals that ask to stop to its rank."""

    parent: int

    def __call__(self, _: int) -> None:
        signal.set_wakeup_fd(-1)
        for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(one, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.parent:
            os._exit(0)


def _as_it_is(batch: Any) -> Any:
    return batch


class OwnLoader:
    """A program's own loader: this rank's batches, taken as equal parts of a step, epoch after epoch."""

    def __init__(self, program: Program, samples_per_step: int, parts: int) -> None:
        self._loader = program.loader
        self._total = samples_per_step
        self._accumulation = program.grad_accumulation
        self._parts = parts
        self.epoch = 0

    def steps(self, count: int) -> Iterator[Step]:
        batches = self._endless()
        for _ in range(count):
            chunks = tuple((next(batches), self._total / self._parts) for _ in range(self._accumulation))
            yield Step(self.epoch, self._total, chunks)

    def _endless(self) -> Iterator[Any]:
        """Ends of the loader are ends of epochs. A restored loader may stand at an end: one empty round is allowed."""
        empty = 0
        while empty < 2:
            empty += 1
            for batch in self._loader:
                empty = 0
                yield batch
            self.epoch += 1
        raise ProgramError("loader: gave no batch in two rounds; it must give at least one an epoch.")
