"""Makes a run's report from facts. Nothing in here reads a file or a clock."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import JsonValue

from everstep.core import cadence, words
from everstep.core.checkpoint import Key, State
from everstep.core.chronicle import AttemptStory, Chronicle, Held
from everstep.core.curve import Curve
from everstep.core.gate_lines import gate_lines
from everstep.core.headline import headline
from everstep.core.health import Severity
from everstep.core.ledger import Event
from everstep.core.retention import freed
from everstep.core.summary import (
    AttemptLine,
    CauseLine,
    CheckpointLine,
    Cost,
    Curves,
    Facts,
    Happened,
    Notice,
    Rhythm,
    RunReport,
    Spent,
    TimeMap,
)
from everstep.core.timeline import Account, Bucket, Stretch, account, cost_parts

Value = TypeVar("Value")

COLUMNS = 240
MOST_LISTED = 1000
MOST_NOTICES = 60
MOST_MARKS = 4000
TEXT = 2000


def summarise(facts: Facts) -> RunReport:
    """The report of a run."""
    chronicle, final = facts.chronicle, facts.final
    line = chronicle.line()
    spent = _account(line, final)
    cost = _cost(facts, spent, chronicle.attempts)
    attempts = _attempts(facts, line, cost)
    marks = _marks(chronicle.events)
    checkpoints = _checkpoints(chronicle, marks, final)
    notices = [_notice(one) for one in chronicle.events if _is_notable(one)]
    report = RunReport(
        made=facts.made,
        name=chronicle.record.name if chronicle.record else "",
        run=chronicle.record.run if chronicle.record else str(final.get("run", "")),
        status=str(facts.status or final.get("status") or chronicle.status),
        headline=(),
        step=_step(chronicle, final),
        steps=_whole(facts.job.get("steps")) if facts.job else None,
        began=line[0].begin if line else None,
        last_sign=chronicle.last_sign or None,
        metrics={name: _told(value) for name, value in _best_first(chronicle.last_metrics, facts.job)},
        last_loss=None if facts.curves.last_loss is None else _told(facts.curves.last_loss),
        samples_per_second=chronicle.samples_per_second,
        loss=facts.curves.loss,
        speed=_shifted(facts.curves, line[0].begin if line else 0.0),
        evaluations=dict(_best_first(facts.curves.evaluations, facts.job)),
        time=Spent(wall=spent.wall, ettr=spent.ettr, buckets={one.value: s for one, s in spent.buckets.items()}),
        time_map=time_map(line),
        attempts=attempts[-MOST_LISTED:],
        attempts_in_all=len(attempts),
        restarts=chronicle.restarts,
        causes=_causes(attempts),
        checkpoints=checkpoints[-MOST_LISTED:],
        checkpoints_in_all=len(checkpoints),
        checkpoint_counts=_counts(marks, checkpoints),
        checkpoint_marks=_thinned(marks),
        cadence=_rhythm(chronicle.events, facts.job),
        freed=freed(chronicle.events),
        gates=gate_lines(chronicle.events, facts.links),
        promotion=_promotion(final),
        promotion_events=tuple(_notice(one) for one in chronicle.events if one.kind.startswith("promotion."))[-20:],
        cost=cost,
        notices=tuple(notices[-MOST_NOTICES:]),
        notices_in_all=len(notices),
        identity=_identity(chronicle),
        environment=_environment(facts),
        job=dict(facts.job) if facts.job else None,
        places={name: where for name, where in facts.places.items() if where},
    )
    return report.model_copy(update={"headline": tuple(headline(report))})


def time_map(line: Sequence[Stretch], columns: int = COLUMNS) -> TimeMap:
    """The time line cut into equal columns: however many pieces it has, none is lost, only added up."""
    wall = line[-1].end - line[0].begin if line else 0.0
    if wall <= 0:
        return TimeMap()
    begin, width = line[0].begin, wall / columns
    parts: list[dict[str, float]] = [{} for _ in range(columns)]
    for piece in line:
        first = min(columns - 1, int((piece.begin - begin) / width))
        last = min(columns - 1, int((piece.end - begin) / width))
        for index in range(first, last + 1):
            left, right = begin + index * width, begin + (index + 1) * width
            seconds = min(piece.end, right) - max(piece.begin, left)
            if seconds > 0:
                name = piece.bucket.value
                parts[index][name] = parts[index].get(name, 0.0) + seconds / width
    return TimeMap(begin=begin, seconds=width, columns=tuple(parts))


def _account(line: Sequence[Stretch], final: Mapping[str, Any]) -> Account:
    """That of the JSON line where there is one, so that both say the same."""
    told = final.get("buckets")
    if not isinstance(told, Mapping):
        return account(line)
    buckets = {bucket: float(told.get(bucket.value, 0.0)) for bucket in Bucket}
    return Account(wall=sum(buckets.values()), buckets=buckets)


def _cost(facts: Facts, spent: Account, attempts: Iterable[AttemptStory]) -> Cost:
    ranks = facts.structure.world_size if facts.structure else _whole((facts.job or {}).get("ranks")) or 1
    charged = max(0.0, spent.wall - spent.buckets[Bucket.queued] - spent.buckets[Bucket.idle])
    hours = charged * ranks / 3600
    restarts = sum(one.cost for one in attempts if one.outcome in ("failed", "lost")) * ranks / 3600
    price = facts.price.per_gpu_hour if facts.price else None
    return Cost(
        ranks=ranks,
        gpus=facts.gpus,
        charged_seconds=charged,
        hours=hours,
        restart_hours=restarts,
        per_hour=price,
        currency=facts.price.currency if facts.price else "",
        total=None if price is None else hours * price,
        restarts=None if price is None else restarts * price,
    )


def _attempts(facts: Facts, line: Sequence[Stretch], cost: Cost) -> tuple[AttemptLine, ...]:
    parts = cost_parts(line)
    stories = facts.chronicle.attempts
    if facts.status == "killed" and stories and stories[-1].outcome == "running":
        stories = (*stories[:-1], replace(stories[-1], outcome="lost", cause="its flow vanished"))
    lines = []
    for index, one in enumerate(stories):
        spent = parts.get(one.attempt, {}) if one.outcome in ("failed", "lost") else {}
        seconds = sum(spent.values())
        following = stories[index + 1].resumed_from if index + 1 < len(stories) else None
        lost = max(0, one.step - following) if one.step is not None and following is not None else 0
        lines.append(
            AttemptLine(
                attempt=one.attempt,
                began=one.began,
                host=one.host,
                resumed_from=one.resumed_from,
                step=one.step,
                outcome=one.outcome,
                cause=one.cause[:TEXT],
                decision=one.decision,
                detect_seconds=spent.get(Bucket.detect, 0.0),
                lost_work_seconds=spent.get(Bucket.lost_work, 0.0),
                cost_seconds=seconds,
                lost_steps=lost,
                money=None if cost.per_hour is None else seconds * cost.ranks / 3600 * cost.per_hour,
            )
        )
    return tuple(lines)


def _causes(attempts: Iterable[AttemptLine]) -> tuple[CauseLine, ...]:
    """Failures by the first line of their cause; numbers in it do not make another cause."""
    told: dict[str, list[AttemptLine]] = {}
    for one in attempts:
        if one.outcome in ("failed", "lost"):
            cause = words.first_line(one.cause, 200) or "no cause is known"
            told.setdefault(re.sub(r"\d+", "#", cause), []).append(one)
    lines = [
        CauseLine(
            text=same.pop()
            if len(same := {words.first_line(one.cause, 200) for one in group}) == 1 and any(same)
            else text,
            times=len(group),
            cost_seconds=sum(one.cost_seconds for one in group),
        )
        for text, group in told.items()
    ]
    return tuple(sorted(lines, key=lambda one: -one.times)[:20])


def _shifted(curves: Curves, began: float) -> Curve:
    """The rate by seconds since the run began, not since its first step."""
    if curves.began is None or not began:
        return curves.speed
    away = curves.began - began
    points = tuple(point._replace(x=point.x + away) for point in curves.speed.points)
    return curves.speed.model_copy(update={"points": points})


_WHAT = ("saved", "verified", "durable", "quarantined", "removed")
_PROMOTED = ("candidate", "registered", "production", "released", "promoted")


def _marks(events: Iterable[Event]) -> list[tuple[Happened, str]]:
    """What happened to checkpoints, each with the folder's name."""
    found = []
    for event in events:
        room, _, what = event.kind.partition(".")
        named = str(event.data.get("checkpoint") or "").rstrip("/").rpartition("/")[2]
        key = Key.parse(named)
        known = what in (_PROMOTED if room == "promotion" else _WHAT if room == "checkpoint" else ())
        if key is None or not known:
            continue
        word = "promoted" if room == "promotion" else what
        tier = str(event.data.get("tier") or "")
        found.append((Happened(time=event.time, step=key.step, what=word, tier=tier), named))
    return found


def _best_first(by_name: Mapping[str, Value], job: Mapping[str, Any] | None) -> list[tuple[str, Value]]:
    """By name, but first the metric by which the job calls a checkpoint the best."""
    best = (((job or {}).get("checkpoint") or {}).get("best") or {}).get("metric")
    return sorted(by_name.items(), key=lambda one: (one[0] != best, one[0]))


def _checkpoints(
    chronicle: Chronicle, marks: Iterable[tuple[Happened, str]], final: Mapping[str, Any]
) -> tuple[CheckpointLine, ...]:
    by_folder: dict[Key, list[Held]] = {}
    for one in chronicle.checkpoints:
        by_folder.setdefault(one.key, []).append(one)
    saved: dict[str, float] = {}
    promoted, elsewhere = _promoted(final), dict[str, dict[str, str]]()
    known = {one.tier for one in chronicle.checkpoints}
    for mark, folder in marks:
        saved[folder] = min(mark.time, saved.get(folder, math.inf))
        if mark.what == "promoted":
            promoted.add(folder)
        elif mark.tier and mark.tier not in known:  # a tier that is not a folder of this machine
            states = elsewhere.setdefault(folder, {})
            if mark.what == "removed":
                states.pop(mark.tier, None)
            elif states.get(mark.tier) != "quarantined":
                states[mark.tier] = "verified" if states.get(mark.tier) == "durable" == mark.what else mark.what
    return tuple(
        CheckpointLine(
            folder=key.folder,
            step=key.step,
            attempt=key.attempt,
            bytes=max(one.bytes for one in copies),
            saved=saved.get(key.folder),
            tiers={one.tier: _state(one) for one in copies} | elsewhere.get(key.folder, {}),
            promoted=key.folder in promoted,
            abandoned=copies[0].abandoned,
            reason=next((one.reason[:TEXT] for one in copies if one.reason), ""),
        )
        for key, copies in sorted(by_folder.items())
    )


def _rhythm(events: Sequence[Event], job: Mapping[str, Any] | None) -> Rhythm | None:
    """What the job says, or what the run chose by itself; None where neither is known."""
    policy = (job or {}).get("checkpoint")
    steps, minutes = (policy.get("every_steps"), policy.get("every_minutes")) if isinstance(policy, Mapping) else (0, 0)
    if steps := _whole(steps):
        return Rhythm(text=f"A save after every {words.count(steps, 'step')}, as the job says.")
    if isinstance(minutes, int | float) and minutes:
        return Rhythm(text=f"A save every {words.duration(60 * minutes)}, as the job says.")
    chosen = cadence.newest(events)
    if chosen is None:
        return None
    text = cadence.sentence(chosen)
    choices = sum(1 for event in events if event.kind == "cadence.chosen")
    return Rhythm(text=f"{text[0].upper()}{text[1:]}.", chosen=chosen, choices=choices)


def _promoted(final: Mapping[str, Any]) -> set[str]:
    told = _promotion(final)
    return {str(told.get("checkpoint"))} if told.get("status") in ("candidate", "production") else set()


def _state(held: Held) -> str:
    if held.gone:
        return "gone"
    return "torn" if held.torn else held.state.value


def _counts(marks: Sequence[tuple[Happened, str]], standing: Iterable[CheckpointLine]) -> dict[str, int]:
    counts = {what: len({folder for mark, folder in marks if mark.what == what}) for what in (*_WHAT, "promoted")}
    lines = list(standing)
    stood = (
        "saved",
        "verified",
        "durable",
        "quarantined",
    )  # who watches may see a checkpoint only when it has moved on
    counts["saved"] = len({folder for mark, folder in marks if mark.what in stood})
    counts["promoted"] = len({one.folder for one in lines if one.promoted}) or counts["promoted"]
    counts["standing"] = sum(1 for one in lines if set(one.tiers.values()) - {"gone", "torn"})
    aside = {one.folder for one in lines if {"quarantined", "gone"} & set(one.tiers.values())}
    return counts | {"quarantined": len(aside)}


def _thinned(marks: Sequence[tuple[Happened, str]]) -> tuple[Happened, ...]:
    """Of very many marks every n-th; those of bad and promoted checkpoints all, as far as that goes."""
    rare = [mark for mark, _ in marks if mark.what in (State.quarantined, "promoted")][-MOST_MARKS // 2 :]
    plain = [mark for mark, _ in marks if mark.what not in (State.quarantined, "promoted")]
    stride = -(-len(plain) // (MOST_MARKS // 2)) if plain else 1
    return tuple(sorted([*rare, *plain[::stride]], key=lambda mark: mark.time))


def _promotion(final: Mapping[str, Any]) -> dict[str, JsonValue]:
    told = final.get("promotion")
    if told is None:
        return {}
    return {str(key): value for key, value in told.items()} if isinstance(told, Mapping) else {"result": str(told)}


def _is_notable(event: Event) -> bool:
    known = event.kind.startswith(("attempt.", "gate.", "promotion.")) or event.kind == "decision.made"
    return event.severity.rank < Severity.low.rank and not known


def _notice(event: Event) -> Notice:
    return Notice(time=event.time, severity=event.severity.value, kind=event.kind, text=event.text[:TEXT])


def _identity(chronicle: Chronicle) -> dict[str, str]:
    record = chronicle.record
    if record is None:
        return {}
    return {
        "program": record.program,
        "fingerprint": record.fingerprint,
        "data set": record.dataset_fingerprint,
        "code version": record.code_version,
        "seed": str(record.seed),
        "created": words.moment(record.created),
    }


def _environment(facts: Facts) -> dict[str, str]:
    structure = facts.structure
    hosts = sorted({claim.host for claim in facts.chronicle.claims.values()})
    known = {"hosts": ", ".join(hosts[:20]) + (f" and {len(hosts) - 20} more" if len(hosts) > 20 else "")}
    if structure:
        known |= {
            "ranks": str(structure.world_size),
            "threads of a rank": str(structure.threads),
            "processor": structure.processor,
            "torch": structure.torch_version,
            "batch size": str(structure.batch_size),
        }
    return {name: text for name, text in (known | dict(facts.environment)).items() if text}


def _step(chronicle: Chronicle, final: Mapping[str, Any]) -> int:
    reached = final.get("step")
    return _whole(reached) if reached is not None else (chronicle.newest.step if chronicle.newest else 0)


def _told(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def _whole(value: object) -> int:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0
