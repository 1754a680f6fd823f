"""The order of samples: a pure function of (seed, epoch), and a position that is one number, samples consumed.

The position survives another number of ranks, of loader workers and of accumulated chunks. A global batch of n samples
is cut into ranks x accumulation contiguous chunks at i*n // (ranks x accumulation); some may be empty in a short tail.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from everstep.trainer import rng

_ORDER = 0x6F72646572  # keeps these keys apart from those of other uses of the seed


@dataclass(frozen=True)
class Order:
    """How the samples of a data set follow one another, for one rank of `ranks`."""

    size: int
    batch_size: int
    seed: int
    drop_last: bool = False
    rank: int = 0
    ranks: int = 1
    accumulation: int = 1

    @property
    def per_epoch(self) -> int:
        """Samples that an epoch consumes."""
        return self.size // self.batch_size * self.batch_size if self.drop_last else self.size

    def epoch_of(self, samples: int) -> int:
        """The epoch to which the next sample belongs."""
        return samples // self.per_epoch


@dataclass(frozen=True)
class Share:
    """One rank's share of one optimizer step: `total` samples of all ranks, and this rank's chunks of indices."""

    epoch: int
    total: int
    chunks: tuple[list[int], ...]


def shares(order: Order, samples: int) -> Iterator[Share]:
    """The shares of this rank from the position `samples` on, epoch after epoch, without end."""
    while True:
        epoch, offset = divmod(samples, order.per_epoch)
        total = min(order.batch_size, order.per_epoch - offset)
        all_of_epoch = permutation(order.size, order.seed, epoch)
        parts = order.ranks * order.accumulation
        first = order.rank * order.accumulation
        cuts = [part * total // parts for part in range(first, first + order.accumulation + 1)]
        indices = all_of_epoch[offset + cuts[0] : offset + cuts[-1]].tolist()
        chunks = tuple(indices[low - cuts[0] : high - cuts[0]] for low, high in pairwise(cuts))
        yield Share(epoch, total, chunks)
        samples += total


@lru_cache(maxsize=3)
def permutation(size: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch: indices 0 to size-1, int64."""
    generator = torch.Generator().manual_seed(rng.mix(_ORDER, seed, epoch) >> 1)
    return torch.randperm(size, generator=generator)
