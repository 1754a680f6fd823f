"""Ranks without samples, in a short tail of an epoch, beside a sharded model."""

from typing import Any

import torch

from everstep.trainer import loader, rng, sharding
from everstep.trainer.device import moved
from everstep.trainer.evaluation import same_buffers
from everstep.trainer.gradients import Gradients
from everstep.trainer.program import Program

_SAMPLES = 2  # a batch norm takes no single sample


class StandIn:
    """A forward and a backward pass that count for nothing.

    FSDP gathers parameters in every forward and adds up gradients in every backward pass, so each rank takes part in each
    of them. The samples are the first of the data set, with weight zero. Random state and buffers are put back; what
    else the program notes down in its `loss` is its own.
    """

    def __init__(self, program: Program, gradients: Gradients, seed: int, device: torch.device) -> None:
        self._program = program
        self._gradients = gradients
        self._seed = seed
        self._device = device
        self._batch: Any = None

    def join(self) -> None:
        """Be there for the others."""
        program = self._program
        absent = [one for one in self._gradients.parameters if one.grad is None and not sharding.is_sharded(one)]
        with rng.forked(), same_buffers(program.model):
            if self._batch is None:
                indices = list(range(min(_SAMPLES, len(program.dataset))))
                self._batch = loader.fetcher(program, self._seed)(0, indices)
            loss = program.loss(moved(self._batch, self._device)) * 0.0
            (program.scaler.scale(loss) if program.scaler is not None else loss).backward()
        for one in absent:
            one.grad = None
