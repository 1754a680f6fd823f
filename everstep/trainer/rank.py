"""The life of a rank: seed, build, broadcast, seed anew, restore, train, meet the others, leave.

Everything ends in `leave`: the last word is on disk before the process goes, and the process goes at once (loader
workers get the kernel's SIGKILL with it), so nothing that hangs at interpreter exit can hold the device.
"""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch

from everstep.core.segment import AttemptSpec, Cause, CauseKind, Outcome, Phase, is_echo
from everstep.store import faults
from everstep.store.layout import RunPlaces
from everstep.trainer import device as devices
from everstep.trainer import (
    failure,
    gradients,
    loader,
    locate,
    loop,
    pulse,
    restore,
    rng,
    sharding,
    snapshot,
    structure,
    tree,
)
from everstep.trainer.agreement import Agreement, Word
from everstep.trainer.commit import Target
from everstep.trainer.evaluation import Probe
from everstep.trainer.gradients import Gradients
from everstep.trainer.loader import OwnLoader, Step
from everstep.trainer.loop import Finish, Training
from everstep.trainer.order import Order
from everstep.trainer.program import Program
from everstep.trainer.pulse import Pulse
from everstep.trainer.ranks import Ranks
from everstep.trainer.restore import Start
from everstep.trainer.saver import Saver
from everstep.trainer.scribe import Scribe
from everstep.trainer.side import Side
from everstep.trainer.stand_in import StandIn
from everstep.trainer.vitals import Vitals

FAREWELL = 10.0  # seconds to wait for the others before leaving
AFTER_FAILURE = 10.0  # seconds for a save in progress to be committed when training has failed
USER, FAILED = 2, 1


class Rank:
    """One rank's threads and places, while it lives."""

    def __init__(self, spec: AttemptSpec, early_signal: int, scribe: Scribe | None) -> None:
        self.spec = spec
        self.scribe = scribe
        self.places = RunPlaces(persistent=Path(spec.run_dir), local=Path(spec.local_dir))
        self.vitals = Vitals(spec, os.getpid())
        self.pulse = Pulse(self.vitals, self.places, early_signal)
        self.side = Side(self.vitals, self.places) if spec.rank == 0 else None
        self.ranks = Ranks()
        self.saver: Saver | None = None
        self._timed = 0

    def say(self, step: int) -> Word:
        """The word of this rank at the end of `step`; rank 0 speaks for the lease and for the clock."""
        if self.side is None:
            return Word(stop=int(self.pulse.stop_wanted))
        self.side.check()
        lease = self.side.lease
        end = lease.end_after(step)
        return Word(
            stop=int(self.pulse.stop_wanted or lease.stop),
            fenced=int(self.side.fenced),
            until_step=min(lease.until_step, self.spec.steps),
            end=end,
            segment=lease.segment_ending_at(end) if end else 0,
            saves=lease.saves + self._clock(lease.save_every_seconds or self.spec.save_every_seconds),
        )

    def _clock(self, every: float | None) -> int:
        """How many saves by time have fallen due, one `every` so many seconds."""
        has_room = self.saver is None or self.saver.has_room
        if every is not None and has_room and time.monotonic() - self.vitals.last_snapshot >= every:
            self._timed += 1
            self.vitals.last_snapshot = time.monotonic()
        return self._timed


def live(spec: AttemptSpec, early_signal: int = 0, scribe: Scribe | None = None) -> NoReturn:
    """Run the rank to its end; the process ends with it. Codes: 0 in order, 2 the user's fault, 1 anything else."""
    faults.identify(spec.rank)
    rank = Rank(spec, early_signal, scribe)
    rank.pulse.start()
    try:
        finish = _train(rank)
    except BaseException as error:  # noqa: BLE001 - the process edge: recorded in the last word, with its traceback in the log
        _fail(rank, error)
    else:
        _leave_in_order(rank, finish)
    raise AssertionError("leave() does not return")


def _train(rank: Rank) -> Finish:
    spec = rank.spec
    torch.set_num_threads(spec.threads)
    device = devices.choose(spec)
    rank.vitals.gpu = devices.uuid(device)
    if rank.side is not None:
        rank.places.persistent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rank.side.start()
    rank.ranks = Ranks.join(spec, device)
    rng.seed_all(rng.mix(spec.seed))
    program = locate.build(spec.program, spec.search_path, spec.config, Path(spec.data))
    program.model.to(device)
    sharding.sum_gradients(program.model)
    rank.ranks.broadcast([*program.model.parameters(), *program.model.buffers()])
    return loop.run(_prepare(rank, program, device))


def _prepare(rank: Rank, program: Program, device: torch.device) -> Training:
    """Everything between a built program and its first step."""
    spec, ranks = rank.spec, rank.ranks
    shape = structure.of(program, ranks.size)
    if spec.restore is not None:
        structure.compare(rank.places.structure, shape)
    tree.encode(snapshot.living(program, ranks.rank))  # a state that no checkpoint can hold is told now, not at a save
    environment = structure.environment(program, ranks.size, device)
    parts = ranks.size * program.grad_accumulation
    probe = Probe(program, spec.seed, device, parts)
    order = _order(spec, program)
    restore.seed_rank(spec, 0)
    start = Start()
    if spec.restore is not None:
        rank.vitals.enter(Phase.restore)
        start = restore.from_checkpoint(spec, program, probe, environment, rank.vitals, order)
    averaged = Gradients(gradients.trainable(program), ranks)
    sharded = sharding.mesh_of(program.model) is not None
    rank.saver = Saver(
        rank.vitals,
        Target(rank.places, ranks, shape, environment),
        rank.side,
        scribe=rank.scribe,
        pinned=device.type == "cuda",
        later=snapshot.changed_by_the_optimizer(program),
        threads=spec.threads,
    )
    rank.saver.start()
    return Training(
        spec=spec,
        program=program,
        device=device,
        ranks=ranks,
        vitals=rank.vitals,
        side=rank.side,
        saver=rank.saver,
        agreement=Agreement(rank.say, ranks),
        gradients=averaged,
        stand_in=StandIn(program, averaged, spec.seed, device) if ranks.size > 1 and sharded else None,
        probe=probe,
        steps=_steps(spec, program, order, start, device),
        step=start.step,
        samples=start.samples,
        epoch=start.epoch,
        per_epoch=order.per_epoch if order else None,
        saved_step=start.step if spec.restore is not None else None,
        finished=bool(start.finished),
    )


def _order(spec: AttemptSpec, program: Program) -> Order | None:
    if program.dataset is None:
        return None
    return Order(
        size=len(program.dataset),
        batch_size=program.batch_size,
        seed=spec.seed,
        drop_last=program.drop_last,
        rank=spec.rank,
        ranks=spec.world_size,
        accumulation=program.grad_accumulation,
    )


def _steps(
    spec: AttemptSpec, program: Program, order: Order | None, start: Start, device: torch.device
) -> Iterator[Step]:
    count = spec.steps - start.step
    if order is None:
        own = OwnLoader(program, program.batch_size, spec.world_size * program.grad_accumulation)
        own.epoch = start.epoch
        return own.steps(count)
    return loader.steps(program, order, start.samples, count, pin=device.type == "cuda")


def _leave_in_order(rank: Rank, finish: Finish) -> None:
    """The last word, then a barrier, then out."""
    if finish is Finish.stopped:
        end = pulse.stopped(rank.vitals, rank.pulse.signal_name)
    else:
        faults.point("run.end")
        end = pulse.end_of(rank.vitals, Outcome.done, Cause(), early=finish is Finish.early)
    if rank.side is not None:
        rank.side.flush(FAREWELL)
    rank.pulse.leave(end, 0, before=lambda: _meet(rank))


def _meet(rank: Rank) -> None:
    try:
        rank.ranks.meet(FAREWELL)
    except RuntimeError as error:  # another rank is gone already; our own word is on disk
        sys.stderr.write(f"everstep: left without the others: {failure.describe(error)}\n")


def _fail(rank: Rank, error: BaseException) -> None:
    """Let a save in progress be committed, then say why and go. Losing another rank while stopping is a stop."""
    traceback.print_exception(error)
    vitals = rank.vitals
    cause = failure.cause_of(error, vitals.phase, rank.spec.rank, vitals.step)
    if rank.saver is not None and rank.saver.failure is None and cause.kind is not CauseKind.fenced:
        try:
            rank.saver.finish(AFTER_FAILURE)
        except Exception as late:  # noqa: BLE001 - the first error is the cause; this one goes to the log
            traceback.print_exception(late)
    if rank.pulse.stop_wanted and rank.ranks.size > 1 and is_echo(cause):
        rank.pulse.leave(pulse.stopped(vitals, rank.pulse.signal_name), 0)
    if rank.side is not None:
        rank.side.flush(1.0)
    rank.pulse.leave(pulse.end_of(vitals, Outcome.failed, cause), USER if cause.kind is CauseKind.user else FAILED)
