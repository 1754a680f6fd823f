"""Promotion as a run sees it: what is proposed to the registry, and what is released at the end.

Nothing in here waits for MLflow or a store without a limit, and no fault of theirs, or of the probe, is one of the
training.
"""

import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.core import promotion
from everstep.core.checkpoint import Key, State
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.core.promotion import Candidate, Promotion, Wish
from everstep.core.recovery import Next
from everstep.host import closing, probing, resume
from everstep.host.runs import Run
from everstep.store import checkpoint, digest, faults, marks
from everstep.store.layout import RunPlaces
from everstep.store.tensors import weights_digest_of

if TYPE_CHECKING:
    from everstep.host.life import Life


def candidate(run: Run, key: Key) -> Candidate | None:
    """A durable checkpoint as the registry is to know it; None if it is no longer there.

    It has no digest of its weights yet: whoever reads them computes it.
    """
    places = run.places
    try:
        folder = next(
            places.checkpoint(tier, key)
            for tier in ("persistent", "object")
            if tier in places.tiers and checkpoint.manifest_digest(places.checkpoint(tier, key))
        )
        manifest = checkpoint.read_manifest(folder)
        return Candidate(
            job=run.record.name,
            run=run.record.run,
            checkpoint=key.folder,
            step=key.step,
            uri=places.uri(_most_durable(places, key), key.folder),
            manifest=digest.of_bytes(checkpoint.read_manifest_bytes(folder)),
            dataset=manifest.dataset_fingerprint or run.record.dataset_fingerprint,
            metrics=manifest.metrics,
        )
    except (Damaged, FileNotFoundError, StopIteration):
        return None


def promote(life: "Life") -> Promotion | None:
    """At the end of a run that is done: its best checkpoint is candidate and, if the job says so, in production.

    A run that was complete before, and is only now to be released, is. None for a run that has not come to its end,
    or whose copies have not landed, or in which nothing is left to do. Never raises because of MLflow or a store.
    """
    late = life.run.final is not None
    if late:
        if not _is_owed(life.run) or life.tracker.owes_release:
            return None
        life.far.look()
        life.tracker.wake()
    elif life.decision is None or life.decision.next is not Next.finish or not closing.landed(life):
        return None
    faults.point("promote.begin")
    try:
        life.promotion = _promoted(life, time.monotonic() + life.run.job.limits.drain)
    finally:
        life.reading = ""
    if life.promotion is not None:
        life.progress.say(_sentence(life.promotion, life.run.job.name))
    return life.promotion


def _is_owed(run: Run) -> bool:
    """Whether a complete run is to be released and has not been. What was refused is judged again: it may be well now."""
    told = (run.final or {}).get("promotion") or {}
    return run.job.release and run.owned and told.get("status") != "production"


def _promoted(life: "Life", until: float) -> Promotion | None:
    job = life.run.job
    try:
        chosen, folder = _brought(life, until)
    except (StoreUnavailable, ValueError) as error:  # a store that is away, or keys that a person must mend
        return _left_for_later(life, str(error))
    if chosen is None or folder is None:
        return None
    refused = unproven = ""
    if job.release:
        probe = probing.reproduced(life, chosen, folder, until)
        refused, unproven = (probe.why, "") if probe.known else ("", f"{probe.why}; run the same command again.")
        chosen = _kept_far(life, chosen, until) if probe.ok else chosen
    wish = Wish(candidate=chosen, release=job.release, best=job.checkpoint.best, refused=refused, unproven=unproven)
    return life.tracker.promote(wish, until - time.monotonic())


def best(run: Run, without: Collection[str] = ()) -> Candidate | None:
    """The best of the run's checkpoints that are verified and durable by the job's metric, else the newest.

    On the object tier a commit says both: it comes after the proof of every file.
    """
    states = marks.states(run.places)
    enough = {"persistent": {State.verified, State.durable}, "object": {State.durable}}
    sound = {
        key
        for tier in enough.keys() & run.places.tiers.keys()
        for key in closing.good(run.places, tier)
        if enough[tier] <= states.get((key.folder, tier), set()) and key.folder not in without
    }
    return promotion.choose(filter(None, (candidate(run, key) for key in sound)), run.job.checkpoint.best)


def _brought(life: "Life", until: float) -> tuple[Candidate | None, Path | None]:
    """The best checkpoint with the digest of its weights, and where it stands whole on a disk of this machine.

    One that turns out to be damaged is set aside, and the next best one is taken.
    """

    def bring(uri: str, key: Key) -> Path:
        return life.far.bring(uri, key, until)

    lost: set[str] = set()
    while (chosen := best(life.run, lost)) and (key := Key.parse(chosen.checkpoint)):
        life.reading = chosen.checkpoint  # retention leaves it where it is
        folder = resume.near(life.run.places, key, life.journal.record, bring)
        if folder is not None:
            return chosen.model_copy(update={"digest": weights_digest_of(folder)}), folder
        lost.add(chosen.checkpoint)
    return None, None


def _left_for_later(life: "Life", why: str) -> Promotion | None:
    chosen = best(life.run)
    if chosen is None:
        return None
    why = f"{why.rstrip('.')}; run the same command again to finish it."
    return Wish(candidate=chosen, release=life.run.job.release).ended("waiting", why)


def _kept_far(life: "Life", chosen: Candidate, until: float) -> Candidate:
    """What may go into production is kept on the object tier for good, and is named there if it arrives in time."""
    places, key = life.run.places, Key.parse(chosen.checkpoint)
    if not places.object or key is None:
        return chosen
    marks.promote(places, [key])
    if _most_durable(places, key) != "object":
        closing.drain_object(life, until - time.monotonic())
    return chosen.model_copy(update={"uri": places.uri(_most_durable(places, key), key.folder)})


def _most_durable(places: RunPlaces, key: Key) -> str:
    there = "object" in places.tiers and State.durable in marks.states(places).get((key.folder, "object"), set())
    return "object" if there else "persistent"


def _sentence(done: Promotion, name: str) -> str:
    what = f"{name} version {done.version} ({done.checkpoint})"
    if done.status == "production":
        before = f", in place of version {done.previous}" if done.previous else ""
        return f"released: {what} is in production{before}"
    if done.status == "candidate":
        return f"registered: {what} is candidate"
    return f"not released: {done.reason}" if done.status == "refused" else f"not promoted yet: {done.reason}"
