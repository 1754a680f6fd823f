"""How long a rank works by itself in each step: from the step's begin until it joins the others for the average.

Ranks meet in every step, so all of them take as long as the slowest; only this time tells which one that is. On a GPU the
time is taken there, by pairs of events in its stream: its host runs ahead of it. They are read when they have passed,
and nothing ever waits for them. What a program's own `loss` waits for (a batch norm over all ranks) counts as work.
"""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

PENDING = 64  # pairs on the way; a step beyond them is not timed


class Stopwatch:
    """`start` at a step's begin, `stop` before its collective, `passed` gives the seconds that are known since."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self._spare: list[tuple[Any, Any]] = []
        self._seconds: deque[float] = deque(maxlen=PENDING)

    def start(self) -> None:
        if not self._on_gpu:
            self._began = time.perf_counter()
        elif len(self._pending) < PENDING:
            self._began = self._spare.pop() if self._spare else (_event(), _event())
            self._began[0].record()

    def stop(self) -> None:
        if self._began is None:
            return
        if self._on_gpu:
            self._began[1].record()
            self._pending.append(self._began)
        else:
            self._seconds.append(time.perf_counter() - self._began)
        self._began = None

    def passed(self) -> Iterator[float]:
        """The seconds of work of the steps that became known since the last time, oldest first."""
        while self._pending and self._pending[0][1].query():
            pair = self._pending.popleft()
            self._seconds.append(pair[0].elapsed_time(pair[1]) / 1000)
            self._spare.append(pair)
        while self._seconds:
            yield self._seconds.popleft()


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
