"""The page of a run: one HTML file that needs nothing else, made from its report.

Everything that comes from outside is escaped by the templates; a link is made only to where `safe_link` allows.
"""

import json
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import yaml

from everstep.core import cadence, words
from everstep.core.summary import AttemptLine, CheckpointLine, RunReport
from everstep.core.timeline import Bucket
from everstep.report import pictures
from everstep.report.text import MEANING, NOTICED

SHOWN = 12
"""So many attempts and checkpoints are shown at once; the others stand folded away."""

WORDS = {
    "completed": "completed",
    "stopped": "stopped on request",
    "failed": "failed",
    "running": "running",
    "killed": "killed",
}


def render(report: RunReport) -> str:
    """The page as HTML."""
    template = _environment().get_template("page.html.j2")
    return str(
        template.render(
            r=report,
            w=words,
            status=WORDS.get(report.status, report.status),
            cards=list(cards(report)),
            loss=pictures.loss(report),
            evaluations=pictures.evaluations(report),
            speed=pictures.speed(report),
            time_map=pictures.time_map(report),
            checkpoints_picture=pictures.checkpoints(report),
            groups=list(_groups(report)),
            buckets=list(buckets(report)),
            attempts=tuple(reversed(report.attempts)),
            checkpoints=tuple(reversed(report.checkpoints)),
            tiers=_tiers(report.checkpoints),
            rhythm=cadence.told(report.cadence.chosen.inputs) if report.cadence and report.cadence.chosen else (),
            aside=[one for one in report.checkpoints if _is_aside(one)],
            go_on=list(go_on(report)),
            job=yaml.safe_dump(report.job, sort_keys=False, allow_unicode=True) if report.job else "",
            unit=unit(report),
            shown=SHOWN,
            mlflow_link=safe_link(report.places.get("MLflow", "")),
            why=_why,
        )
    )


def cards(report: RunReport) -> Iterator[tuple[str, str, str]]:
    """The few figures that are asked for first: name, value, remark."""
    of = f"of {report.steps:,}" if report.steps else ""
    yield "Steps", f"{report.step:,}", of
    for name, value in list(report.metrics.items())[:2]:
        yield name[:40], words.figure(value), "newest evaluation"
    if not report.metrics and report.last_loss is not None:
        yield "Loss", words.figure(report.last_loss), "last step"
    yield "Lasted", words.duration(report.time.wall), f"since {words.moment(report.began)}" if report.began else ""
    yield "Trained", words.share(report.time.ettr, 1.0), "of the time (ETTR)"
    cost = sum(one.cost_seconds for one in report.attempts)
    yield "Restarts", f"{report.restarts:,}", f"cost {words.duration(cost)}" if report.restarts else ""
    total = report.cost.total
    yield (
        unit(report),
        words.hours(report.cost.hours),
        "no price in the job" if total is None else words.money(total, report.cost.currency),
    )


def unit(report: RunReport) -> str:
    return "GPU-hours" if report.cost.gpus else "Rank-hours"


def go_on(report: RunReport) -> Iterator[tuple[str, str]]:
    """What one may want to do next, and the command for it."""
    where = report.places.get("run directory", "")
    if report.status != "completed":
        yield "Go on with the run: run the same command, or the same flow, again", "python -m flows.train <job file>"
    if checkpoint := report.places.get("checkpoint"):
        code = f"from everstep import load_checkpoint; tensors = load_checkpoint({json.dumps(checkpoint)})"
        yield "Load the newest durable checkpoint", f"python -c {shlex.quote(code)}"
    if report.places.get("MLflow database"):
        store = f"sqlite:///{report.places['MLflow database']}"
        yield "Browse the run in MLflow", f"mlflow ui --backend-store-uri {shlex.quote(store)}"
    if where:
        yield "Make this page again", f"python -m everstep.host.reporting {shlex.quote(where)}"


def safe_link(target: str) -> str:
    """The target if it is an http(s) address or a file beside the page; else nothing, and there is no link."""
    try:
        parts = urlsplit(target)
    except ValueError:
        return ""
    if parts.scheme in ("http", "https") and parts.netloc:
        return target
    beside = not parts.scheme and not parts.netloc and target and not target.startswith(("/", "\\", ".."))
    return target if beside and target.isprintable() else ""


def buckets(report: RunReport) -> Iterator[tuple[str, str, float, str]]:
    """Name, group, seconds and meaning, in the order of the groups."""
    for group, members in pictures.GROUPS.items():
        for bucket in sorted(members, key=lambda one: -report.time.buckets.get(one.value, 0.0)):
            seconds = report.time.buckets.get(bucket.value, 0.0)
            if seconds >= NOTICED or bucket is Bucket.productive:
                yield bucket.value.replace("_", " "), group, seconds, MEANING[bucket]


def _groups(report: RunReport) -> Iterator[tuple[str, str, float]]:
    for group, text in pictures.GROUP_NAMES.items():
        seconds = pictures.group_seconds(report, group)
        if seconds >= NOTICED:
            yield group, text, seconds


def _tiers(checkpoints: tuple[CheckpointLine, ...]) -> list[str]:
    known = list(dict.fromkeys(tier for one in checkpoints for tier in one.tiers))
    order = ("local", "persistent", "object")
    return sorted(known, key=lambda tier: order.index(tier) if tier in order else len(order))


def _is_aside(one: CheckpointLine) -> bool:
    return bool({"quarantined", "gone"} & set(one.tiers.values()))


def _why(one: AttemptLine) -> str:
    """The cause and what followed, short; the page shows the whole cause when one points at it."""
    cause = words.first_line(one.cause, 160)
    followed = one.decision.replace("_", " ")
    return " → ".join(part for part in (cause, followed) if part)


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("everstep.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["safe_link"] = safe_link
    return made
