"""Curves of any length in little memory: neighbours are merged, and what stood out stays visible.

A cell keeps the least, the greatest and the mean of what fell into it, so a spike of one step among a million is drawn.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.core.record import Record

MOST_ODD = 50


class Point(NamedTuple):
    """One piece of a curve: its place, and the least, mean and greatest value there."""

    x: float
    low: float
    mean: float
    high: float


class Curve(Record):
    """A curve in at most some hundred points. `odd` has the first places at which the value was not a finite number."""

    points: tuple[Point, ...] = ()
    rows: int = 0
    odd: tuple[float, ...] = ()
    odd_rows: int = 0


@dataclass
class _Cell:
    rows: int
    x: float
    low: float
    high: float
    total: float

    def merge(self, other: "_Cell") -> None:
        self.rows += other.rows
        self.x += other.x
        self.total += other.total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)


@dataclass
class Thinner:
    """Takes values in any order, keeps at most `most` cells; a cell is `width` wide, and twice that when it is full."""

    most: int = 400
    width: float = 1.0
    rows: int = 0
    odd: list[float] = field(default_factory=list)
    odd_rows: int = 0
    _cells: dict[int, _Cell] = field(default_factory=dict)

    def add(self, x: float, value: float) -> None:
        self.rows += 1
        if not math.isfinite(value):
            self.odd_rows += 1
            if len(self.odd) < MOST_ODD:
                self.odd.append(x)
            return
        index = int(x // self.width)
        cell = self._cells.get(index)
        if cell is None:
            self._cells[index] = _Cell(1, x, value, value, value)
            while len(self._cells) > self.most:
                self._widen()
            return
        cell.rows += 1
        cell.x += x
        cell.total += value
        if value < cell.low:
            cell.low = value
        elif value > cell.high:
            cell.high = value

    def curve(self) -> Curve:
        points = tuple(
            Point(cell.x / cell.rows, cell.low, min(max(cell.total / cell.rows, cell.low), cell.high), cell.high)
            for _, cell in sorted(self._cells.items())
        )
        return Curve(points=points, rows=self.rows, odd=tuple(self.odd), odd_rows=self.odd_rows)

    def _widen(self) -> None:
        self.width *= 2
        before, self._cells = self._cells, {}
        for index, cell in before.items():
            there = self._cells.setdefault(index // 2, cell)
            if there is not cell:
                there.merge(cell)


@dataclass
class Rate:
    """Amounts over stretches of time, thinned to amount by second: what took longer counts longer."""

    most: int = 150
    width: float = 0.05
    _cells: dict[int, list[float]] = field(default_factory=dict)

    def add(self, time: float, amount: float, seconds: float) -> None:
        """`amount` was done in the `seconds` before `time`."""
        if not (seconds > 0 and 0 <= amount < math.inf and -math.inf < time < math.inf):
            return
        index = int(time // self.width)
        cell = self._cells.get(index)
        if cell is not None:
            cell[0] += amount
            cell[1] += seconds
            return
        self._cells[index] = [amount, seconds]
        while len(self._cells) > self.most:
            self._widen()

    def curve(self) -> Curve:
        values = [
            ((index + 0.5) * self.width, amount / seconds) for index, (amount, seconds) in sorted(self._cells.items())
        ]
        return Curve(points=tuple(Point(x, value, value, value) for x, value in values), rows=len(values))

    def _widen(self) -> None:
        self.width *= 2
        before, self._cells = self._cells, {}
        for index, (amount, seconds) in before.items():
            cell = self._cells.setdefault(index // 2, [0.0, 0.0])
            cell[0] += amount
            cell[1] += seconds
