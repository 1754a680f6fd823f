"""Removes checkpoints that are no longer needed, on every tier. What may go is judged by `core.checkpoint.removable`.

On the object tier the uploader does it, for the flow must not wait for a store: here is said which ones may go.

Deleted is only what this run wrote: a real folder with a checkpoint's name and a sealed manifest of this run, or a torn
folder (never committed) of an attempt that a newer one has replaced. A folder is renamed to a dot-name first, so that
one that is half deleted is never taken for a checkpoint. Symbolic links are never followed.
"""

import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from everstep.core.checkpoint import Kept, Key, Manifest, State, abandoned, removable
from everstep.core.errors import Damaged
from everstep.core.job import Best
from everstep.host.backlog import pending
from everstep.store import checkpoint, marks
from everstep.store.layout import RunPlaces

_REMOVING = re.compile(r"^\.removing-step-\d{8,}\.a\d+-[0-9a-f]{8}$")

Removed = tuple[str, str, int]


def apply(
    places: RunPlaces, keep: int, best: Best | None, resumed: Mapping[int, int], in_use: Collection[str]
) -> list[Removed]:
    """Remove what may go; returns (tier, folder, bytes) of each.

    `resumed` maps claimed attempts to the steps they resumed from. `in_use` names folders that somebody reads; those a
    copier is copying are known. A local checkpoint that is still to become durable stays.
    """
    busy = {*in_use, *(key.folder for key in marks.copying(places))}
    waiting = set(pending(places, resumed, keep))
    going: list[tuple[str, Key]] = []
    for tier in ("local", "persistent"):
        _finish_removals(places.checkpoints(tier))
        kept = _kept(places, tier, best, busy, waiting)
        going += [(tier, key) for key in removable(kept, keep, resumed, best.mode if best else "min")]
    newest = max(resumed, default=0)
    evidence = {place for place, states in marks.states(places).items() if State.quarantined in states}
    going += [
        (tier, key)
        for tier, key in torn(places)
        if key.attempt < newest and key.folder not in busy and (key.folder, tier) not in evidence
    ]
    return [(tier, key.folder, _remove(places, tier, key)) for tier, key in going]


def removable_far(places: RunPlaces, keep: int, best: Best | None, resumed: Mapping[int, int]) -> list[Key]:
    """The checkpoints that may go from the object tier, by its mirror.

    Those that were asked for there stay for good. One that is committed there counts as good, for that is the rule of
    its commit; and the newest that was read back from there stays besides.
    """
    pinned = set(marks.promotions(places))
    kept = _kept(places, "object", best, set(), set())
    proven = max((one.key for one in kept if one.verified and not abandoned(one.key, resumed)), default=None)
    known = marks.states(places)
    tier = [
        replace(one, pinned=one.key in pinned, verified=State.durable in known.get((one.key.folder, "object"), set()))
        for one in kept
    ]
    return [key for key in removable(tier, keep, resumed, best.mode if best else "min") if key != proven]


def torn(places: RunPlaces) -> list[tuple[str, Key]]:
    """Folders that were begun and never committed, by tier; not those that a copier may still complete."""
    found = []
    sources: set[Key] = set()
    for tier in ("local", "persistent"):
        committed, unfinished = checkpoint.find(places.checkpoints(tier))
        found += [(tier, key) for key in unfinished if key not in sources]
        sources |= set(committed)
    return found


def _kept(places: RunPlaces, tier: str, best: Best | None, busy: set[str], waiting: set[Key]) -> list[Kept]:
    """The tier's checkpoints that are certainly this run's own."""
    known, pinned = marks.states(places), marks.pinned(places)
    found = []
    for key in checkpoint.find(places.checkpoints(tier))[0]:
        manifest = _own_manifest(places, tier, key)
        if manifest is None:
            continue
        states = known.get((key.folder, tier), set())
        found.append(
            Kept(
                key,
                verified=State.verified in states,
                quarantined=State.quarantined in states,
                in_use=key.folder in busy,
                pinned=key.folder in pinned,
                copied=tier != "local" or key not in waiting,
                metric=_metric(manifest, best),
            )
        )
    return found


def _own_manifest(places: RunPlaces, tier: str, key: Key) -> Manifest | None:
    try:
        manifest = checkpoint.read_manifest(places.checkpoint(tier, key))
    except Damaged:
        return None  # whoever verifies it will say so; here it only means: not known to be ours
    ours = (manifest.run, manifest.job) == (places.persistent.name, places.persistent.parent.name)
    return manifest if ours and manifest.key == key else None


def _metric(manifest: Manifest, best: Best | None) -> float | None:
    value = manifest.metrics.get(best.metric) if best else None
    return value if isinstance(value, float) else None


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
