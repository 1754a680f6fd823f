"""Promotion as a run sees it: what is proposed to the registry, and what is released at the end.

Nothing in here waits for MLflow without a limit, and no fault of MLflow or of the probe is one of the training.
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.core import promotion
from everstep.core.checkpoint import Key, State
from everstep.core.errors import Damaged
from everstep.core.health import Severity
from everstep.core.promotion import Candidate, Probe, Promotion, Wish
from everstep.core.recovery import Next
from everstep.host import closing, process, runs
from everstep.host.runs import Run
from everstep.store import checkpoint, digest, faults, marks
from everstep.store.layout import RunPlaces
from everstep.store.tensors import weights_digest_of

if TYPE_CHECKING:
    from everstep.host.life import Life

COMMAND = (sys.executable, "-m", "everstep.trainer.reprobe")
SLICE_SECONDS = 0.2


def candidate(run: Run, key: Key, *, digest_too: bool = False) -> Candidate | None:
    """A durable checkpoint as the registry is to know it; None if it is no longer there.

    The digest of the weights is computed with `digest_too`, which reads them; else by whoever registers it.
    """
    places = run.places
    folder = places.checkpoint("persistent", key)
    try:
        manifest = checkpoint.read_manifest(folder)
        return Candidate(
            job=run.record.name,
            run=run.record.run,
            checkpoint=key.folder,
            step=key.step,
            uri=places.uri(_most_durable(places, key), key.folder),
            manifest=digest.of_bytes(checkpoint.read_manifest_bytes(folder)),
            digest=weights_digest_of(folder) if digest_too else "",
            dataset=manifest.dataset_fingerprint or run.record.dataset_fingerprint,
            metrics=manifest.metrics,
        )
    except (Damaged, FileNotFoundError):
        return None


def promote(life: "Life") -> Promotion | None:
    """At the end of a run that is done: its best checkpoint is candidate and, if the job says so, in production.

    None for a run that has not come to its end, or whose copies have not landed. Never raises because of MLflow.
    """
    if life.run.final is not None or life.decision is None or life.decision.next is not Next.finish:
        return None
    if not closing.landed(life):
        return None
    faults.point("promote.begin")
    until = time.monotonic() + life.run.job.limits.drain
    chosen = best(life.run)
    if chosen is None:
        return None
    job = life.run.job
    refused = ""
    if job.release and (probe := reproduced(life, chosen, until)) and not probe.ok:
        refused = probe.why
    wish = Wish(candidate=chosen, release=job.release, best=job.checkpoint.best, refused=refused)
    life.promotion = life.tracker.promote(wish, until - time.monotonic())
    life.progress.say(_sentence(life.promotion, job.name))
    return life.promotion


def best(run: Run) -> Candidate | None:
    """The best of the run's verified and durable checkpoints by the job's metric, else the newest."""
    states = marks.states(run.places)
    sound = [
        key
        for key in closing.good(run.places, "persistent")
        if {State.verified, State.durable} <= states.get((key.folder, "persistent"), set())
    ]
    chosen = promotion.choose(filter(None, (candidate(run, key) for key in sound)), run.job.checkpoint.best)
    key = Key.parse(chosen.checkpoint) if chosen else None
    return candidate(run, key, digest_too=True) if key else None


def reproduced(life: "Life", chosen: Candidate, until: float) -> Probe:
    """Compute the checkpoint's loss on the fixed batch in a process of its own, which has ended `until` then."""
    places = life.run.places
    answer = places.persistent / "probe.json"
    answer.unlink(missing_ok=True)
    claim = max(runs.claims(places).values(), key=lambda one: one.attempt)
    claim = claim.model_copy(update={"resumed_from": chosen.step, "checkpoint": chosen.checkpoint})
    folder = places.checkpoints("persistent") / chosen.checkpoint
    spec, environment = life.supervisor.described(claim, folder)
    token = f"{life.supervisor.token}/probe"
    line = spec.model_dump_json().encode() + b"\n"
    log = places.persistent / "logs" / "probe.log"
    child = process.spawn([*COMMAND, str(answer)], environment, token, log, stdin=subprocess.PIPE)
    try:
        process.tell(child, line)
        status = _ended(child, until)
    finally:
        child.kill_group()
        child.wait(2.0)
        child.close()
        process.sweep(token, 0.0)
    probe = _told(answer, chosen.checkpoint)
    if probe is None:
        how = f"ended with status {status}" if status is not None else "did not end within limits.drain"
        why = f"its loss on the fixed batch could not be computed: the process {how}; its log is {log}"
        probe = Probe(checkpoint=chosen.checkpoint, ok=False, why=why)
    kind = "promotion.probe" if probe.ok else "promotion.mismatch"
    severity = Severity.low if probe.ok else Severity.high
    life.journal.record(kind, step=chosen.step, severity=severity, text=probe.why, checkpoint=chosen.checkpoint)
    return probe


def _ended(child: process.Process, until: float) -> int | None:
    """In slices, so that a cancellation of the flow is heard meanwhile."""
    while (status := child.wait(SLICE_SECONDS)) is None and time.monotonic() < until:
        continue
    return status


def _told(answer: Path, folder: str) -> Probe | None:
    with contextlib.suppress(FileNotFoundError, ValueError):
        probe = Probe.model_validate_json(answer.read_bytes())
        answer.unlink()
        return probe if probe.checkpoint == folder else None
    return None


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
