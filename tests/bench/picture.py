"""Stall and memory of a save against the size of its state, as one SVG of two panels."""

import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from everstep.report import drawing

HEIGHT = 340.0
WAYS = {
    "overlapped": ("ours, copied beside the next step", "#1f6fb2"),
    "stall": ("ours, copied at once", "#6aa9d8"),
    "memcpy": ("memcpy of the state", "#333333"),
    "dcp_async": ("DCP async_save", "#b8860b"),
    "safetensors": ("safetensors save_file", "#8a6bb1"),
    "torch_save": ("torch.save", "#b23b3b"),
}
STYLE = (
    "text{font:13px sans-serif;fill:#444}.axis-name{fill:#111;font-weight:600}.grid{stroke:#ddd}.axis{stroke:#777}"
    "polyline{fill:none;stroke-width:2}"
)


def draw(found: dict[int, dict[str, float]], path: Path) -> None:
    """`found` maps sizes in MB to the figures of `saving.run`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    panels = [_stalls(found), _memory(found)]
    parts = [f'<g transform="translate(0 {index * (HEIGHT + 20)})">{panel}</g>' for index, panel in enumerate(panels)]
    size = f'viewBox="0 0 {drawing.WIDTH + 10} {len(panels) * (HEIGHT + 20)}" width="{drawing.WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
    path.write_text(f'{head}<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n')


def _stalls(found: dict[int, dict[str, float]]) -> str:
    values = [one[way] for one in found.values() for way in WAYS]
    low, high = min(values) / 1.5, max(values) * 1.5
    canvas = drawing.canvas(HEIGHT, _range(found), (low, high), log=True)
    canvas.axes(_sizes(found), drawing.log_ticks(low, high), "state", "seconds in which the training stands still")
    for index, (way, (label, color)) in enumerate(WAYS.items()):
        points = [(math.log2(size), one[way]) for size, one in found.items()]
        _line(canvas, points, color)
        canvas.add("rect", x=90.0, y=44.0 + 18 * index, width=14.0, height=3.0, fill=color)
        canvas.text(110.0, 50.0 + 18 * index, label)
    return _svg(canvas)


def _memory(found: dict[int, dict[str, float]]) -> str:
    points = [(math.log2(size), one["snapshot_peak_over_state"]) for size, one in found.items()]
    canvas = drawing.canvas(HEIGHT, _range(found), (0.0, 2.5))
    canvas.axes(_sizes(found), drawing.ticks(0.0, 2.5), "state", "memory of all snapshots, in sizes of the state")
    _line(canvas, points, WAYS["overlapped"][1])
    return _svg(canvas)


def _line(canvas: drawing.Canvas, points: Sequence[tuple[float, float]], color: str) -> None:
    told = " ".join(f"{canvas.x(x):.1f},{canvas.y(y):.1f}" for x, y in points)
    canvas.add("polyline", points=told, stroke=color)
    for x, y in points:
        canvas.add("circle", cx=canvas.x(x), cy=canvas.y(y), r=3.0, fill=color)


def _range(found: dict[int, dict[str, float]]) -> tuple[float, float]:
    sizes = [math.log2(size) for size in found]
    return min(sizes) - 0.3, max(sizes) + 0.3


def _sizes(found: dict[int, dict[str, float]]) -> list[tuple[float, str]]:
    return [(math.log2(size), f"{size} MB" if size < 1024 else f"{size // 1024} GB") for size in found]


def _svg(canvas: drawing.Canvas) -> str:
    return "".join(
        f"<{one.tag} {' '.join(f'{name}={quoteattr(value)}' for name, value in one.attributes.items())}>"
        f"{escape(one.text)}</{one.tag}>"
        for one in canvas.shapes
    )
