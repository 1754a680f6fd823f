"""Looking at the model without disturbing the training: evaluation, and the loss on a fixed batch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from everstep.trainer import loader, rng, sharding
from everstep.trainer.device import moved
from everstep.trainer.failure import ProbeMismatch
from everstep.trainer.program import Program, ProgramError

MOST_SAMPLES = 16
MOST_TEXT = 4000
_PROBE = 0x70726F6265
TOLERANCE = 1e-3
TOLERANCE_HALF = 1e-2


@contextmanager
def aside(model: nn.Module, key: int | None = None) -> Iterator[None]:
    """Eval mode without gradients; after it modes and random state are as before. `key` seeds what happens within."""
    modes = [(module, module.training) for module in model.modules()]
    with rng.forked(key), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            sharding.settle(model)


def evaluate(program: Program) -> dict[str, float]:
    """The program's own metrics; empty if it has none. Raises ProgramError for what are no metrics."""
    if program.evaluate is None:
        return {}
    with aside(program.model):
        found = program.evaluate()
    try:
        return {_name(name): float(value) for name, value in dict(found).items()}
    except (TypeError, ValueError) as error:
        raise ProgramError(f"evaluate: must return a dict of names to numbers, not {found!r}.") from error


def shown(program: Program) -> str:
    """The program's own text for people, cut at `MOST_TEXT` characters; empty if it has none."""
    if program.show is None:
        return ""
    with aside(program.model):
        text = program.show()
    if not isinstance(text, str):
        raise ProgramError(f"show: must return a string, not {text!r:.80}.")
    return text[:MOST_TEXT].encode("utf-8", "replace").decode()


class Probe:
    """The loss on the first samples of the data set: a fixed batch that shows whether a restored model is the same."""

    def __init__(self, program: Program, seed: int, device: torch.device, parts: int) -> None:
        self._program = program
        self._seed = seed
        self._device = device
        self._parts = parts
        self._batches: dict[int, Any] = {}

    def take(self) -> dict[str, Any]:
        """What a checkpoint keeps: the loss as hex, the model's dtype, the number of samples. Loss None: no data set."""
        program = self._program
        if program.dataset is None:
            return {"loss": None, "dtype": "", "samples": 0}
        samples = max(1, min(MOST_SAMPLES, len(program.dataset), program.batch_size // self._parts))
        return {"loss": self._loss(samples).hex(), "dtype": _dtype(program.model), "samples": samples}

    def check(self, kept: dict[str, Any], folder: str, *, exactly: bool) -> None:
        """Compare with what a checkpoint kept. Raises ProbeMismatch."""
        if kept.get("loss") is None or self._program.dataset is None:
            return
        was, now = float.fromhex(kept["loss"]), self._loss(int(kept["samples"]))
        tolerance = TOLERANCE_HALF if kept["dtype"] in ("float16", "bfloat16") else TOLERANCE
        if _same(was, now) or (not exactly and math.isclose(was, now, rel_tol=tolerance)):
            return
        raise ProbeMismatch(
            folder, f"{folder}: the loss on a fixed batch was {was!r} when it was saved and is {now!r} now."
        )

    def _loss(self, samples: int) -> float:
        program = self._program
        with aside(program.model, rng.mix(_PROBE, self._seed)), same_buffers(program.model):
            if samples not in self._batches:
                self._batches[samples] = loader.fetcher(program, self._seed)(0, list(range(samples)))
                rng.seed_all(rng.mix(_PROBE, self._seed))
            return float(program.loss(moved(self._batches[samples], self._device)))


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """After it every buffer is the same object with the same values."""
    kept = [
        (module, name, one, one.detach().clone())
        for module in model.modules()
        for name, one in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, one, values in kept:
            with torch.no_grad():
                one.copy_(values)
            setattr(module, name, one)


def _dtype(model: nn.Module) -> str:
    return str(next(one.dtype for one in model.parameters())).removeprefix("torch.")


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no name")
    return name
