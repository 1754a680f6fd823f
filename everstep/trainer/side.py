"""The side thread of rank 0: reads the lease, writes metrics and phases. The training thread does no such I/O."""

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.core.errors import Damaged
from everstep.core.segment import Lease
from everstep.store import jsonl
from everstep.store.layout import RunPlaces
from everstep.trainer.vitals import Vitals

POLL = 0.03
WRITE = 0.2
_FIGURES = ("loss", "lr", "grad_norm")
LONGEST_QUEUE = 200_000  # rows kept while the disk takes none; the oldest go first


class Side:
    """`lease` is the newest lease of this attempt; `fenced` says that a newer attempt holds the run."""

    def __init__(self, vitals: Vitals, places: RunPlaces) -> None:
        self.lease = Lease(attempt=vitals.spec.attempt)
        self.fenced = False
        self._vitals = vitals
        self._places = places
        self._rows: deque[dict[str, Any]] = deque(maxlen=LONGEST_QUEUE)
        self._seen: tuple[int, int, int] | None = None
        self._wake = threading.Event()
        self._wanted = 0
        self._flushed = threading.Condition()
        self._flushes = 0
        self._changed = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="side", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def row(self, row: dict[str, Any]) -> None:
        """A row for `metrics.jsonl`. Loss and norm may be tensors on a device: they are read here, not in the training
        thread.
        """
        self._rows.append(row)

    def flush(self, seconds: float) -> bool:
        """Have all rows written that were given before; False if that took longer."""
        with self._flushed:
            self._wanted += 1
            goal = self._wanted
            self._wake.set()
            return self._flushed.wait_for(lambda: self._flushes >= goal, seconds)

    def wait_for_news(self, seconds: float) -> None:
        """Wait for another lease, at most so long."""
        self._changed.wait(seconds)
        self._changed.clear()

    def check(self) -> None:
        """Raise what ended this thread, if anything did: without it no lease would be heard any more."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        """A process edge: what ends this thread is raised again in the training thread."""
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - recorded here, raised by check()
            self._failure = error

    def _serve(self) -> None:
        written = 0.0
        while True:
            goal = self._wanted
            self._read_lease()
            if goal > self._flushes or time.monotonic() - written >= WRITE:
                self._write()
                written = time.monotonic()
                with self._flushed:
                    self._flushes = goal
                    self._flushed.notify_all()
            self._wake.wait(POLL)
            self._wake.clear()

    def _read_lease(self) -> None:
        try:
            seen = _stamp(self._places.lease)
            if seen == self._seen:
                return
            lease = Lease.parse(self._places.lease.read_bytes(), self._places.persistent.name, "lease.json")
        except FileNotFoundError:
            return
        except (Damaged, OSError) as error:
            sys.stderr.write(f"everstep: the lease could not be read, the last one holds: {error}\n")
            return
        self._seen = seen
        if lease.attempt == self.lease.attempt:
            self.lease = lease
        elif lease.attempt > self.lease.attempt:
            self.fenced = True
        self._changed.set()

    def _write(self) -> None:
        _drain(self._places.phases, self._vitals.marks, lambda mark: mark.model_dump_json())
        _drain(self._places.metrics, self._rows, self._line)

    def _line(self, row: dict[str, Any]) -> str:
        row = row | {name: float(row[name]) for name in _FIGURES if name in row}
        self._vitals.loss = row["loss"]
        return json.dumps(plain(row), separators=(",", ":"), allow_nan=False)


def _drain(path: Path, queue: "deque[Any]", line: Callable[[Any], str]) -> None:
    """Append what is queued. Where the disk takes nothing it stays queued, and training goes on."""
    items = [queue.popleft() for _ in range(len(queue))]
    try:
        jsonl.append(path, [line(item) for item in items])
    except OSError as error:
        queue.extendleft(reversed(items))
        sys.stderr.write(f"everstep: {path.name} could not be written, trying again: {error}\n")


def plain(value: Any) -> Any:
    """The same for JSON: floats that are no numbers as words ("nan", "inf", "-inf")."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
