"""Saving beside training: snapshot -> write -> commit.

The training thread stands still only for the copy of its state into a shared buffer (`copying`), often not even for that.
A thread of each rank hands buffers to the rank's writer process in order. All ranks go through the same saves in the same
order; after each they tell each other how it went, on a group of their own, and rank 0 has the manifest published only if
all have written. Two snapshots exist at most: a third waits for a place (phase `save`), or is given up if nothing moves.
"""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from everstep.core.segment import Phase
from everstep.store import atomic
from everstep.trainer import snapshot, tree
from everstep.trainer.buffers import Buffer, Pool
from everstep.trainer.commit import Committer, Save, Target, Verdict, attempt
from everstep.trainer.copying import Copying
from everstep.trainer.failure import SaveFailed
from everstep.trainer.scribe import Scribe
from everstep.trainer.side import Side
from everstep.trainer.snapshot import Placed, Snapshot
from everstep.trainer.vitals import Vitals

TRIES = 4
PAUSE = 0.25  # seconds before the second try; doubled for each further one
PATIENCE = 5.0  # seconds without any progress of the writer after which an optional save is given up
OVERLAP = 8 << 20  # bytes; less is copied faster than another thread is woken
TORN = "the program changed its parameters or its optimizer's state outside of optimizer.step(), beside the copy"


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
        self._scribe = scribe or Scribe()
        self._committer = Committer(vitals, target, side, self._scribe, self._progress)
        self._pool = Pool(pinned=pinned)
        self._later = later or (lambda _placed, _tensor: False)
        self._helpers = threads - 1
        self._hands = ThreadPoolExecutor(max(1, threads - 1), "copying")
        self._may_overlap = later is not None and not self._marker.exists()
        self._proven = False
        self._proof: Copying | None = None
        self._open: Save | None = None
        self._queue: queue.SimpleQueue[Save] = queue.SimpleQueue()
        self._given = self._done = 0
        self._moved_at = time.monotonic()
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
        save = Save(of, plan)
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

    def _copy(self, save: Save, copying: Copying) -> None:
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

    def _room(self, save: Save, size: int) -> Buffer | None:
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

    def _save(self, save: Save) -> None:
        if save.copying is not None:
            save.copying.wait()
            if save.copying.torn:
                save.why = TORN
                self._may_overlap = False
        began, pause = time.monotonic(), PAUSE
        verdict = Verdict()
        for left in reversed(range(TRIES)):
            verdict = self._committer.once(save)
            if verdict.error is None:
                self._succeeded(save, time.monotonic() - began)
                return
            self._committer.note(save, verdict.error)
            if not verdict.again and not save.snapshot.must:
                break
            if left:
                time.sleep(pause)
                pause *= 2
        self._give_back(save)
        if save.why == TORN:
            attempt(lambda: atomic.write(self._marker, b"{}\n"))
        if save.snapshot.must:
            raise SaveFailed(save.snapshot.step, verdict.error or "", verdict.number)

    def _progress(self, _: int = 0) -> None:
        self._moved_at = time.monotonic()
        self._vitals.moved()

    def _succeeded(self, save: Save, seconds: float) -> None:
        self._vitals.saved_step = save.snapshot.step
        self._vitals.told()
        held = self._pool.held
        self._give_back(save)
        self._committer.publish(save)
        self._committer.record(save, seconds, held)

    def _give_back(self, save: Save) -> None:
        self._progress()
        if save.buffer is not None:
            self._pool.give(save.buffer)
            save.buffer = None

    @property
    def _marker(self) -> Path:
        """Stands where a program was caught in changing its state beside a copy; the next attempt copies at once."""
        return self._target.places.local / f"no-overlap-{self._target.ranks.rank}.json"
