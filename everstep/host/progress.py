"""The console's one live line, and the plain lines around it. Goes to stderr, so that stdout ends with the JSON line."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from everstep.core.segment import Heartbeat, Lease, Phase

QUIET_SECONDS = 10.0
"""Without a terminal a line is printed at most so often."""


class Progress:
    """Draws progress. `show` is called often and returns at once."""

    def __init__(self, steps: int, durable_step: Callable[[], int], out: TextIO | None = None) -> None:
        self._steps = steps
        self._durable_step = durable_step
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._width = 0
        self._next = 0.0

    def show(self, beat: Heartbeat | None, _lease: Lease) -> None:
        """Draw the line anew, if it is time to."""
        now = time.monotonic()
        if beat is None or now < self._next:
            return
        self._next = now + (0.2 if self._live else QUIET_SECONDS)
        text = line(beat, self._steps, self._durable_step())
        if self._live:
            self._out.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._out.write(text + "\n")
        self._out.flush()

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._live and self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._width = 0
        self._out.write(text + "\n")
        self._out.flush()


def line(beat: Heartbeat, steps: int, durable_step: int) -> str:
    """Step, loss, samples/s, time left, last durable checkpoint."""
    parts = [f"step {beat.step}/{steps}"]
    if beat.phase is not Phase.train:
        parts.append(beat.phase.value)
    if beat.loss is not None:
        parts.append(f"loss {beat.loss:.4f}")
    if beat.samples_per_second:
        parts.append(f"{beat.samples_per_second:,.0f} samples/s")
    if beat.step_seconds:
        parts.append(f"{duration((steps - beat.step) * beat.step_seconds)} left")
    parts.append(f"durable: step {durable_step}" if durable_step else "durable: none yet")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """A length of time as people say it: 8 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
