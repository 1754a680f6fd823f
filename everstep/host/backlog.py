"""What the copier still has to do for a run, as its tiers and marks say."""

from collections.abc import Mapping

from everstep.core.checkpoint import Key, State, candidates
from everstep.store import checkpoint, marks
from everstep.store.layout import RunPlaces


def pending(places: RunPlaces, resumed: Mapping[int, int], keep: int) -> list[Key]:
    """The local checkpoints that are still to become durable on the persistent tier, oldest first.

    `resumed` maps claimed attempts to the steps they resumed from. Only the newest `keep` checkpoints of the run count:
    one that has been overtaken by so many would be removed from the far end as soon as it is there.
    """
    known = marks.states(places)
    held = {tier: set(checkpoint.find(places.checkpoints(tier))[0]) for tier in ("local", "persistent")}

    def bad(key: Key, tier: str) -> bool:
        return State.quarantined in known.get((key.folder, tier), set())

    sound = {tier: {key for key in keys if not bad(key, tier)} for tier, keys in held.items()}
    newest = candidates(sound["local"] | sound["persistent"], resumed)[:keep]
    return sorted(
        key
        for key in newest
        if key in sound["local"]
        and not bad(key, "persistent")
        and State.durable not in known.get((key.folder, "persistent"), set())
    )


def outbound(places: RunPlaces, resumed: Mapping[int, int], keep: int, *, proven: bool = False) -> list[Key]:
    """The checkpoints that are still to be brought to the object tier, most urgent first.

    Wanted are the newest `keep` of the run, the newest first, and those that were asked for (`marks.promote`). With
    `proven` only those count that somebody has verified already; without it, the uploader does that itself.
    """
    if places.object is None:
        return []
    known = marks.states(places)
    held = {tier: set(checkpoint.find(places.checkpoints(tier))[0]) for tier in places.tiers}

    def has(key: Key, tier: str, state: State) -> bool:
        return state in known.get((key.folder, tier), set())

    sound = {tier: {key for key in keys if not has(key, tier, State.quarantined)} for tier, keys in held.items()}
    near = sound["local"] | sound["persistent"]
    wanted = [*candidates(near | sound["object"], resumed)[:keep], *reversed(marks.promotions(places))]
    return [
        key
        for key in dict.fromkeys(wanted)
        if key in near
        and not has(key, "object", State.durable)
        and not has(key, "object", State.quarantined)
        and (not proven or has(key, "local", State.verified) or has(key, "persistent", State.verified))
    ]


def unmarked(places: RunPlaces, resumed: Mapping[int, int], keep: int) -> list[Key]:
    """Committed checkpoints on the persistent tier of which nothing is known (the marks were lost), newest `keep`."""
    known = marks.states(places)
    committed, _ = checkpoint.find(places.checkpoints("persistent"))
    newest = candidates(committed, resumed)[:keep]
    return sorted(key for key in newest if not known.get((key.folder, "persistent")))
