"""The plain text report of a run: one page that tells an engineer on call how it stands and where its time went."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from everstep.core import cadence
from everstep.core.cadence import Cadence
from everstep.core.checkpoint import State
from everstep.core.chronicle import AttemptStory, Chronicle, Held
from everstep.core.retention import Freed, freed
from everstep.core.timeline import Account, Bucket
from everstep.core.words import duration, first_line, size

WIDTH = 100
BAR = 28
NOTICED = 0.05
"""Seconds below this would show as 0.0 and are left out."""
NEWEST = 12
"""So many attempts and checkpoints are listed, the newest ones; the rest are counted."""

MEANING = {
    Bucket.queued: "asked for, not begun",
    Bucket.stage: "bringing the data near",
    Bucket.startup: "starting processes, first compile",
    Bucket.restore: "loading a checkpoint",
    Bucket.productive: "training that counts",
    Bucket.eval: "evaluating",
    Bucket.save_stall: "training held up by a save",
    Bucket.gate: "waiting for a look at the data, or for the next lease",
    Bucket.detect: "dead, not yet noticed",
    Bucket.recover: "noticed, not yet training again",
    Bucket.lost_work: "training that was thrown away",
    Bucket.stop: "saving and leaving on request",
    Bucket.finalize: "last copies and proofs",
    Bucket.idle: "between two flow runs",
}


def render(chronicle: Chronicle, final: Mapping[str, Any] | None = None) -> str:
    """The page. `final` is the JSON line, where there is one: its numbers are used, so that both say the same."""
    final = final or {}
    account = _account(chronicle, final)
    sections = [
        _head(chronicle, final, account),
        _time(account),
        _attempts(chronicle.attempts),
        _checkpoints(chronicle.checkpoints, freed(chronicle.events)),
        _rhythm(cadence.newest(chronicle.events)),
        _set_aside(chronicle.checkpoints),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _account(chronicle: Chronicle, final: Mapping[str, Any]) -> Account:
    told = final.get("buckets")
    if not isinstance(told, Mapping):
        return chronicle.account()
    buckets = {bucket: float(told.get(bucket.value, 0.0)) for bucket in Bucket}
    return Account(wall=sum(buckets.values()), buckets=buckets)


def _head(chronicle: Chronicle, final: Mapping[str, Any], account: Account) -> list[str]:
    record = chronicle.record
    name = f"{record.name} / {record.run}" if record else str(final.get("run", "unknown run"))
    lines = [f"Everstep run {name}", "=" * min(WIDTH, len(name) + 13)]
    return lines + [f"{word:<12} {value}" for word, value in _facts(chronicle, final, account) if value]


def _facts(chronicle: Chronicle, final: Mapping[str, Any], account: Account) -> Iterator[tuple[str, str]]:
    status = str(final.get("status") or chronicle.status)
    reached = final.get("step")
    reached = reached if reached is not None else (chronicle.newest.step if chronicle.newest else 0)
    yield "status", f"{status} at step {reached}{_ended_because(chronicle, status)}"
    if chronicle.record:
        began = chronicle.cuts[0].time if chronicle.cuts else chronicle.record.created
        yield "program", chronicle.record.program
        yield "began", f"{datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M:%S} UTC"
    yield "lasted", duration(account.wall) if account.wall else ""
    restarts = chronicle.restarts
    cost = sum(one.cost for one in chronicle.attempts)
    some = f"{restarts}, which cost {duration(cost)}" if restarts else "none"
    yield "restarts", some if chronicle.attempts else ""
    rate = chronicle.samples_per_second
    yield "speed", f"{rate:,.1f} samples/s while training" if rate else ""
    yield "evaluation", ", ".join(f"{key} {value:.4g}" for key, value in sorted(chronicle.last_metrics.items()))
    yield "checkpoint", str(final.get("checkpoint") or "")
    yield "weights", str(final.get("weights") or "")
    yield "MLflow run", str(final.get("mlflow_run") or "")
    yield "directory", str(final.get("run_dir") or "")


def _ended_because(chronicle: Chronicle, status: str) -> str:
    last = chronicle.attempts[-1] if chronicle.attempts else None
    return f": {_line(last.cause)}" if last and last.cause and status in ("failed", "stopped") else ""


def _time(account: Account) -> list[str]:
    if not account.wall:
        return []
    most = max(account.buckets.values())
    lines = _title("Where the time went")
    for bucket, seconds in account.buckets.items():
        if seconds >= NOTICED:
            bar = "#" * max(1, round(BAR * seconds / most))
            share = 100 * seconds / account.wall
            lines.append(
                f"  {bucket.value:<11}{seconds:>12,.1f} s {share:>5.1f} %  {bar:<{BAR}}  {MEANING[bucket]}".rstrip()
            )
    lines.append(f"  {'wall':<11}{account.wall:>12,.1f} s 100.0 %")
    productive, queued = account.buckets[Bucket.productive], account.buckets[Bucket.queued]
    formula = f"{productive:,.1f} / ({account.wall:,.1f} - {queued:,.1f})"
    return lines + ["", f"  ETTR = productive / (wall - queued) = {formula} = {account.ettr:.4f}"]


def _attempts(stories: Sequence[AttemptStory]) -> list[str]:
    if not stories:
        return []
    shown = stories[-NEWEST:]
    lines = _title("Attempts", len(stories) - len(shown))
    rows = [("no", "from step", "to step", "ended", "cost", "why, and what followed")]
    for one in shown:
        reached = "" if one.step is None else str(one.step)
        why = " -> ".join(part for part in (_line(one.cause), one.decision.replace("_", " ")) if part)
        cost = f"{one.cost:.1f} s" if one.cost >= NOTICED else "-"
        rows.append((str(one.attempt), str(one.resumed_from), reached, one.outcome, cost, why))
    lines += _table(rows)
    total = sum(one.cost for one in stories)
    if total >= NOTICED:
        lines += ["", f"  Cost = work thrown away, then the time until training went on; {duration(total)} in all."]
    return lines


def _checkpoints(held: Iterable[Held], gone: Mapping[str, Freed]) -> list[str]:
    by_folder: dict[str, list[Held]] = {}
    for one in held:
        if not one.gone:
            by_folder.setdefault(one.key.folder, []).append(one)
    if not by_folder:
        return []
    shown = list(by_folder.items())[-NEWEST:]
    tiers = list(dict.fromkeys(one.tier for copies in by_folder.values() for one in copies))
    rows = [("checkpoint", *tiers, "size", "")]
    for folder, copies in shown:
        words = {one.tier: "not committed" if one.torn else one.state.value for one in copies}
        remark = "left behind by a later attempt" if copies[0].abandoned else ""
        rows.append((folder, *(words.get(tier, "-") for tier in tiers), size(max(one.bytes for one in copies)), remark))
    lines = _title("Checkpoints", len(by_folder) - len(shown)) + _table(rows)
    said = [f"{one.checkpoints:,} on the {tier} tier ({size(one.bytes) or '0 B'})" for tier, one in gone.items()]
    return lines + (["", f"  Removed by retention: {', '.join(said)}."] if said else [])


def _rhythm(chosen: Cadence | None) -> list[str]:
    if chosen is None:
        return []
    text = cadence.sentence(chosen)
    said = textwrap.wrap(f"{text[0].upper()}{text[1:]}.", WIDTH, initial_indent="  ", subsequent_indent="  ")
    return [*_title("How often it saves"), *said, *_table(cadence.told(chosen.inputs))]


def _set_aside(held: Iterable[Held]) -> list[str]:
    bad = [one for one in held if one.state is State.quarantined]
    if not bad:
        return []
    lines = _title("Set aside, never to be chosen")
    for one in bad:
        gone = " (the files are gone)" if one.gone else ""
        lines.append(f"  {one.key.folder} on {one.tier}{gone}: {_line(one.reason) or 'no reason was noted'}")
    return lines


def _line(text: str) -> str:
    """A cause may be a program's own words, over many lines; the log has them all."""
    return first_line(text, WIDTH)


def _title(text: str, older: int = 0) -> list[str]:
    more = f" (the newest; {older} older ones are not listed)" if older > 0 else ""
    return [text + more, "-" * len(text)]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    return lines
