"""Where an attempt starts: the newest checkpoint that verifies, on the nearest tier that holds it whole.

What does not verify is set aside by name and the one before is taken. A run that has committed checkpoints never
starts at step 0 in silence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.core.checkpoint import Key, State, Structure, candidates
from everstep.core.errors import NoValidCheckpoint, StoreUnavailable
from everstep.store import checkpoint, jsonl, marks, transfer
from everstep.store.layout import RunPlaces

Record = Callable[..., None]


@dataclass(frozen=True)
class Start:
    """A resume point: `folder` is None only for a run without any committed checkpoint."""

    step: int
    folder: Path | None
    tier: str = ""


def choose(
    places: RunPlaces, resumed: Mapping[int, int], record: Record, hinted: Path | None = None, *, trust_marks: bool
) -> Start:
    """The resume point of the next attempt.

    `resumed` maps claimed attempts to the steps they resumed from. `hinted` is the folder that MLflow names: it counts
    when it is newer than all that the tiers hold, and is brought to the local one. With `trust_marks` a checkpoint that this flow run
    has verified before is not read again (the child proves every byte while it loads). Raises NoValidCheckpoint.
    """
    structure = checkpoint.read_structure(places.persistent)
    held = {tier: checkpoint.find(places.checkpoints(tier)) for tier in places.tiers}
    _name_torn(places, held, record)
    committed = {key for keys, _ in held.values() for key in keys}
    silent: list[StoreUnavailable] = []
    best = candidates(committed, resumed)
    if hinted is not None and (key := Key.parse(hinted.name)) and candidates({key, *best}, resumed)[:1] != best[:1]:
        result = checkpoint.verify(hinted, structure=structure, run=places.persistent.name)
        if result.ok:
            near = places.checkpoint("local", key)
            transfer.copy(hinted, near)
            return Start(key.step, near, "local")
        record("checkpoint.unreadable", checkpoint=key.folder, tier="mlflow", text=result.why)
    for key in best:
        for tier, (keys, _) in held.items():
            if key not in keys:
                continue
            try:
                if _passes(places, key, tier, structure, trust_marks=trust_marks):
                    return Start(key.step, places.checkpoint(tier, key), tier)
            except StoreUnavailable as error:  # another tier, or an older checkpoint, may do
                silent.append(error)
                record("checkpoint.unreadable", checkpoint=key.folder, tier=tier, text=str(error))
    if silent:
        raise silent[0]
    if committed or _ever_saved(places):
        raise NoValidCheckpoint(
            f"Run {places.persistent.name} has committed checkpoints, but none verifies; nothing was deleted. "
            f"Look at {places.persistent / 'marks'} for the reasons, put a good copy back, or set fresh: true."
        )
    return Start(0, None)


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
        for key in torn:
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
