"""What a run's tiers hold, as the rules of retention see it."""

from collections.abc import Collection

from everstep.core.checkpoint import Key, Manifest, State
from everstep.core.errors import Damaged
from everstep.core.job import Best, Budget, CheckpointPolicy
from everstep.core.retention import Kept
from everstep.store import checkpoint, marks
from everstep.store.layout import RunPlaces


def held(
    places: RunPlaces, tier: str, best: Best | None, busy: Collection[str], waiting: Collection[Key]
) -> list[Kept]:
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
                bytes=manifest.bytes,
            )
        )
    return found


def seen(places: RunPlaces, tier: str, key: Key, policy: CheckpointPolicy, pinned: Collection[str]) -> Kept:
    """A checkpoint of which only is asked whether it would be kept, if it were proven.

    Its manifest is read only where the policy asks for what stands in it.
    """
    size, metric = 0, None
    if policy.best or policy.budget_gb != Budget():
        manifest = _own_manifest(places, tier, key)
        size, metric = (manifest.bytes, _metric(manifest, policy.best)) if manifest else (0, None)
    return Kept(key, verified=True, pinned=key.folder in pinned, metric=metric, bytes=size)


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
