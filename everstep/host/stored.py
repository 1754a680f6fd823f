"""Which copies of a run's checkpoints there are, or should be, on the tiers that this machine can ask."""

from collections.abc import Mapping

from everstep.core.checkpoint import Key, Mark, State
from everstep.core.job import CheckpointPolicy
from everstep.core.retention import Retention
from everstep.core.scrub import Copy
from everstep.host.holdings import seen as seen_by_rules
from everstep.store import checkpoint, marks
from everstep.store.layout import RunPlaces
from everstep.store.object_tier import Seen

Places = dict[tuple[str, str], Mark]


def copies(
    places: RunPlaces,
    seen: Seen | None,
    repairing: Mapping[str, str],
    resumed: Mapping[int, int],
    policy: CheckpointPolicy,
) -> list[Copy]:
    """Every copy that is committed, or was: what marks and the mirror know of is listed too.

    `seen` is what the object tier showed, None if it was not asked. `repairing` are places whose repair has begun. A
    local copy that nobody has proven yet is its copier's business.
    """
    known, aside = _marked(places)
    found = []
    for tier in _tiers(places, seen):
        wanted = _wanted(places, tier, resumed, policy)
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
            if copy.present or copy.place in repairing or (key in wanted and _is_missed(places, copy)):
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


def _wanted(places: RunPlaces, tier: str, resumed: Mapping[int, int], policy: CheckpointPolicy) -> set[Key]:
    """What the tier's retention would keep if it had all that any tier has: marks may outlive a removal.

    One that no tier has any more is nobody's to mend.
    """
    homes = {key: where for where in places.tiers for key in checkpoint.find(places.checkpoints(where))[0]}
    given_up = marks.given_up(places) if tier == "persistent" else set()
    pinned = marks.pinned(places)
    all_of_them = [seen_by_rules(places, where, key, policy, pinned) for key, where in homes.items()]
    fates = Retention.of(policy, tier).judge(all_of_them, resumed)
    return {fate.key for fate in fates if fate.keeps} - given_up


def _is_missed(places: RunPlaces, copy: Copy) -> bool:
    """Whether nothing is there of a wanted one. A folder that is there, and not listed, is being copied."""
    folder = places.checkpoint(copy.tier, copy.key)
    return not (copy.tier == "local" or copy.quarantined or (copy.tier == "persistent" and folder.exists()))


def _key_of(place: str, tier: str) -> Key | None:
    folder, _, where = place.rpartition(".")
    return Key.parse(folder) if where == tier else None
