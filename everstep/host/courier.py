"""What the copier's two kinds of process have in common: what they are told, what they tell, and what they verify."""

import json
import os
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr

from everstep.core.checkpoint import Key, State
from everstep.core.errors import EverstepError
from everstep.core.job import CheckpointPolicy
from everstep.core.record import Versioned
from everstep.store import checkpoint, jsonl, marks
from everstep.store.layout import RunPlaces
from everstep.store.s3_access import Access, Keys

UNTOLD = 200  # reports kept while the run directory cannot be written
RESCAN_SECONDS = 2.0
_SECRETS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
)


class CopierSpec(Versioned):
    """What a copier is told. Folders are the run's own on each tier, `object_uri` its place on the object tier.

    Without `object_uri` it copies to the persistent tier, with it to the object tier. `access` has secrets: it travels
    on standard input only, and is in no repr.
    """

    name: str
    run: str
    run_dir: str
    local_dir: str
    object_uri: str | None = None
    access: dict[str, Any] | None = Field(None, repr=False)
    policy: CheckpointPolicy = CheckpointPolicy()
    parent_pid: int

    @property
    def places(self) -> RunPlaces:
        return RunPlaces(Path(self.run_dir), Path(self.local_dir), self.object_uri)


def carried(access: Access | None) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """What a copier needs to reach the store: for its standard input, and for its environment, where no secret is.

    Keys that stand in this process's environment travel on standard input. Others (a profile, a role) are found by the
    copier itself, which can then renew them.
    """
    if access is None:
        return None, {}
    names = {name: value for name, value in os.environ.items() if name.startswith("AWS_") and name not in _SECRETS}
    if access.keys is None and os.environ.get("AWS_SECRET_ACCESS_KEY") and not access.profile:
        token = os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_SECURITY_TOKEN")
        secret = SecretStr(os.environ["AWS_SECRET_ACCESS_KEY"])
        keys = Keys(os.environ.get("AWS_ACCESS_KEY_ID", ""), secret, SecretStr(token) if token else None)
        access = replace(access, keys=keys)
    return access.to_dict(), names


class Courier:
    """One process for one run; `turn` does one piece of work."""

    busy_file = "copying.json"

    def __init__(self, spec: CopierSpec) -> None:
        self.spec = spec
        self.places = spec.places
        self.failures = 0
        self.thorough = False
        self._untold: deque[str] = deque(maxlen=UNTOLD)
        self._idle_at: object = None
        self._idle_since = 0.0
        self._advertised: list[Key] | None = None

    def turn(self, *, thorough: bool = False) -> bool:
        """Do the most urgent piece of work; False if there is none. Raises OSError or EverstepError for the far end.

        While nothing changes only a glance is taken, unless `thorough`: then nothing more comes, and all is to be done.
        """
        self.thorough = thorough
        self._tell_late()
        now = self._glance()
        if now == self._idle_at and not thorough and time.monotonic() - self._idle_since < RESCAN_SECONDS:
            return False
        try:
            busy = self._work()
        except (OSError, EverstepError, ValueError):
            self.failures += 1
            raise
        self.failures = 0
        if not busy:
            self._idle_at, self._idle_since = now, time.monotonic()
        return busy

    def _work(self) -> bool:
        raise NotImplementedError

    def _glance(self) -> object:
        """Something that is another one when there may be work."""
        raise NotImplementedError

    def report(self, kind: str, text: str, key: Key | None = None, tier: str = "", **data: float) -> None:
        """A row of `copier.jsonl`; kept for later if the run directory cannot be written now."""
        row = {"time": time.time(), "kind": kind, "checkpoint": key.folder if key else "", "tier": tier, "text": text}
        self._untold.append(json.dumps(row | data))
        try:
            self._tell_late()
        except OSError:
            sys.stderr.write(f"{kind}: {text}\n")

    def _choose(self, keys: list[Key]) -> Key:
        """The first; after a failure the next one, so that one that cannot be copied holds up no other."""
        return keys[self.failures % len(keys)]

    def _source(self, key: Key) -> str:
        """The nearest tier that holds it whole, as far as is known; empty if none does."""
        known = marks.states(self.places)
        for tier in ("local", "persistent"):
            committed, _ = checkpoint.find(self.places.checkpoints(tier))
            if key in committed and State.quarantined not in known.get((key.folder, tier), set()):
                return tier
        return ""

    def _is_verified(self, key: Key, tier: str) -> bool:
        known = marks.states(self.places).get((key.folder, tier), set())
        return State.verified in known or self._verify(key, tier)

    def _verify(self, key: Key, tier: str) -> bool:
        folder = self.places.checkpoint(tier, key)
        structure = checkpoint.read_structure(self.places.persistent)
        result = checkpoint.verify(folder, structure, run=self.spec.run, job=self.spec.name)
        if not result.ok and self._has_gone(key, tier):
            return False
        marks.verified(self.places, key.folder, tier, result)
        if not result.ok:
            self.report("checkpoint.quarantined", result.why, key, tier)
        return result.ok

    def _has_gone(self, key: Key, tier: str) -> bool:
        """Retention may have removed it meanwhile: no damage."""
        return not self.places.checkpoint(tier, key).exists()

    def _advertise(self, keys: list[Key]) -> None:
        if keys != self._advertised:
            self._advertised = None
            marks.advertise(self.places, keys, self.busy_file)
            self._advertised = keys

    def _tell_late(self) -> None:
        while self._untold:
            jsonl.append(self.places.persistent / "copier.jsonl", [self._untold[0]])
            self._untold.popleft()
