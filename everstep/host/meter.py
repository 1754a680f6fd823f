"""How far a data set has come: how much, how fast, how long still. A line on the terminal, and words for others."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from everstep.core.words import duration
from everstep.host.live_line import QUIET_SECONDS, LiveLine

PATIENCE_SECONDS = 1.0
"""What is over sooner needs no progress."""
WINDOW_SECONDS = 15.0
TELL_SECONDS = 2.0


class Meter:
    """Called with bytes done and bytes in all, as often as one likes.

    `tell` gets the percentage and the words every two seconds, and once more at the end if it was told before.
    """

    def __init__(
        self,
        tell: Callable[[float, str], None] | None = None,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._out = out or sys.stderr
        self._line = LiveLine(self._out)
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        self._total = 0
        self._last = (0.0, "")
        self._has_told = False
        self._draw_at = self._tell_at = clock() + PATIENCE_SECONDS
        if not self._line.is_live:
            self._draw_at = clock() + QUIET_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        self._seen.append((now, done))
        self._total = total
        while now - self._seen[0][0] > WINDOW_SECONDS:
            self._seen.popleft()
        if now < min(self._draw_at, self._tell_at):
            return
        self._last = (100.0 * done / total if total else 100.0, words(done, total, self._rate()))
        if now >= self._draw_at:
            self._draw_at = now + self._line.seconds
            self._line.draw(f"data: {self._last[1]}")
        if self._tell and now >= self._tell_at:
            self._tell_at = now + TELL_SECONDS
            self._has_told = True
            self._tell(*self._last)

    def close(self, *, whole: bool) -> None:
        """Leave a clean line behind, and say the end where the middle was said."""
        self._line.wipe()
        self._out.flush()
        if self._tell and self._has_told and whole:
            self._tell(100.0, words(self._total, self._total, 0.0))

    def _rate(self) -> float:
        """Bytes a second, over the last seconds."""
        (begin, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - begin) if now > begin else 0.0


def words(done: int, total: int, rate: float) -> str:
    """35 % | 1.40 of 4.00 GB | 350 MB/s | 8 s left."""
    unit, scale = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
    share = 100.0 * done / total if total else 100.0
    parts = [f"{share:.0f} %", f"{done / scale:.2f} of {total / scale:.2f} {unit}"]
    if done < total and rate > 0:
        parts += [f"{rate / 1e6:,.0f} MB/s", f"{duration((total - done) / rate)} left"]
    return " | ".join(parts)
