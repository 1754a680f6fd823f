"""What is looked at between two segments, while the next one trains: the checkpoint, the GPUs, the training itself."""

import time
from typing import TYPE_CHECKING

from everstep.core.check import GateReport, Outcome
from everstep.core.checkpoint import State
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.core.gating import no_numbers
from everstep.core.segment import SegmentResult
from everstep.host import training_gate
from everstep.store import checkpoint, marks

if TYPE_CHECKING:
    from everstep.host.life import Life


def verify(life: "Life", result: SegmentResult) -> str:
    """Read a segment's checkpoint back, beside the next segment. Damage closes the gate and raises `Damaged`."""
    places = life.run.places
    tier = result.tier if result.tier in places.tiers else "local"
    folder = places.checkpoints(tier) / result.checkpoint
    structure = checkpoint.read_structure(places.persistent)
    try:
        outcome = checkpoint.verify(folder, structure=structure, run=life.run.record.run)
    except StoreUnavailable as error:  # unknown is not damaged: the copier looks again
        return str(error)
    if outcome.ok:
        marks.verified(places, result.checkpoint, tier, outcome)
        if tier == "persistent":  # the local tier was full: there it is durable already
            marks.durable(places, result.checkpoint, tier, outcome.manifest_digest)
        return f"{result.checkpoint} verified: {outcome.bytes:,} bytes"
    if not folder.exists():
        return f"{result.checkpoint} was removed by retention before it was read"
    marks.quarantine(places, result.checkpoint, tier, outcome.why)
    life.observer.report_damage(result.checkpoint)
    raise Damaged(result.checkpoint, outcome.file, outcome.why)


def check_health(life: "Life", result: SegmentResult) -> GateReport:
    """The passive gate, in line between two segments. What it says is in the lease already: it never waits."""
    report = life.health.look(result.step, result.segment)
    if report.outcome is not Outcome.not_measured or result.segment <= 1:
        life.told(report)
    return report


def check_training(life: "Life", result: SegmentResult) -> GateReport:
    """The gates on the training itself, beside the next segment. A loss that is no number closes the gate: `Damaged`."""
    with life.checking():
        places = life.run.places
        proven = any(
            State.verified in found
            for (folder, _), found in marks.states(places).items()
            if folder == result.checkpoint
        )
        report = training_gate.look(
            places, life.run.job, result, weights_finite=proven or None, heartbeats=life.beats, now=time.time()
        )
        life.told(report)
        life.health.doubt(report)
        why = no_numbers(report)
        if why:
            tier = result.tier if result.tier in places.tiers else "local"
            marks.quarantine(places, result.checkpoint, tier, why)
            life.observer.report_damage(result.checkpoint)
            raise Damaged(result.checkpoint, "metrics.jsonl", why)
        return report


def keep(life: "Life") -> None:
    """Delete what retention allows on every tier."""
    life.keep()
