"""The console's one live line, and the plain lines around it. Goes to stderr, so that stdout ends with the JSON line."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from everstep.core.segment import Heartbeat, Lease, Phase
from everstep.core.words import duration
from everstep.host.live_line import LiveLine

PHASES = {
    Phase.start: "starting",
    Phase.restore: "loading the checkpoint",
    Phase.compile: "first step",
    Phase.save: "saving",
    Phase.eval: "evaluating",
    Phase.wait: "waiting",
    Phase.stop: "stopping",
}

NEWS = {
    "gate.waiting": "looking at the data",
    "stop.requested": "stopping: the last finished step is being saved",
    "checkpoint.quarantined": "a checkpoint is set aside: {}",
    "checkpoint.unreadable": "a checkpoint cannot be read now: {}",
    "leftovers.killed": "processes of an earlier flow run were still there; they are ended",
    "lease.unwritten": "the run directory takes nothing now, training goes on as far as its lease reaches: {}",
    "copier.died": "{}; it is started again",
    "space.low": "{}",
    "retention.failed": "{}",
    "tracking.away": "MLflow does not answer, training goes on and MLflow is told later: {}",
    "tracking.back": "MLflow answers again",
}
"""Events that are worth a line of their own; {} is the first line of their text."""


class Progress:
    """Draws progress. `show` is called often and returns at once."""

    def __init__(self, steps: int, durable_step: Callable[[], int], out: TextIO | None = None) -> None:
        self._steps = steps
        self._durable_step = durable_step
        self._out = out or sys.stderr
        self._line = LiveLine(self._out)
        self._next = 0.0
        self._drawing = threading.Lock()

    def show(self, beat: Heartbeat | None, _lease: Lease) -> None:
        """Draw the line anew, if it is time to."""
        now = time.monotonic()
        if now < self._next or (beat is None and not self._line.is_live):
            return
        self._next = now + self._line.seconds
        text = line(beat, self._steps, self._durable_step()) if beat else "starting the ranks"
        with self._drawing:
            self._line.draw(text)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        with self._drawing:
            self._line.wipe()
            self._out.write(text + "\n")
            self._out.flush()

    def hear(self, kind: str, text: str) -> None:
        """An event has happened: it is said if a person at the console should know."""
        if kind in NEWS:
            self.say(NEWS[kind].format(text.partition("\n")[0]))

    def close(self) -> None:
        """Leave a clean line behind."""
        with self._drawing:
            self._line.wipe()
            self._out.flush()


def line(beat: Heartbeat, steps: int, durable_step: int) -> str:
    """Step, loss, samples/s, time left, last durable checkpoint."""
    parts = [f"step {beat.step}/{steps}"]
    if beat.phase in PHASES:
        parts.append(PHASES[beat.phase])
    if beat.loss is not None:
        parts.append(f"loss {beat.loss:.4f}")
    if beat.samples_per_second:
        parts.append(f"{beat.samples_per_second:,.0f} samples/s")
    if beat.step_seconds and beat.step < steps:
        parts.append(f"{duration((steps - beat.step) * beat.step_seconds)} left")
    parts.append(f"durable: step {durable_step}" if durable_step else "durable: none yet")
    return " | ".join(parts)
