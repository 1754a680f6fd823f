"""The copier of the object tier: brings there what a machine needs that has nothing else.

Every checkpoint that is kept goes there, the newest first: under a backlog older ones are left out, never the newest.
It is the only one that writes checkpoints there and removes them, so that no outage of the store holds up the flow or
the copies to the persistent tier. A claim of a newer attempt there by somebody else ends its work.
"""

import contextlib
import time
from pathlib import Path

from everstep.core.checkpoint import AttemptClaim, Key
from everstep.core.errors import Damaged, Fenced
from everstep.host import retention, runs
from everstep.host.backlog import outbound
from everstep.host.courier import CopierSpec, Courier
from everstep.store import atomic, mirror
from everstep.store.object_tier import ObjectTier

HISTORY = ("events.jsonl", "metrics.jsonl", "phases.jsonl")
HISTORY_SECONDS = 60.0
HISTORY_BYTES = 256 << 20
"""A history that has grown longer stays where it is: sending it whole again and again would cost too much."""


class Uploader(Courier):
    """One run's copier to the object tier; `turn` does one piece of work."""

    busy_file = "copying-object.json"

    def __init__(self, spec: CopierSpec, tier: ObjectTier) -> None:
        super().__init__(spec)
        self._tier = tier
        self._begun = False
        self._told: dict[str, object] = {}
        self._claims: dict[int, bytes] = {}
        self._history_at = 0.0
        self._fenced = False

    def _glance(self) -> object:
        folders = (self.places.mark("x", "x", "x").parent, self.places.claim(1).parent)
        files = (self.places.persistent / "promote.json", self.places.structure)
        return [_version(path) for path in (*folders, *files)]

    def _work(self) -> bool:
        if self._fenced:
            return False
        self._begin()
        self._say_who()
        resumed = {number: claim.resumed_from for number, claim in runs.claims(self.places).items()}
        keys = outbound(self.places, resumed, self.spec.policy, proven=not self.thorough)
        if keys := [key for key in keys if self._source(key)]:
            self._advertise(keys)
            self._bring(self._choose(keys))
            return True
        self._advertise([])
        for fate in retention.plan_far(self.places, self.spec.policy, resumed):
            if not fate.keeps:
                freed = self._tier.remove(fate.key)
                mirror.forget(self.places, fate.key)
                self.report("checkpoint.removed", fate.why, fate.key, "object", bytes=freed)
        self._send_history()
        return False

    def _begin(self) -> None:
        """What is there now, and what one that was killed has left there."""
        if self._begun:
            return
        seen = mirror.refresh(self.places, self._tier)
        self._tier.abort_uploads()
        newest = max(runs.claims(self.places), default=0)
        for key in seen.torn:
            if key.attempt < newest:
                self._tier.remove(key)
        self._begun = True

    def _say_who(self) -> None:
        """The run's identity, its structure and its claims: small, and before any checkpoint that needs them."""
        for name in ("run.json", "structure.json"):
            path = self.places.persistent / name
            if path.exists() and (version := _version(path)) != self._told.get(name):
                self._tier.write(name, path.read_bytes())
                self._told[name] = version
        for number, claim in sorted(runs.claims(self.places).items()):
            if f"claim {number}" not in self._told:
                self._claim(claim)
                self._told[f"claim {number}"] = True

    def _claim(self, claim: AttemptClaim) -> None:
        """The flow claims when it begins, as far as the store answers; here what it could not say is said."""
        if not self._tier.claim(claim):
            self._leave(claim.attempt)

    def _check_owner(self) -> None:
        """Raises Fenced if another machine has claimed a newer attempt there."""
        self._claims = self._tier.claims(self._claims)
        mine = max(runs.claims(self.places), default=0)
        theirs = max(self._claims, default=0)
        if theirs > mine:
            self._leave(theirs)

    def _leave(self, attempt: int) -> None:
        """The run belongs to another machine: the flow is asked to save and leave, and nothing more is written there."""
        self._fenced = True
        atomic.write(runs.takeover_wish(self.places), b"the object tier")
        raise Fenced(f"Attempt {attempt} of run {self.spec.run} was claimed on the object tier by another machine.")

    def _bring(self, key: Key) -> None:
        started = time.monotonic()
        source = self._source(key)
        if not self._is_verified(key, source):
            return
        folder = self.places.checkpoint(source, key)
        try:
            moved = self._tier.upload(folder, self._check_owner)
            manifest = (folder / "manifest.json").read_bytes()
        except (Damaged, FileNotFoundError):
            if self._has_gone(key, source) or not self._verify(key, source):
                return
            raise
        mirror.note(self.places, key, manifest, proven=True)
        seconds = time.monotonic() - started
        self.report("checkpoint.durable", "", key, "object", bytes=moved, seconds=round(seconds, 3))

    def _send_history(self) -> None:
        """The run's history is worth a little: it never comes before a checkpoint."""
        if not self.thorough and time.monotonic() - self._history_at < HISTORY_SECONDS:
            return
        for name in HISTORY:
            path = self.places.persistent / name
            version = _version(path)
            if version is None or version == self._told.get(name) or path.stat().st_size > HISTORY_BYTES:
                continue
            self._tier.write_file(f"history/{name}", path)
            self._told[name] = version
        self._history_at = time.monotonic()


def _version(path: Path) -> tuple[int, int] | None:
    """Another value after every change; None if it is not there."""
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size
    return None
