"""One save, from a filled buffer to a committed checkpoint: together with the other ranks, by the writer process.

All ranks go through the same saves in the same order. After each part they tell each other how it went, on a group of their
own, and rank 0 has the manifest published only if all have written.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from everstep.core.checkpoint import Key, Manifest, SaveCost, Structure
from everstep.core.segment import Outcome, SegmentResult
from everstep.store import atomic, faults, jsonl
from everstep.store.layout import RunPlaces
from everstep.trainer import checkpoint, failure
from everstep.trainer.buffers import Buffer
from everstep.trainer.copying import Copying
from everstep.trainer.ranks import Ranks
from everstep.trainer.scribe import Refused, Scribe, WriterDied
from everstep.trainer.side import Side, plain
from everstep.trainer.snapshot import Plan, Snapshot
from everstep.trainer.vitals import Vitals

PAUSE = 0.25  # seconds before a segment's result is written a second time; doubled for each further one
FLUSH = 5.0


@dataclass(frozen=True)
class Target:
    """Where checkpoints go, and what is written beside the first one."""

    places: RunPlaces
    ranks: Ranks
    structure: Structure
    environment: Mapping[str, Any]


@dataclass
class Save:
    """One save on its way. Without a buffer it was given up before it began: `why`."""

    snapshot: Snapshot
    plan: Plan | None = None
    buffer: Buffer | None = None
    copying: Copying | None = None
    why: str = ""
    overlapped: bool = False
    copied: float = 0.0
    waited: float = 0.0
    fenced: float = 0.0
    tier: str = "local"
    began: float = field(default_factory=time.monotonic)


class Verdict(NamedTuple):
    """How a save went for all ranks: why it failed, the error number, and whether another try may differ."""

    error: str | None = None
    number: int | None = None
    again: bool = False


class Committer:
    """Commits the saves of one rank; for the saver's thread alone. `moved` is told of every piece that was written."""

    def __init__(
        self, vitals: Vitals, target: Target, side: Side | None, scribe: Scribe, moved: Callable[[int], None]
    ) -> None:
        self._vitals = vitals
        self._target = target
        self._side = side
        self._scribe = scribe
        self._moved = moved
        self._structure_written = False

    def once(self, save: Save) -> Verdict:
        """Write and commit, together with the other ranks.

        A full or read-only local tier sends the next try to the persistent one. An optional save is tried again only
        where another try differs: there, or with a new writer.
        """
        target, rank = self._target, self._target.ranks.rank
        key = Key(save.snapshot.step, self._vitals.spec.attempt)
        folder = target.places.checkpoint(save.tier, key)
        told = target.ranks.gather(self._write(folder, save))
        verdict = next((one for one in told if one["error"] is not None), None)
        if verdict is None and rank == 0:
            verdict = attempt(lambda: self._commit(folder, save, told))
            if verdict["error"] is not None:  # before any rank takes its files back
                attempt(lambda: checkpoint.withdraw(folder))
        verdict = target.ranks.gather(verdict)[0]
        if verdict is None or verdict["error"] is None:
            return Verdict()
        attempt(lambda: checkpoint.remove_part(folder, rank))
        if target.ranks.gather(rank)[0] == rank:
            attempt(folder.rmdir)
        again = verdict["again"]
        if verdict["number"] in failure.SPACE:
            again = again or save.tier == "local"
            save.tier = "persistent"
        return Verdict(verdict["error"], verdict["number"], again)

    def _write(self, folder: Path, save: Save) -> dict[str, Any]:
        target = self._target
        if save.why or save.plan is None or save.buffer is None:
            return {"error": save.why, "number": None, "again": False, "files": []}
        files = checkpoint.files_of(save.plan, save.snapshot, target.ranks.rank, target.ranks.size, target.environment)
        buffer, entries = save.buffer, []

        def write() -> None:
            entries.extend(self._scribe.write(target.ranks.rank, str(folder), files, buffer, self._moved))

        return attempt(write) | {"files": entries}

    def _commit(self, folder: Path, save: Save, told: list[dict[str, Any]]) -> None:
        spec, target, snapshot = self._vitals.spec, self._target, save.snapshot
        if self._side is not None and not self._side.flush(FLUSH):
            sys.stderr.write("everstep: metrics are late; the checkpoint is committed before they are written\n")
        self._write_structure(spec.restore is None)
        manifest = Manifest(
            job=spec.name,
            run=spec.run,
            attempt=spec.attempt,
            step=snapshot.step,
            world_size=target.ranks.size,
            parent_step=spec.resumed_from,
            samples=snapshot.samples,
            dataset_fingerprint=spec.dataset_fingerprint,
            code_version=spec.code_version,
            time=snapshot.time,
            metrics=plain(snapshot.metrics),
            files=tuple(checkpoint.files(told)),
        )
        self._publish(folder, manifest.to_json(), save)

    def _publish(self, folder: Path, manifest: str, save: Save) -> None:
        """A writer that died may have published the manifest without saying so: another one does it again, the same."""
        try:
            self._scribe.commit(self._target.ranks.rank, str(folder), manifest)
        except WriterDied as died:
            self.note(save, str(died))
            self._scribe.commit(self._target.ranks.rank, str(folder), manifest)
            checkpoint.remove_drafts(folder)

    def _write_structure(self, anew: bool) -> None:
        """Once for a run; again if there was no checkpoint to go on from, since the program may have been mended."""
        if self._structure_written:
            return
        path, data = self._target.places.structure, self._target.structure.to_json().encode()
        if not path.exists() or (anew and path.read_bytes() != data):
            atomic.write(path, data)
        self._structure_written = True

    def publish(self, save: Save) -> None:
        """The segment's result, after its checkpoint was committed. A disk that hesitates is asked again."""
        snapshot = save.snapshot
        if self._target.ranks.rank != 0 or not snapshot.segment:
            return
        faults.point("segment.end")
        number = self._vitals.spec.attempt
        result = SegmentResult(
            attempt=number,
            segment=snapshot.segment,
            step=snapshot.step,
            outcome=Outcome.done,
            checkpoint=Key(snapshot.step, number).folder,
            tier=save.tier,
            time=time.time(),
            metrics=snapshot.metrics,
            shown=snapshot.shown,
            loss=None if snapshot.loss is None else float(snapshot.loss),
        )
        path = self._target.places.result(snapshot.segment)
        data = json.dumps(plain(result.model_dump())).encode() + b"\n"

        def write() -> None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic.write(path, data)

        for pause in (PAUSE, 2 * PAUSE, 4 * PAUSE):
            if attempt(write)["error"] is None:
                return
            time.sleep(pause)
        write()

    def record(self, save: Save, seconds: float, held: int) -> None:
        """Rank 0 keeps a row of what a save cost."""
        if self._target.ranks.rank != 0 or save.plan is None:
            return
        cost = SaveCost(
            attempt=self._vitals.spec.attempt,
            step=save.snapshot.step,
            time=time.time(),
            bytes=save.plan.size,
            copy_seconds=save.copied,
            wait_seconds=save.waited,
            fence_seconds=save.fenced,
            write_seconds=seconds,
            overlapped=save.overlapped,
            held=held,
        )
        attempt(lambda: jsonl.append(self._target.places.saves, [cost.model_dump_json()]))

    def note(self, save: Save, error: str) -> None:
        """Rank 0 keeps a row of what went wrong; training goes on."""
        step = save.snapshot.step
        sys.stderr.write(f"everstep: the checkpoint of step {step} could not be written: {error}\n")
        if self._target.ranks.rank == 0:
            row = json.dumps({"time": time.time(), "step": step, "error": error})
            attempt(lambda: jsonl.append(self._target.places.persistent / "save-errors.jsonl", [row]))


def attempt(act: Callable[[], Any]) -> dict[str, Any]:
    """What a disk refuses is a result here, which the ranks tell each other; other errors end the writer."""
    try:
        act()
    except WriterDied as error:
        return {"error": str(error), "number": None, "again": True}
    except Refused as error:
        return {"error": str(error), "number": error.errno, "again": False}
    except OSError as error:
        return {"error": failure.describe(error), "number": error.errno, "again": False}
    return {"error": None, "number": None, "again": False}
