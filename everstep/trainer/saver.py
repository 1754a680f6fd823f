"""Saving beside training: snapshot -> write -> commit. A thread of each rank writes and commits in order.

One snapshot may wait while another is written; the training thread waits for a place (phase `save`). All writers go
through the same saves in the same order. After each they tell each other how it went, on a group of their own, and
rank 0 publishes the manifest only if all have written.
"""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.core.checkpoint import Key, Manifest, Structure
from everstep.core.segment import Outcome, SegmentResult
from everstep.store import atomic, faults, jsonl
from everstep.store.layout import RunPlaces
from everstep.trainer import checkpoint, failure
from everstep.trainer.failure import SaveFailed
from everstep.trainer.ranks import Ranks
from everstep.trainer.side import Side, plain
from everstep.trainer.snapshot import Snapshot
from everstep.trainer.vitals import Vitals

TRIES = 4
PAUSE = 0.25  # seconds before the second try; doubled for each further one
FLUSH = 5.0


@dataclass(frozen=True)
class Target:
    """Where checkpoints go, and what is written beside the first one."""

    places: RunPlaces
    ranks: Ranks
    structure: Structure
    environment: Mapping[str, Any]


class Saver:
    """The writer thread of one rank and its queue."""

    def __init__(self, vitals: Vitals, target: Target, side: Side | None) -> None:
        self._vitals = vitals
        self._target = target
        self._side = side
        self._queue: queue.Queue[Snapshot] = queue.Queue(maxsize=1)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot; waits while one is being written and another is waiting already."""
        while True:
            self.check()
            try:
                self._queue.put(snapshot, timeout=0.1)
                return
            except queue.Full:
                continue

    def check(self) -> None:
        """Raise what ended the writer, if anything did."""
        if self.failure is not None:
            raise self.failure

    def finish(self, seconds: float = float("inf")) -> None:
        """Wait until everything handed over is committed or given up."""
        until = time.monotonic() + seconds
        while self._queue.unfinished_tasks and self.failure is None and time.monotonic() < until:
            time.sleep(0.001)
        self.check()

    def _run(self) -> None:
        """A process edge: what ends this thread is raised again in the training thread."""
        try:
            while True:
                snapshot = self._queue.get()
                self._save(snapshot)
                self._queue.task_done()
        except BaseException as error:  # noqa: BLE001 - recorded here, raised by check()
            self.failure = error

    def _save(self, snapshot: Snapshot) -> None:
        pause = PAUSE
        for left in reversed(range(TRIES if snapshot.must else 1)):
            error, number = self._save_once(snapshot)
            if error is None:
                self._vitals.saved_step = snapshot.step
                self._vitals.told()
                self._publish(snapshot)
                return
            self._note(snapshot.step, error)
            if left:
                time.sleep(pause)
                pause *= 2
        if snapshot.must:
            raise SaveFailed(snapshot.step, error or "", number)

    def _save_once(self, snapshot: Snapshot) -> tuple[str | None, int | None]:
        """Write and commit, together with the other ranks; why it failed and the error number, or None."""
        target, rank = self._target, self._target.ranks.rank
        folder = target.places.checkpoint("local", Key(snapshot.step, self._vitals.spec.attempt))
        told = target.ranks.gather(self._write(folder, snapshot))
        verdict = next((one for one in told if one["error"] is not None), None)
        if verdict is None and rank == 0:
            verdict = _attempt(lambda: self._commit(folder, snapshot, told))
        verdict = target.ranks.gather(verdict)[0]
        if verdict is None or verdict["error"] is None:
            return None, None
        _attempt(lambda: checkpoint.remove_part(folder, rank))
        if target.ranks.gather(rank)[0] == rank:
            _attempt(folder.rmdir)
        return verdict["error"], verdict["number"]

    def _write(self, folder: Path, snapshot: Snapshot) -> dict[str, Any]:
        target = self._target
        entries: list[Any] = []

        def write() -> None:
            faults.point("save.begin")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            entries.extend(
                checkpoint.write_part(
                    folder, snapshot, target.ranks.rank, target.ranks.size, target.environment, self._vitals.moved
                )
            )

        return _attempt(write) | {"files": [entry.model_dump() for entry in entries]}

    def _commit(self, folder: Path, snapshot: Snapshot, told: list[dict[str, Any]]) -> None:
        spec, target = self._vitals.spec, self._target
        if self._side is not None and not self._side.flush(FLUSH):
            sys.stderr.write("everstep: metrics are late; the checkpoint is committed before they are written\n")
        self._write_structure(spec.restore is None)
        atomic.sync_folder(folder.parent)
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
        checkpoint.commit(folder, manifest)

    def _write_structure(self, anew: bool) -> None:
        """Once for a run; again if there was no checkpoint to go on from, since the program may have been mended."""
        path, data = self._target.places.structure, self._target.structure.to_json().encode()
        if not path.exists() or (anew and path.read_bytes() != data):
            atomic.write(path, data)

    def _publish(self, snapshot: Snapshot) -> None:
        """The segment's result, after its checkpoint was committed. A disk that hesitates is asked again."""
        if self._target.ranks.rank != 0 or not snapshot.segment:
            return
        faults.point("segment.end")
        attempt = self._vitals.spec.attempt
        result = SegmentResult(
            attempt=attempt,
            segment=snapshot.segment,
            step=snapshot.step,
            outcome=Outcome.done,
            checkpoint=Key(snapshot.step, attempt).folder,
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
            if _attempt(write)["error"] is None:
                return
            time.sleep(pause)
        write()

    def _note(self, step: int, error: str) -> None:
        """Rank 0 keeps a row of what went wrong; training goes on."""
        sys.stderr.write(f"everstep: the checkpoint of step {step} could not be written: {error}\n")
        if self._target.ranks.rank == 0:
            row = json.dumps({"time": time.time(), "step": step, "error": error})
            _attempt(lambda: jsonl.append(self._target.places.persistent / "save-errors.jsonl", [row]))


def _attempt(act: Callable[[], Any]) -> dict[str, Any]:
    """What a disk refuses is a result here, which the ranks tell each other; other errors end the writer."""
    try:
        act()
    except OSError as error:
        return {"error": failure.describe(error), "number": error.errno}
    return {"error": None, "number": None}
