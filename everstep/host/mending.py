"""Brings a sound copy of a rotten checkpoint from another tier, by the rule of every commit: files, proof, manifest.

The new copy is made beside the rotten one and takes its place when it is whole; the rotten one is kept as evidence under
a name that is no checkpoint's. May be killed anywhere and called again.
"""

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from everstep.core.checkpoint import MANIFEST, Key
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.core.scrub import Copy
from everstep.host.gentle import Pace
from everstep.store import atomic, checkpoint, digest, faults, object_rot, room, transfer
from everstep.store.layout import RunPlaces
from everstep.store.object_tier import ObjectTier, parse

SIDE = ".repair-"
ROTTEN = ".rotten-"


class Mender:
    """Repairs for one run. `tier` is its place on the object tier, where it has one that answers."""

    def __init__(self, places: RunPlaces, tier: ObjectTier | None, pace: Pace) -> None:
        self._places = places
        self._tier = tier
        self._pace = pace

    def mend(self, rotten: Copy, source: Copy, expected: str, wrong: Mapping[str, str]) -> str:
        """Put the source's bytes in the place of the rotten ones; the URI of the evidence, empty if nothing was left.

        `expected` is the digest of the manifest that belongs there, empty if unknown. Raises Damaged or NotThere for a
        source that is not sound, OSError and StoreUnavailable for tiers that do not do what they are asked.
        """
        self._check_source(source, expected)
        if rotten.tier == "object":
            return self._mend_far(rotten.key, self._places.checkpoint(source.tier, source.key), wrong)
        side = self._places.checkpoints(rotten.tier) / f"{SIDE}{rotten.key.folder}"
        self._bring(source, side)
        faults.point("scrub.copied")
        return self._exchange(side, self._places.checkpoint(rotten.tier, rotten.key))

    def _check_source(self, source: Copy, expected: str) -> None:
        """Raises Damaged unless the source's manifest is this checkpoint's, and the one that is wanted."""
        data = self._manifest(source)
        manifest = parse(source.key, data)
        if (manifest.run, manifest.job) != (self._places.persistent.name, self._places.persistent.parent.name):
            raise Damaged(source.key.folder, MANIFEST, f"on the {source.tier} tier is that of another run")
        if expected and digest.of_bytes(data) != expected:
            raise Damaged(source.key.folder, MANIFEST, f"on the {source.tier} tier is that of another checkpoint")

    def _manifest(self, source: Copy) -> bytes:
        if source.tier != "object":
            return checkpoint.read_manifest_bytes(self._places.checkpoint(source.tier, source.key))
        if self._tier is None:
            raise StoreUnavailable("The object tier was not asked.")
        return self._tier.manifest(source.key)

    def _bring(self, source: Copy, side: Path) -> None:
        """Make the new copy. It leaves room for the next save: a repair must not be what fills a tier."""
        self._check_room(source, side)
        if source.tier != "object":
            transfer.copy(self._places.checkpoint(source.tier, source.key), side, self._pace.take)
            return
        assert self._tier is not None
        shutil.rmtree(side, ignore_errors=True)  # whole, but nobody has read it back
        self._tier.fetch(source.key, side, self._pace.take)

    def _check_room(self, source: Copy, side: Path) -> None:
        needed = 2 * parse(source.key, self._manifest(source)).bytes
        if (free := room.free(side.parent)) < needed:
            raise StoreUnavailable(f"{room.words(side.parent, free, needed)}: for the repair and the next save.")

    def _exchange(self, side: Path, target: Path) -> str:
        evidence = target.with_name(f"{ROTTEN}{target.name}-{secrets.token_hex(4)}")
        kept = ""
        try:
            target.rename(evidence)
            kept = evidence.absolute().as_uri()
        except FileNotFoundError:
            pass  # nothing was left of it, or a scrub that was killed has set it aside
        faults.point("scrub.aside")
        side.rename(target)
        atomic.sync_folder(target.parent)
        faults.point("scrub.swapped")
        return kept

    def _mend_far(self, key: Key, source: Path, wrong: Mapping[str, str]) -> str:
        """On a store nothing is renamed: the rotten objects are copied aside, and the commit is taken back first."""
        assert self._tier is not None
        there = self._tier.look(f"checkpoints/{key.folder}").files(key)
        evidence = ""
        if there.keys() & wrong.keys():
            scratch = self._places.persistent / f".scrub-{secrets.token_hex(4)}.tmp"
            evidence = object_rot.set_aside(self._tier, key, wrong.keys(), scratch)
        self._tier.upload(source, lambda: None, self._pace.take)
        faults.point("scrub.swapped")
        return evidence
