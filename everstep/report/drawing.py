"""What pictures are made of: shapes with classes that the page's style colours, axes with round numbers.

Drawn as SVG by hand: it takes milliseconds, its texts are escaped with the rest of the page, and its colours follow the
reader's dark or light mode, none of which an imported plot does.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from everstep.core import words

WIDTH = 900.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 14.0, 36.0, 50.0


@dataclass(frozen=True)
class Shape:
    """An SVG element. `text` stands in it, `title` is shown when one points at it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    title: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture with its alternative text."""

    name: str
    title: str
    alt: str
    height: float
    shapes: tuple[Shape, ...] = ()
    width: float = WIDTH


@dataclass(frozen=True)
class Scale:
    """Maps values to places along an axis."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        part = (value - low) / (high - low) if high > low else 0.5
        return self.begin + min(1.0, max(0.0, part)) * (self.end - self.begin)


@dataclass
class Canvas:
    """Collects the shapes of a picture with two axes."""

    height: float
    x: Scale
    y: Scale
    shapes: list[Shape] = field(default_factory=list)

    def add(self, tag: str, text: str = "", title: str = "", **attributes: str | float) -> None:
        told = {
            name.rstrip("_").replace("_", "-"): value if isinstance(value, str) else _short(value)
            for name, value in attributes.items()
        }
        self.shapes.append(Shape(tag, told, text, title))

    def text(self, x: float, y: float, text: str, anchor: str = "start", class_: str = "label") -> None:
        self.add("text", text=text, x=x, y=y, text_anchor=anchor, class_=class_)

    def polyline(self, points: Iterable[tuple[float, float]], class_: str) -> None:
        told = " ".join(f"{_short(self.x(x))},{_short(self.y(y))}" for x, y in points)
        self.add("polyline", points=told, class_=class_)

    def upright(self, x: float, class_: str, title: str = "", label: str = "") -> None:
        """A vertical line through the whole picture."""
        at = self.x(x)
        self.add("line", title=title, x1=at, x2=at, y1=TOP, y2=self.height - BOTTOM, class_=class_)
        if label:
            self.text(at, TOP - 6, label, "middle", f"{class_}-label")

    def axes(
        self, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]], x_name: str, y_name: str
    ) -> None:
        foot = self.height - BOTTOM
        for value, label in y_ticks:
            at = self.y(value)
            self.add("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid")
            self.text(LEFT - 7, at + 4, label, "end", "tick")
        for index, (value, label) in enumerate(x_ticks):
            at = self.x(value)
            self.add("line", x1=at, x2=at, y1=foot, y2=foot + 5, class_="axis")
            self.text(at, foot + 19, label, "middle", "tick" if index % 2 == 0 else "tick minor")
        self.add("line", x1=LEFT, x2=WIDTH - RIGHT, y1=foot, y2=foot, class_="axis")
        self.text(WIDTH - RIGHT, self.height - 4, x_name, "end", "axis-name")
        self.text(2, 13, y_name, "start", "axis-name")


def canvas(height: float, xs: tuple[float, float], ys: tuple[float, float], *, log: bool = False) -> Canvas:
    """An empty canvas for values in these ranges."""
    x = Scale(*xs, LEFT, WIDTH - RIGHT)
    return Canvas(height, x, Scale(*ys, height - BOTTOM, TOP, log))


def ticks(low: float, high: float, about: int = 6) -> list[tuple[float, str]]:
    """Round numbers between two values, with their words."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [(low, words.short(low))]
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    values = [index * step for index in range(first, first + 2 * about + 2) if index * step <= high + step * 1e-9]
    return [(value, words.short(round(value, 12) if abs(value) > step / 2 else 0.0)) for value in values]


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """1, 2 and 5 in each power of ten between two values; only the powers when there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, (last - first) // 6)
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    values = (factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors)
    return [(value, words.short(value)) for value in values if low <= value <= high]


_UNITS = (
    ("seconds", 1.0, (1, 2, 5, 10, 15, 30, 60)),
    ("minutes", 60.0, (1, 2, 5, 10, 15, 30, 60)),
    ("hours", 3600.0, (1, 2, 3, 6, 12, 24)),
    ("days", 86400.0, (1, 2, 5, 7, 14, 28, 70, 140, 365)),
)


def time_ticks(seconds: float, about: int = 8) -> tuple[list[tuple[float, str]], str]:
    """Ticks along a stretch of time that begins at 0, and the unit they are in."""
    name, unit, steps = next((one for one in reversed(_UNITS) if seconds >= 2 * one[1]), _UNITS[0])
    if seconds < 2:
        return ticks(0.0, seconds), "seconds"
    span = seconds / unit
    step = next((one for one in steps if span / one <= about), steps[-1] * math.ceil(span / about / steps[-1]))
    return [(index * step * unit, f"{index * step:,}") for index in range(int(span / step) + 1)], name


def thinned(values: Iterable[float], place: Callable[[float], float], apart: float) -> Iterator[float]:
    """Values, leaving out those whose place is closer than `apart` to the one before."""
    last = -math.inf
    for value in sorted(values):
        if place(value) - last >= apart:
            last = place(value)
            yield value


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
