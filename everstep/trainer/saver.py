"""Saving beside training: snapshot -> write -> commit.

The training thread stands still only for the copy of its state into a shared buffer (`copying`), often not even for that.
A thread of each rank hands buffers to the rank's writer process in order. All ranks go through the same saves in the same
order; after each they tell each other how it went, on a group of their own, and rank 0 has the manifest published only if
all have written. Two snapshots exist at most: a third waits for a place (phase `save`), or is given up if nothing moves.
"""

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from everstep.core.checkpoint import Key, Manifest, SaveCost, Structure
from everstep.core.segment import Outcome, Phase, SegmentResult
from everstep.store import atomic, faults, jsonl
from everstep.store.layout import RunPlaces
from everstep.trainer import checkpoint, failure, snapshot, tree
from everstep.trainer.buffers import Buffer, Pool
from everstep.trainer.copying import Copying
from everstep.trainer.failure import SaveFailed
from everstep.trainer.ranks import Ranks
from everstep.trainer.scribe import Refused, Scribe, WriterDied
from everstep.trainer.side import Side, plain
from everstep.trainer.snapshot import Placed, Plan, Snapshot
from everstep.trainer.vitals import Vitals

TRIES = 4
PAUSE = 0.25  # seconds before the second try; doubled for each further one
FLUSH = 5.0
PATIENCE = 5.0  # seconds without any progress of the writer after which an optional save is given up
OVERLAP = 8 << 20  # bytes; less is copied faster than another thread is woken
TORN = "the program changed its parameters or its optimizer's state outside of optimizer.step(), beside the copy"


@dataclass(frozen=True)
class Target:
    """Where checkpoints go, and what is written beside the first one."""

    places: RunPlaces
    ranks: Ranks
    structure: Structure
    environment: Mapping[str, Any]


@dataclass
class _Save:
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


class Saver:
    """The saves of one rank: `take` and `fence` in the training thread, the rest in a thread of its own."""

    def __init__(
        self,
        vitals: Vitals,
        target: Target,
        side: Side | None,
        *,
        scribe: Scribe | None = None,
        pinned: bool = False,
        later: Callable[[Placed, Tensor], bool] | None = None,
        threads: int = 1,
    ) -> None:
        """`later` says which tensors only the optimizer's step changes; without it everything is copied at once."""
        self._vitals = vitals
        self._target = target
        self._side = side
        self._scribe = scribe or Scribe()
        self._pool = Pool(pinned=pinned)
        self._later = later or (lambda _placed, _tensor: False)
        self._helpers = threads - 1
        self._hands = ThreadPoolExecutor(max(1, threads - 1), "copying")
        self._may_overlap = later is not None and not self._marker.exists()
        self._proven = False
        self._proof: Copying | None = None
        self._open: _Save | None = None
        self._queue: queue.SimpleQueue[_Save] = queue.SimpleQueue()
        self._given = self._done = 0
        self._moved_at = time.monotonic()
        self._structure_written = False
        self._told_of_memory = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether a snapshot could be taken now without waiting."""
        return self._pool.free

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Have a buffer for such a state made, beside the training: the pages of the first one cost more than its copy."""
        size = snapshot.plan(tree.encode(state)).size
        threading.Thread(target=self._prepare, args=(size,), name="buffer", daemon=True).start()

    def _prepare(self, size: int) -> None:
        with contextlib.suppress(OSError):  # the first save asks again, and says what is wrong
            self._pool.prepare(size)

    def take(self, state: Mapping[str, Any], of: Snapshot) -> None:
        """Copy a state, or begin to, and hand it to the writer. Raises what ended the saver."""
        self.check()
        self.fence()
        began = time.perf_counter()
        encoded = tree.encode(state)
        plan = snapshot.plan(encoded)
        encoding = time.perf_counter() - began
        save = _Save(of, plan)
        save.buffer = self._room(save, plan.size)
        if save.buffer is not None:
            began = time.perf_counter()
            parts = [(one, encoded.tensors[one.name]) for one in plan.placed]
            save.copying = Copying(save.buffer, parts, self._later if self._may_overlap else lambda *_: False)
            self._copy(save, save.copying)
            save.copied = encoding + time.perf_counter() - began
        self._given += 1
        self._queue.put(save)

    def fence(self) -> None:
        """Call it before the optimizer's step: whatever is still being copied is complete after it."""
        if self._proof is not None:
            self._judge(self._proof)
            self._proof = None
        save, self._open = self._open, None
        if save is None or save.copying is None:
            return
        if not save.copying.is_complete:
            phase, began = self._vitals.phase, time.perf_counter()
            self._vitals.enter(Phase.save)
            save.copying.join()
            self._vitals.enter(phase)
            save.fenced = time.perf_counter() - began

    def check(self) -> None:
        """Raise what ended the saver, if anything did."""
        if self.failure is not None:
            raise self.failure

    def finish(self, seconds: float = float("inf")) -> None:
        """Wait until everything handed over is committed or given up."""
        self.fence()
        until = time.monotonic() + seconds
        while self._done < self._given and self.failure is None and time.monotonic() < until:
            time.sleep(0.001)
        self.check()

    def _copy(self, save: _Save, copying: Copying) -> None:
        """Beside the next passes once it has been seen that the program bears that, else now and by several threads."""
        if self._proven and self._may_overlap and copying.later_bytes >= OVERLAP:
            save.overlapped = True
            self._open = save
            self._hands.submit(copying.help)
            return
        for _ in range(self._helpers):
            self._hands.submit(copying.help)
        copying.join()
        if self._may_overlap and not self._proven and copying.later_bytes >= OVERLAP:
            self._proof = copying

    def _judge(self, proof: Copying) -> None:
        """After the first save: had the copy gone on until now, would it have been the same? Else never overlap."""
        self._proven = proof.is_still_equal()
        self._may_overlap = self._proven
        if not self._proven:
            sys.stderr.write(f"everstep: no copy beside the training: {TORN}.\n")

    def _room(self, save: _Save, size: int) -> Buffer | None:
        """A buffer. An optional save is given up when nothing moves; one asked for by the clock need not wait at all."""
        began, most = time.monotonic(), 0.0
        try:
            while (buffer := self._pool.take(size, most)) is None:
                self.check()
                most = 0.05
                still = time.monotonic() - max(self._moved_at, began)
                if not save.snapshot.must and (not save.snapshot.patient or still > PATIENCE):
                    save.why = "the snapshots before it are still being written, and nothing moves"
                    return None
                self._vitals.moved()
        except OSError as error:
            save.why = f"no memory for a snapshot of {size:,} bytes ({error.strerror})"
            return None
        finally:
            save.waited = time.monotonic() - began if most else 0.0
            self._tell_of_memory()
        return buffer

    def _tell_of_memory(self) -> None:
        why, self._pool.why_one = self._pool.why_one, ""
        if why and not self._told_of_memory:
            self._told_of_memory = True
            sys.stderr.write(f"everstep: saves wait for one another, as {why}.\n")

    def _run(self) -> None:
        """A process edge: what ends this thread is raised again in the training thread."""
        try:
            with contextlib.suppress(OSError):  # asked again, and told, at the first save
                self._scribe.start()
            while True:
                save = self._queue.get()
                self._save(save)
                self._done += 1
        except BaseException as error:  # noqa: BLE001 - recorded here, raised by check()
            self.failure = error

    def _save(self, save: _Save) -> None:
        if save.copying is not None:
            save.copying.wait()
            if save.copying.torn:
                save.why = TORN
                self._may_overlap = False
        began, pause = time.monotonic(), PAUSE
        error: str | None = None
        number: int | None = None
        for left in reversed(range(TRIES)):
            error, number, again = self._save_once(save)
            if error is None:
                self._succeeded(save, time.monotonic() - began)
                return
            self._note(save, error)
            if not again and not save.snapshot.must:
                break
            if left:
                time.sleep(pause)
                pause *= 2
        self._give_back(save)
        if save.why == TORN:
            _attempt(lambda: atomic.write(self._marker, b"{}\n"))
        if save.snapshot.must:
            raise SaveFailed(save.snapshot.step, error or "", number)

    def _save_once(self, save: _Save) -> tuple[str | None, int | None, bool]:
        """Write and commit, together with the other ranks: why it failed, the error number, and whether to try again.

        A full or read-only local tier sends the next try to the persistent one. An optional save is tried again only
        where another try differs: there, or with a new writer.
        """
        target, rank = self._target, self._target.ranks.rank
        key = Key(save.snapshot.step, self._vitals.spec.attempt)
        folder = target.places.checkpoint(save.tier, key)
        told = target.ranks.gather(self._write(folder, save))
        verdict = next((one for one in told if one["error"] is not None), None)
        if verdict is None and rank == 0:
            verdict = _attempt(lambda: self._commit(folder, save, told))
        verdict = target.ranks.gather(verdict)[0]
        if verdict is None or verdict["error"] is None:
            return None, None, False
        _attempt(lambda: checkpoint.remove_part(folder, rank))
        if target.ranks.gather(rank)[0] == rank:
            _attempt(folder.rmdir)
        again = verdict["again"]
        if verdict["number"] in failure.SPACE:
            again = again or save.tier == "local"
            save.tier = "persistent"
        return verdict["error"], verdict["number"], again

    def _write(self, folder: Path, save: _Save) -> dict[str, Any]:
        target = self._target
        if save.why or save.plan is None or save.buffer is None:
            return {"error": save.why, "number": None, "again": False, "files": []}
        files = checkpoint.files_of(save.plan, save.snapshot, target.ranks.rank, target.ranks.size, target.environment)
        buffer, entries = save.buffer, []

        def write() -> None:
            entries.extend(self._scribe.write(target.ranks.rank, str(folder), files, buffer, self._progress))

        return _attempt(write) | {"files": entries}

    def _progress(self, _: int = 0) -> None:
        self._moved_at = time.monotonic()
        self._vitals.moved()

    def _succeeded(self, save: _Save, seconds: float) -> None:
        self._vitals.saved_step = save.snapshot.step
        self._vitals.told()
        held = self._pool.held
        self._give_back(save)
        self._publish(save)
        if self._target.ranks.rank == 0 and save.plan is not None:
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
            _attempt(lambda: jsonl.append(self._target.places.saves, [cost.model_dump_json()]))

    def _give_back(self, save: _Save) -> None:
        self._progress()
        if save.buffer is not None:
            self._pool.give(save.buffer)
            save.buffer = None

    @property
    def _marker(self) -> Path:
        """Stands where a program was caught in changing its state beside a copy; the next attempt copies at once."""
        return self._target.places.local / f"no-overlap-{self._target.ranks.rank}.json"

    def _commit(self, folder: Path, save: _Save, told: list[dict[str, Any]]) -> None:
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
        self._scribe.commit(target.ranks.rank, str(folder), manifest.to_json())

    def _write_structure(self, anew: bool) -> None:
        """Once for a run; again if there was no checkpoint to go on from, since the program may have been mended."""
        if self._structure_written:
            return
        path, data = self._target.places.structure, self._target.structure.to_json().encode()
        if not path.exists() or (anew and path.read_bytes() != data):
            atomic.write(path, data)
        self._structure_written = True

    def _publish(self, save: _Save) -> None:
        """The segment's result, after its checkpoint was committed. A disk that hesitates is asked again."""
        snapshot = save.snapshot
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
            if _attempt(write)["error"] is None:
                return
            time.sleep(pause)
        write()

    def _note(self, save: _Save, error: str) -> None:
        """Rank 0 keeps a row of what went wrong; training goes on."""
        step = save.snapshot.step
        sys.stderr.write(f"everstep: the checkpoint of step {step} could not be written: {error}\n")
        if self._target.ranks.rank == 0:
            row = json.dumps({"time": time.time(), "step": step, "error": error})
            _attempt(lambda: jsonl.append(self._target.places.persistent / "save-errors.jsonl", [row]))


def _attempt(act: Callable[[], Any]) -> dict[str, Any]:
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
