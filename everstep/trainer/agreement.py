"""The agreement of ranks: all act on the same word after the same step, and nobody waits for it.

At the end of step k every rank starts an all-reduce (MAX) of a few numbers, and reads the one that was started at the
end of step k-1. Each rank contributes its own wish to stop; rank 0 also what the lease says. A single rank hears itself
at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from everstep.trainer.ranks import Ranks


class Word(NamedTuple):
    """What all ranks act on. `end` is the next segment's end after the step it was said at, `segment` its number.

    `saves` counts requests for a save; 0 stands for "none" everywhere.
    """

    stop: int = 0
    fenced: int = 0
    until_step: int = 0
    end: int = 0
    segment: int = 0
    saves: int = 0


class Agreement:
    """`issue` the word of this rank after a step, `hear` the word of all that was issued before."""

    def __init__(self, say: Callable[[int], Word], ranks: Ranks) -> None:
        self._say = say
        self._ranks = ranks
        self._step = 0
        self._work: Any = None
        self._vector = torch.zeros(len(Word._fields), dtype=torch.int64)

    def issue(self, step: int) -> None:
        """Say this rank's word at the end of `step`. There is always one word on the way."""
        self._step = step
        if self._ranks.size > 1:
            self._vector = torch.tensor(self._say(step), dtype=torch.int64)
            self._work = dist.all_reduce(self._vector, dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)

    def hear(self) -> Word:
        """The word that all ranks said at the last `issue`."""
        if self._ranks.size == 1:
            return self._say(self._step)
        self._work.wait()
        return Word(*self._vector.tolist())
