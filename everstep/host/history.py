"""Reads a run's directory into records. Torn lines, foreign files and missing ones cost only themselves."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from everstep.core.checkpoint import AttemptClaim, Key, RunRecord, State, abandoned
from everstep.core.chronicle import Chronicle, Held, Row, accepted, landmarks
from everstep.core.cutting import StepDone, cuts
from everstep.core.cutting import resumed as resumed_from
from everstep.core.errors import Damaged
from everstep.core.ledger import Event
from everstep.core.record import Versioned
from everstep.core.segment import Heartbeat, PhaseMark, SegmentResult
from everstep.store import checkpoint, jsonl, marks
from everstep.store.layout import RunPlaces

RECENT_BYTES = 4 * 2**20
"""How much of the end of `metrics.jsonl` a chronicle reads: a stop signal leaves two seconds for it."""

V = TypeVar("V", bound=Versioned)


def read(places: RunPlaces) -> Chronicle:
    """The run as its files tell it now. Of very long metrics only the newest part is read."""
    happened = events(places)
    phases = list(_phases(places))
    claimed = claims(places)
    resumed = resumed_from(happened) | {number: claim.resumed_from for number, claim in claimed.items()}
    rows = list(_rows(places.metrics, RECENT_BYTES))
    steps = landmarks(rows, resumed)
    counted = accepted(rows, resumed)
    line = cuts(happened, phases, steps)
    return Chronicle(
        record=_one(RunRecord, places.run_record),
        events=tuple(happened),
        claims=claimed,
        results=tuple(_all(SegmentResult, (places.persistent / "segments").glob("*/result.json"))),
        checkpoints=tuple(checkpoints(places, resumed)),
        cuts=tuple(line),
        resumed=resumed,
        newest=counted[-1] if counted else None,
        evaluated=next((row for row in reversed(counted) if row.evaluation), None),
        last_sign=_last_sign(places, happened, phases, steps),
    )


def events(places: RunPlaces, journal: str = "") -> list[Event]:
    """The run's journal, or another one of that name in its directory, in the order in which it was written."""
    found = []
    for line in jsonl.read(places.persistent / journal if journal else places.events):
        try:
            event = Event.model_validate(line)
        except ValidationError:
            continue
        if event.schema_version == Event.VERSION:
            found.append(event)
    return found


def claims(places: RunPlaces) -> dict[int, AttemptClaim]:
    """The claimed attempts by number. For reading only: what decides about a run refuses an unreadable claim."""
    found = _all(AttemptClaim, (places.persistent / "attempts").glob("*.json"))
    return {claim.attempt: claim for claim in sorted(found, key=lambda claim: claim.attempt)}


def rows(places: RunPlaces) -> list[Row]:
    """The rows of metrics that count, by step: for each step that of the last attempt that got past it."""
    resumed = {number: claim.resumed_from for number, claim in claims(places).items()}
    return accepted(_rows(places.metrics), resumed)


def checkpoints(places: RunPlaces, resumed: Mapping[int, int]) -> list[Held]:
    """Every checkpoint on every tier with its state, oldest first; also those of which only the quarantine is left."""
    known = marks.states(places)
    reasons = {(one.checkpoint, one.tier): one.reason for one in marks.read(places) if one.state is State.quarantined}
    found: dict[tuple[Key, str], Held] = {}
    for tier in places.tiers:
        committed, torn = checkpoint.find(places.checkpoints(tier))
        for key in committed + torn:
            place = (key.folder, tier)
            states = known.get(place, set())
            state = next(
                (one for one in (State.quarantined, State.durable, State.verified) if one in states), State.saved
            )
            found[key, tier] = Held(
                key,
                tier,
                state,
                reason=reasons.get(place, ""),
                bytes=_bytes(places.checkpoint(tier, key)),
                torn=key in torn,
                abandoned=abandoned(key, resumed),
            )
    for (folder, tier), reason in reasons.items():
        left = Key.parse(folder)
        if left and (left, tier) not in found:
            found[left, tier] = Held(
                left, tier, State.quarantined, reason=reason, gone=True, abandoned=abandoned(left, resumed)
            )
    order = list(places.tiers)
    return sorted(found.values(), key=lambda held: (held.key, order.index(held.tier)))


def _phases(places: RunPlaces) -> Iterator[PhaseMark]:
    for line in jsonl.read(places.phases):
        try:
            yield PhaseMark.model_validate(line)
        except ValidationError:
            continue


def _rows(path: Path, most: int | None = None) -> Iterator[Row]:
    for line in _tail(path, most):
        try:
            row = json.loads(line)
            yield Row(
                int(row["attempt"]), int(row["step"]), float(row["time"]), _figures(row), _figures(row.get("eval"))
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            continue


def _tail(path: Path, most: int | None) -> Iterator[bytes]:
    """The whole lines of a file; of a longer one than `most` bytes, those that begin in its last `most`."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most) if most else 0)
        if file.tell():
            file.readline()
        yield from file


def _figures(row: Any) -> dict[str, float]:
    """The numbers in a row; non-finite ones rest as strings there."""
    if not isinstance(row, dict):
        return {}
    return {
        key: float(value)
        for key, value in row.items()
        if key not in ("attempt", "step", "time")
        and ((isinstance(value, int | float) and not isinstance(value, bool)) or value in ("nan", "inf", "-inf"))
    }


def _one(kind: type[V], path: Path) -> V | None:
    try:
        return kind.parse(path.read_bytes(), str(path.parent), path.name)
    except (OSError, Damaged):
        return None


def _all(kind: type[V], paths: Iterable[Path]) -> list[V]:
    return [found for path in sorted(paths) if (found := _one(kind, path)) is not None]


def _bytes(folder: Path) -> int:
    try:
        return checkpoint.read_manifest(folder).bytes
    except (OSError, Damaged):
        return 0


def _last_sign(
    places: RunPlaces, happened: Iterable[Event], phases: Iterable[PhaseMark], steps: Iterable[StepDone]
) -> float:
    """The newest moment in all that is known; the heartbeats are there only while the local tier is."""
    beats = _all(Heartbeat, places.local.glob("heartbeat-*.json"))
    times = [event.time for event in happened] + [mark.time for mark in phases]
    times += [beat.time for beat in beats] + [step.time for step in steps]
    return max((time for time in times if math.isfinite(time)), default=0.0)
