"""Where an attempt starts: the newest checkpoint that verifies, on the nearest tier that holds it whole.

What does not verify is set aside by name and the one before is taken. A run that has committed checkpoints never
starts at step 0 in silence.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from everstep.core.checkpoint import Key, State, Structure, candidates
from everstep.core.errors import Damaged, NoValidCheckpoint, StoreUnavailable
from everstep.store import checkpoint, jsonl, marks, mirror
from everstep.store.layout import RunPlaces
from everstep.store.objects import NotThere

Record = Callable[..., None]


@dataclass(frozen=True)
class Start:
    """A resume point: `folder` is None only for a run without any committed checkpoint."""

    step: int
    folder: Path | None
    tier: str = ""


@dataclass(frozen=True)
class Hinted:
    """A checkpoint that MLflow names: its folder's URI, `file://` or `s3://`."""

    uri: str

    @property
    def key(self) -> Key | None:
        return Key.parse(self.uri.rstrip("/").rpartition("/")[2])


Bring = Callable[[str, Key], Path]
"""Brings the checkpoint at a URI to the local tier, proven, and says where it is. Raises NotThere, Damaged, ..."""


def choose(
    places: RunPlaces,
    resumed: Mapping[int, int],
    record: Record,
    hinted: Hinted | None = None,
    *,
    trust_marks: bool,
    bring: Bring | None = None,
    told_all: bool = True,
) -> Start:
    """The resume point of the next attempt.

    `resumed` maps claimed attempts to the steps they resumed from. `hinted` is what MLflow names: it counts when it is
    newer than all that the tiers hold. With `trust_marks` a checkpoint that this flow run has verified before is not
    read again (the child proves every byte while it loads). `bring` reaches those that are on no disk of this machine.
    Without `told_all` the object tier has not answered: then an older checkpoint may do, but not the beginning.
    Raises NoValidCheckpoint, StoreUnavailable.
    """
    search = _Search(places, record, checkpoint.read_structure(places.persistent), trust_marks, bring)
    held = {tier: checkpoint.find(places.checkpoints(tier)) for tier in places.tiers}
    _name_torn(places, held, record)
    committed = {key for keys, _ in held.values() for key in keys}
    named = hinted.key if hinted else None
    for key in candidates({*committed, *([named] if named else [])}, resumed):
        for tier in [tier for tier, (keys, _) in held.items() if key in keys]:
            if start := search.start(key, tier, places.uri(tier, key.folder)):
                return start
        if hinted and key == named and key not in committed and (start := search.start(key, "mlflow", hinted.uri)):
            return start
    if search.silent:
        raise search.silent[0]
    if committed or named or _ever_saved(places):
        raise NoValidCheckpoint(
            f"Run {places.persistent.name} has committed checkpoints, but none verifies; nothing was deleted. "
            f"Look at {places.persistent / 'marks'} for the reasons, put a good copy back, or set fresh: true."
        )
    if not told_all:
        raise StoreUnavailable(
            f"Whether {places.object} holds checkpoints of run {places.persistent.name} cannot be told now, and no other "
            "tier has one; it does not begin anew for that. Run the same command when the store answers."
        )
    return Start(0, None)


def near(places: RunPlaces, key: Key, record: Record, bring: Bring) -> Path | None:
    """A whole copy of one checkpoint on a disk of this machine, brought there if none is; None if no copy is good.

    Raises StoreUnavailable, and ValueError for what the user must mend.
    """
    search = _Search(places, record, checkpoint.read_structure(places.persistent), trust_marks=True, bring=bring)
    for tier in places.tiers:
        if key in checkpoint.find(places.checkpoints(tier))[0]:
            start = search.start(key, tier, places.uri(tier, key.folder))
            if start:
                return start.folder
    if search.silent:
        raise search.silent[0]
    return None


@dataclass
class _Search:
    """Tries one copy of a checkpoint after the other, and says of each that fails why."""

    places: RunPlaces
    record: Record
    structure: Structure | None
    trust_marks: bool
    bring: Bring | None
    silent: list[StoreUnavailable] = field(default_factory=list)

    def start(self, key: Key, tier: str, uri: str) -> Start | None:
        try:
            if tier in ("local", "persistent"):
                good = _passes(self.places, key, tier, self.structure, trust_marks=self.trust_marks)
                return Start(key.step, self.places.checkpoint(tier, key), tier) if good else None
            return self._start_far(key, tier, uri)
        except StoreUnavailable as error:  # another tier, or an older checkpoint, may do
            self.silent.append(error)
            self._say(key, tier, str(error))
        return None

    def _start_far(self, key: Key, tier: str, uri: str) -> Start | None:
        """From a copy that must be brought near first."""
        if State.quarantined in marks.states(self.places).get((key.folder, tier), set()):
            return None
        if self.bring is None:
            return None
        try:
            near = self.bring(uri, key)
        except NotThere as error:
            self._say(key, tier, f"it is there no longer: {error}")
            return None
        except Damaged as error:
            self._refuse(key, tier, str(error))
            return None
        name, job = self.places.persistent.name, self.places.persistent.parent.name
        result = checkpoint.verify(near, structure=self.structure, run=name, job=job)
        if not result.ok:
            shutil.rmtree(near)
            self._refuse(key, tier, result.why)
            return None
        if near == self.places.checkpoint("local", key):
            marks.verified(self.places, key.folder, "local", result)
        if tier == mirror.TIER:
            marks.verified(self.places, key.folder, tier, result)
        self.record("checkpoint.fetched", step=key.step, checkpoint=key.folder, tier=tier, uri=uri, bytes=result.bytes)
        return Start(key.step, near, tier)

    def _refuse(self, key: Key, tier: str, why: str) -> None:
        if tier == mirror.TIER:
            marks.quarantine(self.places, key.folder, tier, why)
        self._say(key, tier, why)

    def _say(self, key: Key, tier: str, why: str) -> None:
        self.record("checkpoint.unreadable", checkpoint=key.folder, tier=tier, text=why)


@dataclass(frozen=True)
class Unproven:
    """A checkpoint that should be there, whole and finite, and is not."""

    folder: str
    why: str


def unproven(places: RunPlaces, step: int) -> Unproven | None:
    """What is wrong with the newest checkpoint of `step`; None when one verifies on some tier."""
    structure = checkpoint.read_structure(places.persistent)
    held = {(tier, key) for tier in places.tiers for key in checkpoint.find(places.checkpoints(tier))[0]}
    newest = sorted(((key, tier) for tier, key in held if key.step == step), reverse=True)
    for key, tier in newest:
        if _passes(places, key, tier, structure, trust_marks=True):
            return None
    if not newest:
        return Unproven(Key(step, 0).folder, f"no checkpoint of step {step} was committed")
    key, tier = newest[0]
    return Unproven(key.folder, marks.reason(places, key.folder, tier, State.quarantined))


def attempts_seen(places: RunPlaces) -> set[int]:
    """The attempts that left checkpoint folders, for a run whose claims were lost."""
    return {key.attempt for tier in places.tiers for keys in checkpoint.find(places.checkpoints(tier)) for key in keys}


def _passes(places: RunPlaces, key: Key, tier: str, structure: Structure | None, *, trust_marks: bool) -> bool:
    known = marks.states(places).get((key.folder, tier), set())
    if State.quarantined in known:
        return False
    if tier == mirror.TIER:  # on the object tier it was proven before its commit; reading it again is for a resume
        return bool(known)
    if trust_marks and State.verified in known:
        return True
    result = checkpoint.verify(places.checkpoint(tier, key), structure=structure, run=places.persistent.name)
    if result.ok:
        marks.verified(places, key.folder, tier, result)
        return True
    marks.quarantine(places, key.folder, tier, result.why)
    return False


def _name_torn(places: RunPlaces, held: Mapping[str, tuple[list[Key], list[Key]]], record: Record) -> None:
    """A folder without a manifest is no checkpoint. One that had been committed has lost it: that is damage."""
    saved = saved_folders(places)
    for tier, (_, torn) in held.items():
        for key in torn if tier != mirror.TIER else ():
            if (key.folder, tier) in saved:
                marks.quarantine(places, key.folder, tier, f"{key.folder}: manifest.json is missing.")
            else:
                record("checkpoint.torn", checkpoint=key.folder, tier=tier, text=f"{key.folder} was never committed")


def saved_folders(places: RunPlaces) -> set[tuple[str, str]]:
    """The checkpoints that have been committed, as (folder, tier), from the run's journal."""
    kinds = {"checkpoint.saved": "local", "checkpoint.verified": "local", "checkpoint.durable": "persistent"}
    return {
        (event["data"]["checkpoint"], event["data"].get("tier", kinds[event["kind"]]))
        for event in jsonl.read(places.events)
        if event.get("kind") in kinds and "checkpoint" in event.get("data", {})
    }


def _ever_saved(places: RunPlaces) -> bool:
    return bool(saved_folders(places)) or any((places.persistent / "segments").glob("*/result.json"))
