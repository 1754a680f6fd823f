"""Which copies of a run's checkpoints there are, or should be, on the tiers that this machine can ask."""

from collections.abc import Mapping

from everstep.core.checkpoint import Key, Mark, State, candidates
from everstep.core.scrub import Copy
from everstep.store import checkpoint, marks
from everstep.store.layout import RunPlaces
from everstep.store.object_tier import Seen

Places = dict[tuple[str, str], Mark]


def copies(
    places: RunPlaces, seen: Seen | None, repairing: Mapping[str, str], resumed: Mapping[int, int], keep: int
) -> list[Copy]:
    """Every copy that is committed, or was: what marks and the mirror know of is listed too.

    `seen` is what the object tier showed, None if it was not asked. `repairing` are places whose repair has begun. A
    local copy that nobody has proven yet is its copier's business.
    """
    known, aside = _marked(places)
    found = []
    for tier in _tiers(places, seen):
        there = _present(places, tier, seen, known)
        keys = {key for folder, where in known if where == tier and (key := Key.parse(folder))}
        keys |= {key for key in there if tier != "local" or (key.folder, tier) in aside}
        keys |= {key for place in repairing if (key := _key_of(place, tier))}
        keys |= set(mirrored(places)) if tier == "object" else set()
        for key in sorted(keys):
            mark = known.get((key.folder, tier))
            copy = Copy(
                key,
                tier,
                manifest=mark.manifest_digest if mark else "",
                proven=mark.time if mark else 0.0,
                quarantined=(key.folder, tier) in aside,
                present=key in there,
            )
            if copy.present or copy.place in repairing or _is_missed(places, copy, resumed, keep):
                found.append(copy)
    return found


def mirrored(places: RunPlaces) -> list[Key]:
    """What is known to be committed on the object tier."""
    return checkpoint.find(places.checkpoints("object"))[0] if places.object else []


def _marked(places: RunPlaces) -> tuple[Places, set[tuple[str, str]]]:
    """The newest proof of each place, and the places that are set aside."""
    known: Places = {}
    aside: set[tuple[str, str]] = set()
    for mark in marks.read(places):
        place = (mark.checkpoint, mark.tier)
        if mark.state is State.quarantined:
            aside.add(place)
        elif mark.manifest_digest and (place not in known or mark.time > known[place].time):
            known[place] = mark
    return known, aside


def _tiers(places: RunPlaces, seen: Seen | None) -> list[str]:
    folders = [tier for tier in ("local", "persistent") if places.checkpoints(tier).is_dir()]
    return [*folders, *(["object"] if seen is not None else [])]


def _present(places: RunPlaces, tier: str, seen: Seen | None, known: Places) -> set[Key]:
    """The committed ones, and those that were proven and have lost their manifest, unless a copier is at them."""
    if tier == "object":
        return set(seen.committed) if seen else set()
    committed, torn = checkpoint.find(places.checkpoints(tier))
    busy = marks.copying(places)
    return {*committed, *(key for key in torn if (key.folder, tier) in known and key not in busy)}


def _is_missed(places: RunPlaces, copy: Copy, resumed: Mapping[int, int], keep: int) -> bool:
    """One of which nothing is there is missed only where retention would keep it: marks may outlive a removal.

    A folder that is there, and not listed, is being copied.
    """
    folder = places.checkpoint(copy.tier, copy.key)
    if copy.tier == "local" or copy.quarantined or (copy.tier == "persistent" and folder.exists()):
        return False
    if copy.tier == "persistent" and copy.key in marks.given_up(places):
        return False
    held = {key for tier in places.tiers for key in checkpoint.find(places.checkpoints(tier))[0]}
    return copy.key in candidates(held, resumed)[:keep] or copy.key.folder in marks.pinned(places)


def _key_of(place: str, tier: str) -> Key | None:
    folder, _, where = place.rpartition(".")
    return Key.parse(folder) if where == tier else None
