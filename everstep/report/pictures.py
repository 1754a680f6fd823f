"""The pictures of a run's page, each from its record."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from everstep.core import words
from everstep.core.curve import Curve
from everstep.core.summary import AttemptLine, Happened, RunReport
from everstep.core.timeline import Bucket
from everstep.report.drawing import (
    LEFT,
    TOP,
    Canvas,
    Picture,
    canvas,
    log_ticks,
    thinned,
    ticks,
    time_ticks,
)

LOG_FROM = 30.0
"""A curve whose greatest value is so many times its least one is drawn on a logarithmic axis."""
LABELLED = 12
"""Up to so many restarts are drawn as lines with numbers; of more only short strokes."""

GROUPS = {
    "trained": (Bucket.productive,),
    "around": (
        Bucket.stage,
        Bucket.startup,
        Bucket.restore,
        Bucket.eval,
        Bucket.save_stall,
        Bucket.gate,
        Bucket.finalize,
        Bucket.stop,
    ),
    "lost": (Bucket.detect, Bucket.recover, Bucket.lost_work),
    "waited": (Bucket.queued, Bucket.idle),
}
GROUP_NAMES = {
    "trained": "training that counts",
    "around": "what training needs around it",
    "lost": "lost to failures",
    "waited": "waiting, nothing held",
}
GROUP_OF = {bucket.value: group for group, buckets in GROUPS.items() for bucket in buckets}


def loss(report: RunReport) -> Picture | None:
    """Loss by step: the mean as a line, least to greatest as a band, restarts as uprights."""
    curve = report.loss
    if not curve.points and not curve.odd:
        return None
    drawn = _curve(curve, 300, "step", "loss")
    _restarts(drawn, [(one.resumed_from, one) for one in _restarted(report.attempts)])
    for step in thinned(curve.odd, drawn.x, 3):
        at = drawn.x(step)
        drawn.add(
            "path",
            title=f"not a number at step {step:,.0f}",
            d=f"M{at - 4:.1f} {TOP}l8 8m0 -8l-8 8",
            class_="bad",
        )
    return Picture("loss", "Loss", _loss_in_words(report), drawn.height, tuple(drawn.shapes))


def evaluations(report: RunReport) -> list[Picture]:
    """What evaluate() gave, by step; a picture for each name that has two values or more."""
    pictures: list[Picture] = []
    for name, curve in list(report.evaluations.items())[:4]:
        if len(curve.points) < 2:
            continue
        drawn = _curve(curve, 220, "step", name[:60], dots=len(curve.points) <= 40)
        first, last = curve.points[0].mean, curve.points[-1].mean
        alt = f"{name} by step, from {words.figure(first)} to {words.figure(last)}"
        pictures.append(Picture(f"eval-{len(pictures)}", name, alt, drawn.height, tuple(drawn.shapes)))
    return pictures


def speed(report: RunReport) -> Picture | None:
    """Samples a second by time."""
    points = report.speed.points
    if len(points) < 2 or report.began is None:
        return None
    span = max(report.time.wall, points[-1].x)
    most = max(point.mean for point in points) or 1.0
    drawn = canvas(220, (0.0, span), (0.0, most * 1.05))
    x_ticks, unit = time_ticks(span)
    drawn.axes(x_ticks, ticks(0.0, most * 1.05, 4), f"{unit} since the beginning", "samples a second")
    gap = 4 * max((points[-1].x - points[0].x) / len(points), 1e-9)
    piece = [points[0]]
    for point in points[1:]:
        if point.x - piece[-1].x > gap:
            drawn.polyline([(one.x, one.mean) for one in piece], "line")
            piece = []
        piece.append(point)
    drawn.polyline([(one.x, one.mean) for one in piece], "line")
    _restarts(drawn, [(one.began - report.began, one) for one in _restarted(report.attempts)])
    mean = report.samples_per_second
    alt = f"Samples a second over {words.duration(span)}, at most {words.short(most)}"
    alt += f"; {words.short(mean)} on average while training" if mean else ""
    return Picture("speed", "Throughput", alt, drawn.height, tuple(drawn.shapes))


def time_map(report: RunReport) -> Picture | None:
    """The run's time from its beginning to its end, in columns: what part of each went where."""
    told = report.time_map
    if not told.columns:
        return None
    span = told.seconds * len(told.columns)
    drawn = canvas(205, (0.0, span), (0.0, 1.0))
    x_ticks, unit = time_ticks(span)
    drawn.axes(
        x_ticks, [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")], f"{unit} since the beginning", "share of the time"
    )
    floors = [0.0] * len(told.columns)
    for group in GROUPS:
        path = []
        for index, column in enumerate(told.columns):
            part = sum(share for bucket, share in column.items() if GROUP_OF.get(bucket) == group)
            if part > 0:
                left, right = drawn.x(index * told.seconds), drawn.x((index + 1) * told.seconds)
                top, foot = drawn.y(floors[index] + part), drawn.y(floors[index])
                path.append(f"M{left:.2f} {foot:.2f}V{top:.2f}H{right + 0.15:.2f}V{foot:.2f}z")
                floors[index] += part
        if path:
            drawn.add("path", d="".join(path), class_=f"fill-{group}", title=GROUP_NAMES[group])
    parts = [(name, group_seconds(report, group)) for group, name in GROUP_NAMES.items()]
    alt = "; ".join(f"{name}: {words.share(seconds, report.time.wall)}" for name, seconds in parts if seconds > 0)
    return Picture("time", "Time line", alt, drawn.height, tuple(drawn.shapes))


def group_seconds(report: RunReport, group: str) -> float:
    return sum(report.time.buckets.get(bucket.value, 0.0) for bucket in GROUPS[group])


def checkpoints(report: RunReport) -> Picture | None:
    """Steps over time: each attempt's way, and every checkpoint on it by what became of it."""
    if not report.checkpoint_marks or report.began is None:
        return None
    began = report.began
    span = max(report.time.wall, report.checkpoint_marks[-1].time - began, 1e-3)
    top = max([mark.step for mark in report.checkpoint_marks] + [report.step, report.steps or 0, 1])
    drawn = canvas(280, (0.0, span), (0.0, top * 1.03))
    x_ticks, unit = time_ticks(span)
    drawn.axes(x_ticks, ticks(0.0, top * 1.03, 5), f"{unit} since the beginning", "step")
    _ways(drawn, report, began)
    for what in ("saved", "verified", "durable", "quarantined", "promoted"):
        seen: set[tuple[int, int]] = set()
        for mark in report.checkpoint_marks:
            x, y = drawn.x(mark.time - began), drawn.y(mark.step)
            if mark.what == what and (round(x), round(y)) not in seen:
                seen.add((round(x), round(y)))
                _mark(drawn, mark, x, y)
    counts = report.checkpoint_counts
    alt = "Steps over time with checkpoints: " + ", ".join(
        f"{counts[what]:,} {what}" for what in ("saved", "durable", "quarantined", "promoted") if counts.get(what)
    )
    return Picture("checkpoints", "Checkpoints", alt, drawn.height, tuple(drawn.shapes))


def _ways(drawn: Canvas, report: RunReport, began: float) -> None:
    """For each attempt a line from where it began, through its checkpoints."""
    marks = sorted((mark.time, mark.step) for mark in report.checkpoint_marks if mark.what in ("saved", "durable"))
    bounds = [*(one.began for one in report.attempts[1:]), float("inf")]
    index = 0
    for attempt, until in zip(report.attempts, bounds, strict=True):
        way = [(attempt.began - began, float(attempt.resumed_from))]
        while index < len(marks) and marks[index][0] < until:
            if marks[index][1] >= way[-1][1]:
                way.append((marks[index][0] - began, float(marks[index][1])))
            index += 1
        if len(way) > 1:
            drawn.polyline(way, "way")
    _restarts(drawn, [(one.began - began, one) for one in _restarted(report.attempts)])


def _mark(drawn: Canvas, mark: Happened, x: float, y: float) -> None:
    where = f" on the {mark.tier} tier" if mark.tier else ""
    title = f"step {mark.step:,}: {mark.what}{where}, {words.moment(mark.time)}"
    if mark.what == "quarantined":
        drawn.add("path", title=title, d=f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", class_="bad")
    elif mark.what == "promoted":
        drawn.add("path", title=title, d=f"M{x:.1f} {y - 8:.1f}l7 8l-7 8l-7 -8z", class_="promoted")
    elif mark.what == "durable":
        drawn.add("circle", title=title, cx=x, cy=y, r=3.2, class_="durable")
    elif mark.what == "saved":
        drawn.add("circle", title=title, cx=x, cy=y, r=3.2, class_="saved")


def _curve(curve: Curve, height: float, x_name: str, y_name: str, *, dots: bool = False) -> Canvas:
    points = curve.points
    xs = [point.x for point in points] + list(curve.odd)
    lows, highs = [point.low for point in points] or [0.0], [point.high for point in points] or [1.0]
    low, high = min(lows), max(highs)
    log = low > 0 and high / low >= LOG_FROM
    if log:
        low, high = low / 1.05, high * 1.05
    elif high > low:
        low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
    else:
        low, high = low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
    first, last = min(xs), max(xs)
    drawn = canvas(height, (first, last if last > first else first + 1), (low, high), log=log)
    y_ticks = log_ticks(low, high) if log else ticks(low, high, 5)
    drawn.axes(ticks(first, last, 8), y_ticks, x_name, f"{y_name} (logarithmic)" if log else y_name)
    if any(point.high > point.low for point in points):
        told = [(point.x, point.high) for point in points] + [(point.x, point.low) for point in reversed(points)]
        drawn.add("polygon", points=" ".join(f"{drawn.x(x):.2f},{drawn.y(y):.2f}" for x, y in told), class_="band")
    if len(points) > 1:
        drawn.polyline([(point.x, point.mean) for point in points], "line")
    for point in points if dots or len(points) == 1 else ():
        title = f"step {point.x:,.0f}: {words.figure(point.mean)}"
        drawn.add("circle", title=title, cx=drawn.x(point.x), cy=drawn.y(point.mean), r=3.2, class_="durable")
    return drawn


def _restarted(attempts: Sequence[AttemptLine]) -> list[AttemptLine]:
    """Attempts that were begun after one that had failed."""
    return [now for before, now in pairwise(attempts) if before.outcome in ("failed", "lost")]


def _restarts(drawn: Canvas, places: Iterable[tuple[float, AttemptLine]]) -> None:
    told = list(places)
    if len(told) <= LABELLED:
        free = -1e9
        for x, one in sorted(told, key=lambda pair: pair[0]):
            label = str(one.attempt) if drawn.x(x) - free >= 20 else ""
            free = drawn.x(x) if label else free
            drawn.upright(x, "restart", f"restart: attempt {one.attempt} from step {one.resumed_from:,}", label)
        return
    for x in thinned((x for x, _ in told), drawn.x, 1.0):
        at = drawn.x(x)
        drawn.add("line", x1=at, x2=at, y1=TOP - 8, y2=TOP + 4, class_="restart-tick")
    drawn.text(
        (LEFT + drawn.x.end) / 2, TOP - 12, f"each stroke: one of {len(told):,} restarts", "middle", "restart-label"
    )


def _loss_in_words(report: RunReport) -> str:
    points = report.loss.points
    if not points:
        return f"The loss was never a finite number, in {report.loss.odd_rows:,} steps"
    text = f"Loss by step, from {words.figure(points[0].mean)} at step {points[0].x:,.0f}"
    text += f" to {words.figure(points[-1].mean)} at step {points[-1].x:,.0f}; "
    text += f"least {words.figure(min(point.low for point in points))}"
    text += f", greatest {words.figure(max(point.high for point in points))}"
    if report.loss.odd_rows:
        text += f"; not a finite number in {words.count(report.loss.odd_rows, 'step')}, first at step {report.loss.odd[0]:,.0f}"
    return text
