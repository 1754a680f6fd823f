"""Removes checkpoints that are no longer needed, on every tier. What may go is judged by `core.retention`.

On the object tier the uploader does it, for the flow must not wait for a store: here is said which ones may go.

Deleted is only what this run wrote: a real folder with a checkpoint's name and a sealed manifest of this run, or a torn
folder (never committed) of an attempt that a newer one has replaced. A folder is renamed to a dot-name first, so that
one that is half deleted is never taken for a checkpoint. Symbolic links are never followed.

What people ask of it (what stays and why, pins) is in `everstep.host.pruning`.
"""

import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.core.checkpoint import Key, State, abandoned
from everstep.core.job import CheckpointPolicy
from everstep.core.retention import Fate, Retention
from everstep.host.backlog import pending
from everstep.host.holdings import held
from everstep.store import checkpoint, faults, marks
from everstep.store.layout import RunPlaces

_REMOVING = re.compile(r"^\.removing-step-\d{8,}\.a\d+-[0-9a-f]{8}$")
TIERS = ("local", "persistent")


@dataclass(frozen=True)
class Removed:
    """A checkpoint that went: from which tier, how many bytes that freed, and why."""

    tier: str
    folder: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Swept:
    """What a sweep removed, and what the disks said where it could not."""

    removed: tuple[Removed, ...] = ()
    failures: tuple[OSError, ...] = ()


def plan(
    places: RunPlaces,
    policy: CheckpointPolicy,
    resumed: Mapping[int, int],
    in_use: Collection[str],
    shed: Mapping[str, int] | None = None,
) -> list[tuple[str, Fate]]:
    """The fate of every checkpoint of the run on the local and the persistent tier, with the tier. Changes nothing.

    `resumed` maps claimed attempts to the steps they resumed from. `in_use` names folders that somebody reads; those a
    copier is copying are known. A local checkpoint that is still to become durable stays. `shed` are the bytes that are
    to be freed on a tier.
    """
    busy = {*in_use, *(key.folder for key in marks.copying(places))}
    waiting = set(pending(places, resumed, policy))
    told = []
    for tier in TIERS:
        kept = held(places, tier, policy.best, busy, waiting)
        fates = Retention.of(policy, tier).judge(kept, resumed, (shed or {}).get(tier, 0))
        told += [(tier, _named(places, tier, fate)) for fate in fates]
    newest = max(resumed, default=0)
    evidence = {place for place, states in marks.states(places).items() if State.quarantined in states}
    for tier, key in torn(places):
        if key.attempt < newest and key.folder not in busy and (key.folder, tier) not in evidence:
            told.append((tier, Fate(key, 0, keeps=False, why="never committed, and its attempt is over")))
    return told


def apply(
    places: RunPlaces,
    policy: CheckpointPolicy,
    resumed: Mapping[int, int],
    in_use: Collection[str],
    shed: Mapping[str, int] | None = None,
) -> Swept:
    """Remove what may go, see `plan`. One that cannot be removed holds up no other."""
    faults.point("retention.apply")
    for tier in TIERS:
        _finish_removals(places.checkpoints(tier))
    removed, failures = [], []
    for tier, fate in plan(places, policy, resumed, in_use, shed):
        if fate.keeps:
            continue
        try:
            freed = _remove(places, tier, fate.key)
        except FileNotFoundError:
            continue  # somebody else removed it
        except OSError as error:
            failures.append(error)
        else:
            removed.append(Removed(tier, fate.key.folder, freed, fate.why))
    if shed and shed.get("persistent"):
        marks.give_up(places, [key for one in removed if one.tier == "persistent" and (key := Key.parse(one.folder))])
    return Swept(tuple(removed), tuple(failures))


def plan_far(places: RunPlaces, policy: CheckpointPolicy, resumed: Mapping[int, int]) -> list[Fate]:
    """The fate of each checkpoint on the object tier, by its mirror.

    Those that were asked for there stay for good. One that is committed there counts as good, for that is the rule of
    its commit; and the newest that was read back from there stays besides.
    """
    asked = set(marks.promotions(places))
    kept = held(places, "object", policy.best, set(), set())
    proven = max((one.key for one in kept if one.verified and not abandoned(one.key, resumed)), default=None)
    known = marks.states(places)
    tier = [
        replace(
            one,
            pinned=one.pinned or one.key in asked or one.key == proven,
            verified=State.durable in known.get((one.key.folder, "object"), set()),
        )
        for one in kept
    ]
    return Retention.of(policy, "object").judge(tier, resumed)


def removable_far(places: RunPlaces, policy: CheckpointPolicy, resumed: Mapping[int, int]) -> list[Key]:
    """The checkpoints that may go from the object tier, oldest first."""
    return [fate.key for fate in plan_far(places, policy, resumed) if not fate.keeps]


def torn(places: RunPlaces) -> list[tuple[str, Key]]:
    """Folders that were begun and never committed, by tier; not those that a copier may still complete."""
    found = []
    sources: set[Key] = set()
    for tier in TIERS:
        committed, unfinished = checkpoint.find(places.checkpoints(tier))
        found += [(tier, key) for key in unfinished if key not in sources]
        sources |= set(committed)
    return found


def _named(places: RunPlaces, tier: str, fate: Fate) -> Fate:
    """A local one that goes without ever having been copied says so: it was overtaken, and is nowhere else."""
    if fate.keeps or tier != "local" or checkpoint.manifest_digest(places.checkpoint("persistent", fate.key)):
        return fate
    return replace(fate, why=f"{fate.why}; it was never copied to the persistent tier")


def _remove(places: RunPlaces, tier: str, key: Key) -> int:
    folder = places.checkpoint(tier, key)
    going = folder.with_name(f".removing-{key.folder}-{secrets.token_hex(4)}")
    folder.rename(going)
    size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(going))
    shutil.rmtree(going)
    marks.forget(places, key.folder, tier)
    return size


def _finish_removals(checkpoints: Path) -> None:
    """What a killed removal left."""
    if not checkpoints.is_dir():
        return
    for entry in os.scandir(checkpoints):
        if _REMOVING.match(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
