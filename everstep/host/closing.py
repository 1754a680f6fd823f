"""The end of a flow run: what is drained, proved, counted and written down, for each way in which it can end."""

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.core.checkpoint import Key, State, candidates
from everstep.core.chronicle import Chronicle
from everstep.core.errors import StoreUnavailable
from everstep.core.health import Severity
from everstep.core.segment import Outcome
from everstep.host import farewell, history, outcome, reporting, runs
from everstep.report import text
from everstep.store import atomic, checkpoint, faults, marks
from everstep.store.layout import RunPlaces
from everstep.store.tensors import weights_digest_of

if TYPE_CHECKING:
    from everstep.host.life import Life

PATIENCE_SECONDS = 10.0
QUICK_SECONDS = 2.0
"""After a stop signal little time is left: a Prefect worker kills 30 s after it, and the child had 25 of them."""


def completed(life: "Life") -> dict[str, Any]:
    """All steps are done: every copy lands, the last checkpoint is durable and proved, then it is written down.

    Raises StoreUnavailable where a tier that the job requires has not taken it: training is done, the run is not.
    """
    places = life.run.places
    if not landed(life):
        raise StoreUnavailable(
            f"The steps are done, but the persistent tier {places.persistent} did not take the last checkpoint "
            f"within {life.run.job.limits.drain:.0f} s; mend the tier and run the same command to finish the copy."
        )
    life.observer.look()
    life.keep()
    if life.run.job.tiers.object_required and (missing := _behind(places)):
        _write_down(life, "degraded", tracker_seconds=15.0)
        raise StoreUnavailable(_degraded(life, missing))
    return _write_down(life, "completed", tracker_seconds=15.0)


def landed(life: "Life") -> bool:
    """All steps are done: whether every copy has landed within the job's limit. Waited for once."""
    if life.all_landed is None:
        life.journal.record("flow.finalizing")
        life.reporter.begin()
        places = life.run.places
        if places.object:
            marks.promote(places, good(places, "local")[:1])
        until = time.monotonic() + life.run.job.limits.drain
        life.all_landed = _drain(life) and _has_last(life)
        drain_object(life, until - time.monotonic())
    return life.all_landed


def _has_last(life: "Life") -> bool:
    """Whether the last checkpoint is durable on the persistent tier: by its mark, not by a copier's exit."""
    places, known = life.run.places, marks.states(life.run.places)
    keys = [key for key in good(places, "persistent") if State.durable in known.get((key.folder, "persistent"), set())]
    return bool(keys) and keys[0].step >= (life.end.step or 0 if life.end else 0)


def _degraded(life: "Life", missing: str) -> str:
    job, places = life.run.job, life.run.places
    return (
        f"The steps are done and {missing} is on the persistent tier, but the object tier {places.object} did not take it "
        f"within {job.limits.drain:.0f} s; when it answers, run the same command: only the copy is made then. "
        "Where the run is complete without it, set tiers.object_required: false."
    )


def stopped(life: "Life") -> dict[str, Any]:
    """Stopped on request without a limit of time: copies land first."""
    life.journal.record("flow.finalizing")
    life.reporter.begin()
    until = time.monotonic() + life.run.job.limits.drain
    _drain(life)
    drain_object(life, until - time.monotonic())
    life.observer.look()
    return _write_down(life, "stopped", tracker_seconds=5.0)


def failed(life: "Life") -> dict[str, Any]:
    """The run cannot go on by itself."""
    life.journal.record("flow.finalizing")
    life.reporter.begin()
    life.supervisor.drain(30.0)
    drain_object(life, 30.0)
    life.observer.look()
    return _write_down(life, "failed", tracker_seconds=5.0)


def interrupted(life: "Life", error: BaseException) -> None:
    """The flow is being unwound: by a signal, after which the child has stopped, or by an error of ours."""
    if life.closed or life.run.final is not None:
        return
    signalled = not isinstance(error, Exception)
    if signalled:
        with contextlib.suppress(BaseException):  # a second signal: whoever sends it wants no copies, only the end
            life.supervisor.settle()
    life.supervisor.close()  # the ranks save before anything is counted
    end = life.supervisor.last_end
    status = "stopped" if signalled and (end is None or end.outcome is not Outcome.failed) else "failed"
    _write_down(life, status, tracker_seconds=QUICK_SECONDS if signalled else 5.0)


def _drain(life: "Life") -> bool:
    """Let every copy land, and say what is waited for; whether all did in the time that the job gives."""
    until = time.monotonic() + life.run.job.limits.drain
    while (left := until - time.monotonic()) > 0:
        slice_over = time.monotonic() + min(PATIENCE_SECONDS, left)
        if life.supervisor.drain(min(PATIENCE_SECONDS, left)):
            return True
        if time.monotonic() < slice_over - 1.0:
            return False
        life.progress.say(f"waiting for copies to {life.run.places.persistent}, for {max(0.0, left):.0f} s more")
    return False


def drain_object(life: "Life", seconds: float) -> None:
    """Let the newest checkpoints come to the object tier. A store that is away delays the end, but is no reason to fail:
    what is missing there is said, and the next flow run of this job brings it.
    """
    places, until = life.run.places, time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not life.supervisor.drain_object(min(PATIENCE_SECONDS, left)):
        life.progress.say(f"waiting for copies to {places.object}, for {max(0.0, left):.0f} s more")
    if missing := _behind(places):
        text = (
            f"{places.object} has not taken {missing} yet; it is on the persistent tier, and the same command copies it"
        )
        life.journal.record("object.behind", severity=Severity.medium, text=text, checkpoint=missing)
        life.progress.say(text)


def _behind(places: RunPlaces) -> str:
    """The newest checkpoint, if there is an object tier that has not taken it; else empty."""
    newest = max(good(places, "persistent"), default=None)
    if not places.object or newest is None:
        return ""
    there = State.durable in marks.states(places).get((newest.folder, "object"), set())
    return "" if there else newest.folder


def again(life: "Life") -> dict[str, Any]:
    """A finished run: nothing to do but what is left to copy, and the same line.

    Raises StoreUnavailable where the object tier still lacks what the job requires of it.
    """
    assert life.run.final is not None
    places, final = life.run.places, life.run.final
    life.progress.say(f"run {life.run.record.run} is complete: nothing is left to train")
    if _behind(places):
        drain_object(life, life.run.job.limits.drain)
    if final["status"] == "degraded":
        if (missing := _behind(places)) and life.run.job.tiers.object_required:
            outcome.deliver(final)
            raise StoreUnavailable(_degraded(life, missing))
        if life.run.owned:
            final = _completed_late(life, final, missing)
    if life.run.owned:
        life.tracker.replay(life.run.job.limits.drain)
    past = history.read(places)
    promoted = life.tracker.promotion or life.promotion
    if promoted is not None:  # it had to wait for MLflow when the run ended, or was not wished then
        final = final | {"promotion": promoted.model_dump(mode="json")}
        atomic.write(life.run.places.final, (json.dumps(final) + "\n").encode())
        life.far.tell_end()
        reporting.attempt(life.reporter, past, final, life.journal.record, life.publish)
    outcome.deliver(final)
    _take_leave(life, final, past)
    return final


def _completed_late(life: "Life", final: dict[str, Any], missing: str) -> dict[str, Any]:
    """The copy that a finished run lacked has been made, or the job requires it no longer: now it is complete."""
    places, final = life.run.places, final | {"status": "completed"}
    step = int(final["step"])
    life.journal.record("object.complete", step=step, status="completed", missing=missing)
    life.tracker.object_tier(missing)
    if (durable := newest_on(places, "persistent")) and not missing:
        life.tracker.checkpoint(places.uri("object", durable.name), step)
    life.tracker.wake()
    atomic.write(places.final, (json.dumps(final) + "\n").encode())
    life.far.tell_end()
    reporting.attempt(life.reporter, history.read(places), final, life.journal.record, life.publish)
    return final


def _take_leave(life: "Life", final: Mapping[str, Any], past: Chronicle) -> None:
    for line in farewell.lines(final, past.last_metrics, past.last_shown, life.run.job, life.flow_run):
        life.progress.say(line)


def _write_down(life: "Life", status: str, tracker_seconds: float) -> dict[str, Any]:
    faults.point("flow.report")
    places = life.run.places
    step = committed_step(places)
    durable = newest_on(places, "persistent")
    quick = tracker_seconds <= QUICK_SECONDS
    told = {"status": status, "step": step, "checkpoint": durable.as_uri() if durable else None}
    life.tracker.artifacts(reporting.draft(life.reporter, told, life.journal.record, quick=quick))
    life.tracker.finish(status, durable)
    if durable and places.object:
        missing = _behind(places)
        life.tracker.object_tier(missing)
        if not missing:
            life.tracker.checkpoint(places.uri("object", durable.name), step)
    life.tracker.close(tracker_seconds)
    promoted = life.tracker.promotion or life.promotion
    life.journal.record("flow.ended", step=step, status=status)
    past = history.read(places)
    spent = past.account(time.time())
    final = {
        "run": life.run.record.run,
        "status": status,
        "step": step,
        "run_dir": str(places.persistent),
        "checkpoint": durable.as_uri() if durable else None,
        "weights": weights_digest_of(durable) if durable and status != "failed" else None,
        "attempts": len(past.claims),
        "restarts": past.restarts,
        "resumed_from": life.resumed_from,
        "quarantined": quarantined(places),
        "ettr": round(spent.ettr, 4),
        "buckets": {bucket.value: round(seconds, 3) for bucket, seconds in spent.buckets.items()},
        "mlflow_run": life.tracker.run_id,
        "promotion": promoted.model_dump(mode="json") if promoted else None,
        "report": str(reporting.html_file(places)),
        "metrics": {name: value if math.isfinite(value) else repr(value) for name, value in past.last_metrics.items()},
        "finished_early": bool(life.end and life.end.finished_early),
    }
    if not reporting.attempt(life.reporter, past, final, life.journal.record, life.publish, quick=quick):
        final["report"] = str(places.report)
    try:
        atomic.write(places.report, text.render(past, final).encode())
        atomic.write(places.final, (json.dumps(final) + "\n").encode())
    except OSError as error:  # the checkpoints count; the next flow run of this job writes the rest again
        life.progress.say(f"{places.persistent} takes no report now ({error.strerror}); the result is printed only")
    else:
        if not quick and not _behind(places):
            life.far.tell_end()
    outcome.deliver(final)
    life.closed = True
    if status != "failed":
        _take_leave(life, final, past)
    return final


def committed_step(places: RunPlaces) -> int:
    """The newest committed step that may be resumed from, as far as is known; 0 if there is none."""
    return max((key.step for tier in places.tiers for key in good(places, tier)), default=0)


def proven_step(places: RunPlaces) -> int:
    """The newest step whose checkpoint has been verified on some tier: what counts as progress. 0 if there is none."""
    states = marks.states(places)
    proven = (
        key.step
        for tier in places.tiers
        for key in good(places, tier)
        if State.verified in states.get((key.folder, tier), set())
    )
    return max(proven, default=0)


def newest_on(places: RunPlaces, tier: str) -> Path | None:
    """The newest good checkpoint's folder on a tier."""
    key = max(good(places, tier), default=None)
    return places.checkpoint(tier, key) if key else None


def quarantined(places: RunPlaces) -> list[str]:
    """The URIs of what has been set aside, in order."""
    return [
        places.uri(tier, folder)
        for (folder, tier), states in sorted(marks.states(places).items())
        if State.quarantined in states
    ]


def good(places: RunPlaces, tier: str) -> list[Key]:
    """The committed checkpoints of a tier that may be resumed from, as far as is known, newest first."""
    keys, _ = checkpoint.find(places.checkpoints(tier))
    states = marks.states(places)
    resumed = {number: claim.resumed_from for number, claim in runs.claims(places).items()}
    return [key for key in candidates(keys, resumed) if State.quarantined not in states.get((key.folder, tier), set())]
