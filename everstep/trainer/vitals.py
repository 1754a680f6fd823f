"""What a rank is doing, as its training thread says it; other threads read it and write the files."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from everstep.core.segment import AttemptSpec, Heartbeat, Phase, PhaseMark

RECENT = 64
FEW = 5  # steps that make a median of work
WORK_EVERY = 0.25  # seconds: of short steps only some are kept, so that a short disturbance is not all that is seen


def nothing() -> None:
    """What is called for news until somebody listens."""


class Vitals:
    """Plain attributes: written by one thread without locks, read by others a moment later."""

    def __init__(self, spec: AttemptSpec, pid: int) -> None:
        self.spec = spec
        self.pid = pid
        self.phase = Phase.start
        self.step = spec.resumed_from
        self.saved_step = spec.resumed_from
        self.progress = 0
        self.loss: float | None = None
        self.marks: deque[PhaseMark] = deque()
        self.last_snapshot = time.monotonic()
        self.told: Callable[[], None] = nothing
        self.gpu = ""
        self._seconds = [0.0] * RECENT
        self._samples = [0] * RECENT
        self._steps = 0
        self._work = [0.0] * RECENT
        self._worked = 0
        self._work_seen = 0.0
        self.enter(Phase.start)

    def enter(self, phase: Phase) -> None:
        """Begin a phase now. A mark of it is left for `phases.jsonl`."""
        self.phase = phase
        self.progress += 1
        if self.spec.rank == 0:
            self.marks.append(
                PhaseMark.model_construct(attempt=self.spec.attempt, time=time.time(), phase=phase, step=self.step)
            )
        self.told()

    def moved(self, _: int = 1) -> None:
        """Something advanced that is not a step: a file was read, a piece was written."""
        self.progress += 1

    def stepped(self, step: int, seconds: float, samples: int, loss: Any) -> None:
        """A step is done. A loss that still lies on a device is left to the side thread: reading it would wait."""
        place = self._steps % RECENT
        self._seconds[place] = seconds
        self._samples[place] = samples
        self._steps += 1
        self.step = step
        if type(loss) is float:
            self.loss = loss
        self.progress += 1

    def worked(self, seconds: Iterable[float]) -> None:
        """Some steps took so many seconds of own work."""
        for one in seconds:
            now = time.monotonic()
            if self._worked >= RECENT and now - self._work_seen < WORK_EVERY:
                continue
            self._work[self._worked % RECENT] = one
            self._worked += 1
            self._work_seen = now

    def heartbeat(self) -> Heartbeat:
        """Times of the first step of an attempt (it compiles and warms up) count until there are others."""
        count = min(self._steps, RECENT)
        seconds, samples = self._seconds[:count], self._samples[:count]
        if 1 < self._steps <= RECENT:
            seconds, samples = seconds[1:], samples[1:]
        total = sum(seconds)
        work = self._work[: min(self._worked, RECENT)]
        return Heartbeat(
            attempt=self.spec.attempt,
            rank=self.spec.rank,
            pid=self.pid,
            time=time.time(),
            phase=self.phase,
            step=self.step,
            progress=self.progress,
            loss=self.loss if self.loss is not None and math.isfinite(self.loss) else None,
            step_seconds=total / len(seconds) if seconds else None,
            slowest_step_seconds=max(seconds, default=None),
            samples_per_second=sum(samples) / total if total > 0 else None,
            saved_step=self.saved_step,
            work_seconds=median(work) if len(work) >= FEW else None,
            gpu=self.gpu,
        )
