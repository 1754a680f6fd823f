"""Reads the curves of a run from its metrics: once through the file, whatever its length, in little memory."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.core.curve import Rate, Thinner
from everstep.core.summary import Curves

BLOCK = 256 * 1024
MOST_EVALUATIONS = 12
MOST_STEPS = 1 << 53


def read(metrics: Path, resumed: Mapping[int, int], most_bytes: int) -> Curves:
    """The curves of the rows that count, by `resumed` (the step from which each attempt resumed).

    Of a file longer than `most_bytes` so many are read, in blocks that are spread evenly over it.
    """
    drawing = _Drawing(resumed)
    try:
        size = metrics.stat().st_size
    except FileNotFoundError:
        return Curves()
    for lines in _blocks(metrics, size, most_bytes):
        for row in _parsed(lines):
            try:
                drawing.take(row)
            except (KeyError, TypeError, OverflowError):
                continue  # foreign lines cost only themselves
    return drawing.curves(whole=size <= most_bytes)


def _parsed(lines: list[bytes]) -> list[Any]:
    """The values in some lines. Many lines at once are read in a third of the time; torn ones cost only themselves."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and len(found) == len(lines):
        return found
    return [value for line in lines for value in _value(line)]


def _value(line: bytes) -> list[Any]:
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        return []


def _blocks(path: Path, size: int, most: int) -> Iterator[list[bytes]]:
    with path.open("rb") as file:
        if size <= most:
            while lines := file.readlines(BLOCK):
                yield lines
            return
        count = max(2, most // BLOCK)
        for index in range(count):
            start = (size - BLOCK) * index // (count - 1)
            file.seek(start)
            if start:
                file.readline()
            yield file.readlines(max(1, start + BLOCK - file.tell()))


@dataclass
class _Drawing:
    """Takes row after row. `last` is the row before, of the same attempt, for the rate."""

    resumed: Mapping[int, int]
    loss: Thinner = field(default_factory=Thinner)
    rate: Rate = field(default_factory=Rate)
    evaluations: dict[str, Thinner] = field(default_factory=dict)
    last_loss: float | None = None
    began: float | None = None
    _attempt: int = -1
    _left: float = math.inf
    _time: float = 0.0
    _samples: float = 0.0

    def take(self, row: dict[str, Any]) -> None:
        attempt, step, time = row["attempt"], row["step"], row["time"]
        if not (isinstance(attempt, int) and isinstance(step, int) and 0 <= step < MOST_STEPS and math.isfinite(time)):
            return
        if attempt != self._attempt:
            self._attempt, self._samples = attempt, math.nan
            self._left = min((at for later, at in self.resumed.items() if later > attempt), default=math.inf)
        samples = row.get("samples")
        if isinstance(samples, int | float):
            if self.began is None:
                self.began = time
            self.rate.add(time - self.began, samples - self._samples, time - self._time)
            self._time, self._samples = time, samples
        if step > self._left:
            return  # a later attempt has trained this step again
        told = row.get("loss")
        loss = told if type(told) is float else _number(told)
        if loss is not None:
            self.loss.add(step, loss)
            self.last_loss = loss
        if "eval" in row:
            self._evaluate(step, row["eval"])

    def _evaluate(self, step: int, told: Any) -> None:
        for name, value in told.items() if isinstance(told, dict) else ():
            if name not in self.evaluations and len(self.evaluations) >= MOST_EVALUATIONS:
                continue
            number = _number(value)
            if number is not None:
                self.evaluations.setdefault(name, Thinner(most=200)).add(step, number)

    def curves(self, *, whole: bool) -> Curves:
        return Curves(
            loss=self.loss.curve(),
            speed=self.rate.curve(),
            evaluations={name: one.curve() for name, one in sorted(self.evaluations.items())},
            last_loss=self.last_loss,
            began=self.began,
            whole=whole,
        )


def _number(value: Any) -> float | None:
    """Non-finite values rest as strings in the file."""
    if isinstance(value, bool):
        return None
    return float(value) if isinstance(value, int | float) or value in ("nan", "inf", "-inf") else None
