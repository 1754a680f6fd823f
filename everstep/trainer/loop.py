"""The training loop: step, evaluate if due, save if due, go on while the lease reaches.

The order at the end of a step is fixed: optimizer and scheduler -> the ranks' word -> evaluation -> metrics row ->
probe (segment ends) -> snapshot -> writer. It is what makes a resumed run take the same steps.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from everstep.core.errors import Fenced
from everstep.core.segment import AttemptSpec, Phase
from everstep.store import faults
from everstep.trainer import evaluation, gradients, sharding, snapshot
from everstep.trainer.agreement import Agreement, Word
from everstep.trainer.device import moved
from everstep.trainer.evaluation import Probe
from everstep.trainer.gradients import Gradients
from everstep.trainer.loader import Step
from everstep.trainer.program import Program, ProgramError
from everstep.trainer.ranks import Ranks
from everstep.trainer.saver import Saver
from everstep.trainer.side import Side
from everstep.trainer.snapshot import Snapshot
from everstep.trainer.stand_in import StandIn
from everstep.trainer.stopwatch import Stopwatch
from everstep.trainer.vitals import Vitals

IDLE = 0.01


class Finish(Enum):
    """How the loop ended."""

    done = "done"
    early = "early"
    stopped = "stopped"


@dataclass
class Training:
    """Everything one rank trains with, and how far it is."""

    spec: AttemptSpec
    program: Program
    device: torch.device
    ranks: Ranks
    vitals: Vitals
    side: Side | None
    saver: Saver
    agreement: Agreement
    gradients: Gradients
    stand_in: StandIn | None
    probe: Probe
    steps: Iterator[Step]
    step: int
    samples: int
    epoch: int
    per_epoch: int | None
    saved_step: int | None
    saves: int = 0
    first: bool = True
    finished: bool = False
    loss: Any = None
    lr: Any = 0.0
    grad_norm: Any = None
    stopwatch: Stopwatch | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def run(t: Training) -> Finish:
    """Train until the steps are done, a stop is asked for, or the program says that it is done."""
    t.vitals.last_snapshot = time.monotonic()
    if t.ranks.size > 1 and sharding.mesh_of(t.program.model) is None:  # FSDP waits for the others all through a step
        t.stopwatch = Stopwatch(t.device)
    t.agreement.issue(t.step)
    word = _hear(t)
    while t.step < t.spec.steps and not t.finished:
        if not word.stop and word.until_step <= t.step:
            word = _wait(t)
        if word.stop:
            break
        began = time.perf_counter()
        total = _train(t)
        word = _hear(t)
        t.vitals.stepped(t.step, time.perf_counter() - began, total, t.loss)
        if t.stopwatch is not None:
            t.vitals.worked(t.stopwatch.passed())
        _close(t, word)
    ended = t.step >= t.spec.steps or t.finished
    if t.saved_step != t.step:
        _save(t, must=True)
    t.vitals.enter(Phase.save if ended else Phase.stop)
    t.saver.finish()
    return (Finish.early if t.step < t.spec.steps else Finish.done) if ended else Finish.stopped


def _hear(t: Training) -> Word:
    """The word of the step before, and this rank's word for the next one."""
    word = t.agreement.hear()
    t.agreement.issue(t.step)
    if word.fenced:
        raise Fenced("a newer attempt of this run has begun, so this one ends without saving.")
    return word


def _wait(t: Training) -> Word:
    """At the end of the lease: until there is a longer one, or a stop. The ranks ask each other all the while."""
    word = _hear(t)
    if word.stop or word.until_step > t.step:
        return word
    t.saver.fence()
    t.vitals.enter(Phase.wait)
    while not word.stop and word.until_step <= t.step:
        t.saver.check()
        if t.side is not None:
            t.side.wait_for_news(IDLE)
        t.vitals.moved()
        word = _hear(t)
    if not word.stop:
        t.vitals.enter(Phase.train)
    return word


def _train(t: Training) -> int:
    """One optimizer step; returns its samples over all ranks."""
    if t.first:
        t.vitals.enter(Phase.compile)
        faults.point("train.first_step")
    if t.stopwatch is not None:
        t.stopwatch.start()
    share = next(t.steps)
    t.gradients.clear()
    t.loss = _backward(t, share)
    faults.point("train.mid_step")
    _update(t)
    t.step += 1
    t.samples += share.total
    t.epoch = share.epoch
    faults.point("train.step_end")
    if t.first:
        t.first = False
        t.vitals.step = t.step
        t.saver.prepare(snapshot.living(t.program, t.ranks.rank))
        t.vitals.enter(Phase.train)
    return share.total


def _backward(t: Training, share: Step) -> Any:
    """Weighted gradients of this rank's chunks, averaged over the ranks; the loss of the whole step."""
    program = t.program
    total: Any = 0.0
    for batch, count in share.chunks:
        if batch is None:
            if t.stand_in is not None:
                t.stand_in.join()
            continue
        loss = program.loss(moved(batch, t.device))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ProgramError(
                f"loss: must return a tensor of one element that depends on the model, not {loss!r:.80}."
            )
        weight = count / share.total
        weighted = loss if weight == 1.0 else loss * weight
        (program.scaler.scale(weighted) if program.scaler is not None else weighted).backward()
        total = total + (weighted.item() if t.ranks.size == 1 and t.device.type == "cpu" else weighted.detach().float())
    if t.ranks.size > 1:
        mine = torch.as_tensor(total, dtype=torch.float32, device=t.device)
        averaged = t.gradients.average(mine, t.stopwatch.stop if t.stopwatch is not None else _nothing)
        return averaged.item() if averaged.device.type == "cpu" else averaged
    return total


def _nothing() -> None:
    """Nobody times this rank."""


def _update(t: Training) -> None:
    program = t.program
    t.saver.fence()
    if program.scaler is not None and program.clip_norm is not None:
        program.scaler.unscale_(program.optimizer)
    t.grad_norm = _clip(t)
    if program.scaler is not None:
        program.scaler.step(program.optimizer)
        program.scaler.update()
    else:
        program.optimizer.step()
    lr = program.optimizer.param_groups[0]["lr"]
    t.lr = lr.detach().clone() if isinstance(lr, Tensor) else lr
    if program.scheduler is not None:
        program.scheduler.step()


def _clip(t: Training) -> Any:
    """Clip where the program asks for it. The norm of the gradients, where this step measures it, before clipping.

    Without clipping it is taken now and then, which costs next to nothing; never of gradients that are scaled.
    """
    if t.program.clip_norm is not None:
        return gradients.clip(t.gradients.parameters, t.program.clip_norm)
    if t.program.scaler is None and (t.step + 1) % gradients.NORM_EVERY == 0:
        return gradients.norm(t.gradients.parameters)
    return None


def _close(t: Training, word: Word) -> None:
    """What is due at the end of a step."""
    spec = t.spec
    segment = word.segment if word.end == t.step else 0
    last = t.step >= spec.steps
    t.metrics = {}
    if _evaluation_is_due(t, segment):
        _evaluate(t)
    _report(t)
    if t.finished:
        segment = segment or word.segment
    must = bool(segment or last or t.finished or word.stop)
    counted = bool(spec.save_every_steps and t.step % spec.save_every_steps == 0)
    due = must or counted or word.saves > t.saves
    t.saves = max(t.saves, word.saves)
    if due:
        _save(t, must=must, patient=must or counted, segment=segment)


def _evaluation_is_due(t: Training, segment: int) -> bool:
    if t.program.evaluate is None and t.program.done is None:
        return False
    every = t.spec.evaluate_every_steps
    return t.step >= t.spec.steps or (t.step % every == 0 if every else bool(segment))


def _evaluate(t: Training) -> None:
    t.vitals.enter(Phase.eval)
    t.metrics = evaluation.evaluate(t.program)
    if t.program.done is not None:
        t.finished = t.ranks.agree(bool(t.program.done()))
    t.vitals.enter(Phase.train)


def _report(t: Training) -> None:
    if t.side is None:
        return
    row: dict[str, Any] = {
        "attempt": t.spec.attempt,
        "step": t.step,
        "time": time.time(),
        "loss": t.loss,
        "lr": t.lr,
        "samples": t.samples,
        "epoch": t.epoch,
    }
    if t.grad_norm is not None:
        row["grad_norm"] = t.grad_norm
    if t.program.scaler is not None:
        row["scaled"] = True
    t.side.row(row | {"eval": t.metrics} if t.metrics else row)


def _save(t: Training, *, must: bool, patient: bool = True, segment: int = 0) -> None:
    """Take a snapshot and hand it to the writer. At a segment's end the loss on the fixed batch goes with it."""
    probe: dict[str, Any] = {"loss": None, "dtype": "", "samples": 0}
    shown = ""
    if segment:
        t.vitals.enter(Phase.eval)
        shown = evaluation.shown(t.program)
        probe = t.probe.take()
    t.vitals.enter(Phase.save)
    t.vitals.last_snapshot = time.monotonic()
    t.saver.take(
        snapshot.living(t.program, t.ranks.rank),
        Snapshot(
            step=t.step,
            samples=t.samples,
            epoch=t.samples // t.per_epoch if t.per_epoch else t.epoch,
            probe=probe,
            time=time.time(),
            metrics=t.metrics,
            loss=t.loss,
            finished=t.finished,
            must=must,
            patient=patient,
            segment=segment,
            shown=shown,
        ),
    )
    t.saved_step = t.step
    t.vitals.enter(Phase.train)
