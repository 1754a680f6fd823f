"""What the copiers still have to do for a run, as its tiers and marks say.

Worth copying is what the far tier's own retention would keep if it were there: the newest, and besides what is pinned,
the best, or kept by its step. So nothing is copied only to be removed again.
"""

from collections.abc import Iterable, Mapping

from everstep.core.checkpoint import Key, State, abandoned, candidates
from everstep.core.job import CheckpointPolicy
from everstep.core.retention import Kept, Retention, worth_copying
from everstep.host.holdings import seen
from everstep.store import checkpoint, marks
from everstep.store.layout import RunPlaces


def pending(places: RunPlaces, resumed: Mapping[int, int], policy: CheckpointPolicy) -> list[Key]:
    """The local checkpoints that are still to become durable on the persistent tier, oldest first.

    `resumed` maps claimed attempts to the steps they resumed from. One that was removed there to make room is not
    brought there again, unless it is pinned by now.
    """
    tiers = _Tiers(places, policy)
    more = [
        key
        for key in tiers.sound("local")
        if not tiers.has(key, "persistent", State.durable) and not tiers.has(key, "persistent", State.quarantined)
    ]
    there = tiers.kept("persistent", tiers.sound("persistent") - set(more))
    near = tiers.kept("local", more)
    given_up = marks.given_up(places) - {one.key for one in near if one.pinned}
    stays = worth_copying(there, near, Retention.of(policy, "persistent"), resumed)
    return [key for key in stays if not abandoned(key, resumed) and key not in given_up]


def outbound(
    places: RunPlaces, resumed: Mapping[int, int], policy: CheckpointPolicy, *, proven: bool = False
) -> list[Key]:
    """The checkpoints that are still to be brought to the object tier, most urgent first.

    Wanted are those that it would keep, the newest first, and those that were asked for (`marks.promote`). With
    `proven` only those count that somebody has verified already; without it, the uploader does that itself.
    """
    if places.object is None:
        return []
    tiers = _Tiers(places, policy)
    near = tiers.sound("local") | tiers.sound("persistent")
    there = tiers.sound("object")
    asked = marks.promotions(places)
    more = [one for tier in ("local", "persistent") for one in tiers.kept(tier, tiers.sound(tier) - there)]
    more = list({one.key: one for one in more}.values())
    stays = worth_copying(tiers.kept("object", there, asked), more, Retention.of(policy, "object"), resumed)
    living = sorted((key for key in stays if not abandoned(key, resumed)), reverse=True)
    return [
        key
        for key in dict.fromkeys([*living, *reversed(asked)])
        if key in near
        and not tiers.has(key, "object", State.durable)
        and not tiers.has(key, "object", State.quarantined)
        and (not proven or tiers.has(key, "local", State.verified) or tiers.has(key, "persistent", State.verified))
    ]


def unmarked(places: RunPlaces, resumed: Mapping[int, int], policy: CheckpointPolicy) -> list[Key]:
    """Committed checkpoints on the persistent tier of which nothing is known (the marks were lost), newest `keep`."""
    known = marks.states(places)
    committed, _ = checkpoint.find(places.checkpoints("persistent"))
    newest = candidates(committed, resumed)[: policy.keep]
    return sorted(key for key in newest if not known.get((key.folder, "persistent")))


class _Tiers:
    """What is on each tier and known of it, read once."""

    def __init__(self, places: RunPlaces, policy: CheckpointPolicy) -> None:
        self._places = places
        self._policy = policy
        self._known = marks.states(places)
        self._pinned = marks.pinned(places)
        self._committed = {tier: set(checkpoint.find(places.checkpoints(tier))[0]) for tier in places.tiers}

    def has(self, key: Key, tier: str, state: State) -> bool:
        return state in self._known.get((key.folder, tier), set())

    def sound(self, tier: str) -> set[Key]:
        """The committed ones that are not quarantined there."""
        return {key for key in self._committed.get(tier, set()) if not self.has(key, tier, State.quarantined)}

    def kept(self, tier: str, keys: Iterable[Key], asked: Iterable[Key] = ()) -> list[Kept]:
        """These as retention would see them on a tier that they came to: whatever comes there has been verified."""
        pinned = {*self._pinned, *(key.folder for key in asked)}
        return [seen(self._places, tier, key, self._policy, pinned) for key in sorted(keys)]
