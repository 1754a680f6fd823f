"""The loss on the fixed batch, computed once more from a checkpoint by a process of its own, before a release."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.core.health import Severity
from everstep.core.promotion import Candidate, Probe
from everstep.host import process, runs

if TYPE_CHECKING:
    from everstep.host.life import Life

COMMAND = (sys.executable, "-m", "everstep.trainer.reprobe")
SLICE_SECONDS = 0.2
_ENDED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM)


def reproduced(life: "Life", chosen: Candidate, folder: Path, until: float) -> Probe:
    """Compute the loss of the checkpoint in `folder`; the process has ended `until` then (`time.monotonic`).

    Unknown is not failed: without an answer by then the probe is not `known`, and no verdict on the checkpoint.
    """
    places = life.run.places
    answer = places.persistent / "probe.json"
    answer.unlink(missing_ok=True)
    claim = max(runs.claims(places).values(), key=lambda one: one.attempt)
    claim = claim.model_copy(update={"resumed_from": chosen.step, "checkpoint": chosen.checkpoint})
    spec, environment = life.supervisor.described(claim, folder.absolute())
    token = f"{life.supervisor.token}/probe"
    line = spec.model_dump_json().encode() + b"\n"
    log = places.persistent / "logs" / "probe.log"
    child = process.spawn(
        [*COMMAND, str(answer)], environment, token, log, stdin=subprocess.PIPE, death_signal=signal.SIGKILL
    )
    try:
        process.tell(child, line)
        status = _ended(child, until)
    finally:
        child.kill_group()
        child.wait(2.0)
        child.close()
        process.sweep(token, 0.0)
    probe = _told(answer, chosen.checkpoint) or _without_answer(status, chosen.checkpoint, log)
    kind = "promotion.probe" if probe.ok else "promotion.mismatch" if probe.known else "promotion.unproven"
    severity = Severity.low if probe.ok else Severity.high if probe.known else Severity.medium
    life.journal.record(kind, step=chosen.step, severity=severity, text=probe.why, checkpoint=chosen.checkpoint)
    return probe


def _ended(child: process.Process, until: float) -> int | None:
    """In slices, so that a cancellation of the flow is heard meanwhile."""
    while (status := child.wait(SLICE_SECONDS)) is None and time.monotonic() < until:
        continue
    return status


def _without_answer(status: int | None, folder: str, log: Path) -> Probe:
    known = status is not None and status not in _ENDED_BY_OTHERS
    how = "did not end within limits.drain" if status is None else f"ended with status {status}"
    why = f"its loss on the fixed batch could not be computed: the process {how}; its log is {log}"
    return Probe(checkpoint=folder, ok=False, known=known, why=why)


def _told(answer: Path, folder: str) -> Probe | None:
    with contextlib.suppress(FileNotFoundError, ValueError):
        probe = Probe.model_validate_json(answer.read_bytes())
        answer.unlink()
        return probe if probe.checkpoint == folder else None
    return None
