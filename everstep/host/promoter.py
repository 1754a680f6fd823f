"""Brings a run's checkpoints into MLflow's model registry: manifests and names go there, never weights."""

import json
from typing import Any

from everstep.core import promotion
from everstep.core.checkpoint import Key, State
from everstep.core.errors import Damaged, EverstepError
from everstep.core.promotion import Candidate, Promotion, Version, Wish
from everstep.host import registry
from everstep.store import checkpoint, digest, faults, marks
from everstep.store.layout import RunPlaces
from everstep.store.tensors import weights_digest_of

MANIFEST_LIMIT = 4 << 20
"""Bytes of a manifest that MLflow is given. Of a longer one only the digest goes there."""


class Gone(EverstepError):
    """The checkpoint was removed, or set aside, before the registry could be told of it."""


class Promoter:
    """Fulfils the wishes of one run. Used by the tracker's thread only: one actor for each run."""

    def __init__(self, places: RunPlaces) -> None:
        self._places = places
        self._registered: dict[tuple[str, str, str], str] = {}

    def fulfil(self, client: Any, run_id: str, wish: Wish) -> Promotion:
        """Register the wished checkpoint as candidate, and release it if that is wished and nothing speaks against it.

        Done again after a failure or a kill it ends the same. Raises Gone, or whatever MLflow raises.
        """
        one = wish.candidate
        number = self._register(client, run_id, wish)
        registry.point_candidate(client, one.job, number)
        self._tidy(client, one.job, run_id)
        status = {"checkpoint": one.checkpoint, "step": one.step, "version": number}
        if not wish.release:
            return Promotion(status="candidate", **status)
        if wish.unproven:
            return Promotion(status="waiting", reason=wish.unproven, **status)
        if not wish.refused:
            marks.pin(self._places, one.checkpoint)

        def refusal(production: Version | None) -> str:
            return promotion.refusal(wish, production, registry.version(client, one.job, number))

        done = registry.release(client, one.job, number, refusal, f"{one.run}-{run_id}")
        if done.refusal:
            return Promotion(status="refused", previous=done.previous, reason=done.refusal, **status)
        return Promotion(status="production", previous=done.previous, **status)

    def _register(self, client: Any, run_id: str, wish: Wish) -> str:
        one = wish.candidate
        place = (one.checkpoint, one.manifest, one.uri)
        if place not in self._registered:
            manifest, one = self._looked_at(one)
            folder = f"checkpoints/{one.checkpoint}"
            faults.point("promote.before_artifact")
            if len(manifest) <= MANIFEST_LIMIT:
                client.log_text(run_id, manifest.decode(), f"{folder}/manifest.json")
            tags = promotion.tags(one, wish.best)
            client.log_text(run_id, json.dumps(tags, indent=1) + "\n", f"{folder}/checkpoint.json")
            source = f"{client.get_run(run_id).info.artifact_uri.rstrip('/')}/{folder}"
            self._registered[place] = registry.register(client, one.job, run_id, source, tags)
        return self._registered[place]

    def _looked_at(self, one: Candidate) -> tuple[bytes, Candidate]:
        """The manifest, and the candidate with the digest of its weights. Raises Gone."""
        try:
            for tier in self._places.tiers:
                folder = self._places.checkpoints(tier) / one.checkpoint
                if tier == "object" and not one.digest:
                    continue  # here is its manifest only
                if checkpoint.manifest_digest(folder) == one.manifest:
                    manifest = checkpoint.read_manifest_bytes(folder)
                    found = one.digest or weights_digest_of(folder)
                    if digest.of_bytes(manifest) == one.manifest:
                        return manifest, one.model_copy(update={"digest": found})
        except (FileNotFoundError, Damaged) as error:
            raise Gone(f"{one.checkpoint} cannot be read for the registry: {error}") from error
        raise Gone(f"{one.checkpoint} was removed before MLflow could be told of it")

    def _tidy(self, client: Any, name: str, run_id: str) -> None:
        """Versions of this run whose bytes retention has removed go, unless an alias names them; bad ones say so."""
        known = marks.states(self._places)
        named = set(registry.aliases(client, name).values())
        for version in registry.versions_of(client, name, run_id):
            folder = version.tags.get("everstep.checkpoint", "")
            far = [known.get((folder, tier), set()) for tier in self._places.tiers if tier != "local"]
            sound = any(State.durable in one and State.quarantined not in one for one in far)
            if not sound and any(State.quarantined in one for one in far):
                if "everstep.quarantined" not in version.tags:
                    reason = marks.reason(self._places, folder, "persistent", State.quarantined)
                    registry.withdraw(client, name, version, reason or "set aside; see marks/ of the run directory")
            elif version.number not in named and Key.parse(folder) and not self._stands(folder):
                client.delete_model_version(name, version.number)

    def _stands(self, folder: str) -> bool:
        return any((self._places.checkpoints(tier) / folder).exists() for tier in self._places.tiers)
