"""The report as markdown, for Prefect's artifacts: the headline, where the time went, restarts, checkpoints, what next.

Whatever comes from outside is written as character references: it can begin no table cell, link, heading or HTML.
"""

import re
from collections.abc import Iterable, Sequence

from everstep.core import words
from everstep.core.summary import RunReport
from everstep.report import page

NEWEST = 12
_PLAIN = re.compile(r"[^\w ,.\-/=+%()']", re.ASCII)


def render(report: RunReport) -> str:
    """The markdown."""
    parts = [
        f"# {text(report.name)} {text(report.run)}: {text(report.status)}",
        "\n\n".join(text(sentence) for sentence in report.headline),
        _table(("", "", ""), [(text(a), f"**{text(b)}**", text(c)) for a, b, c in page.cards(report)]),
        *_time(report),
        *_attempts(report),
        *_checkpoints(report),
        "## How to go on",
        "\n\n".join(f"{text(what)}:\n\n{_code(command)}" for what, command in page.go_on(report)),
    ]
    link = page.safe_link(report.places.get("MLflow", ""))
    if link.startswith("http"):
        parts.append("[MLflow](<" + re.sub(r"[<>\\s|]", "", link) + ">)")
    return "\n\n".join(part for part in parts if part) + "\n"


def text(value: object) -> str:
    """Text that is nothing but text, on one line."""
    line = " ".join(str(value).split())
    line = _PLAIN.sub(lambda match: match[0] if ord(match[0]) > 127 else f"&#{ord(match[0])};", line)
    line = re.sub(r"(?i)www\.", lambda match: match[0][:3] + "&#46;", line)
    return line.replace("_", "&#95;")


def _time(report: RunReport) -> Iterable[str]:
    if report.time.wall <= 0:
        return
    rows = [
        (text(name), words.duration(seconds), words.share(seconds, report.time.wall), text(meaning))
        for name, _, seconds, meaning in page.buckets(report)
    ]
    rows.append(("**wall**", words.duration(report.time.wall), "100 %", ""))
    yield "## Where each second went"
    yield _table(("bucket", "time", "share", "meaning"), rows)


def _attempts(report: RunReport) -> Iterable[str]:
    if not report.restarts:
        return
    shown = [one for one in report.attempts if one.outcome in ("failed", "lost")][-NEWEST:]
    yield f"## Restarts: {report.restarts:,}"
    rows = [
        (
            str(one.attempt),
            f"{one.resumed_from:,}",
            "" if one.step is None else f"{one.step:,}",
            text(words.first_line(one.cause, 160)),
            words.duration(one.detect_seconds),
            words.duration(one.cost_seconds),
        )
        for one in shown
    ]
    yield _table(("attempt", "from step", "to step", "cause", "noticed in", "cost"), rows)


def _checkpoints(report: RunReport) -> Iterable[str]:
    shown = report.checkpoints[-NEWEST:]
    if not shown:
        return
    yield f"## Checkpoints: {report.checkpoints_in_all:,}"
    rows = [
        (
            text(one.folder),
            words.size(one.bytes),
            text(", ".join(f"{tier}: {state}" for tier, state in one.tiers.items())),
            "promoted" if one.promoted else text(words.first_line(one.reason, 160)),
        )
        for one in shown
    ]
    yield _table(("checkpoint", "size", "states", ""), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(command: str) -> str:
    """A block whose fence is longer than any in the command; what it holds is shown as it is."""
    line = " ".join(command.split())
    fence = "`" * (max((len(run) for run in re.findall(r"`+", line)), default=2) + 1)
    fence = fence if len(fence) >= 3 else "```"
    return f"{fence}\n{line}\n{fence}"
