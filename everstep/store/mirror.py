"""The mirror of the object tier in the run directory: the manifests of what is committed there, and their marks.

Everybody who asks what is on the object tier reads the mirror, so that no answer waits for a store. Those who write
there keep it; `refresh` makes it what a listing shows.
"""

import shutil

from everstep.core.checkpoint import MANIFEST, Key, State, Verification
from everstep.core.errors import Damaged
from everstep.store import atomic, checkpoint, digest, marks
from everstep.store.layout import RunPlaces
from everstep.store.object_tier import ObjectTier, Seen, parse

TIER = "object"


def refresh(places: RunPlaces, tier: ObjectTier) -> Seen:
    """Look at the tier and bring mirror, marks and claims up to date. Raises what the store raises."""
    seen = tier.look()
    committed = set(seen.committed)
    for key in checkpoint.find(places.checkpoints(TIER))[0]:
        if key not in committed:
            forget(places, key)
    for key in sorted(committed):
        _take(places, key, tier.manifest(key), seen.files(key))
    for number in seen.attempts:
        if not places.claim(number).exists():
            places.claim(number).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            atomic.create(places.claim(number), tier.read(f"attempts/{number:06d}.json"))
    return seen


def note(places: RunPlaces, key: Key, manifest: bytes, *, proven: bool) -> None:
    """A checkpoint is committed there with this manifest. `proven`: every file has been read back against it."""
    folder = places.checkpoint(TIER, key)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic.write(folder / MANIFEST, manifest)
    found = digest.of_bytes(manifest)
    if proven:
        marks.verified(places, key.folder, TIER, Verification(ok=True, manifest_digest=found))
    marks.durable(places, key.folder, TIER, found)


def forget(places: RunPlaces, key: Key) -> None:
    """A checkpoint is there no longer."""
    shutil.rmtree(places.checkpoint(TIER, key), ignore_errors=True)
    marks.forget(places, key.folder, TIER)


def _take(places: RunPlaces, key: Key, data: bytes, files: dict[str, int]) -> None:
    states = marks.states(places).get((key.folder, TIER), set())
    held = checkpoint.manifest_digest(places.checkpoint(TIER, key)) == digest.of_bytes(data)
    if State.quarantined in states or (held and State.durable in states and not _lacks(key, data, files)):
        return
    why = _lacks(key, data, files)
    note(places, key, data, proven=False)
    if why:
        marks.quarantine(places, key.folder, TIER, why)


def _lacks(key: Key, data: bytes, files: dict[str, int]) -> str:
    """What the listing says is wrong with a committed checkpoint; empty if nothing is."""
    try:
        manifest = parse(key, data)
    except Damaged as error:
        return str(error)
    for entry in manifest.files:
        if entry.path not in files:
            return f"{key.folder}: {entry.path} is missing on the object tier."
        if files[entry.path] != entry.size:
            return f"{key.folder}: {entry.path} has {files[entry.path]} bytes where the manifest says {entry.size}."
    return ""
