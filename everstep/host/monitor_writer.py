"""What a monitor leaves on disks: telemetry, events, the metrics' file. A thread of its own, as a disk may hang or be full.

Samples wait in bounded memory, and the oldest go; events are few and are kept.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from everstep.core.gpu import Sweep
from everstep.core.host import HostSample
from everstep.core.ledger import Event
from everstep.host.exporter import Exporter
from everstep.host.ledger import Ledger
from everstep.host.telemetry import Telemetry
from everstep.store import atomic

MOST_SAMPLES = 3600
MOST_EVENTS = 20_000
TEXTFILE_SECONDS = 5.0
PLACE_SECONDS = 30.0
CLOSE_SECONDS = 5.0
HANGS_SECONDS = 15.0


class Writer:
    """The thread. `textfile` is written every five seconds; `place` says how far the kernel's log is known."""

    def __init__(
        self,
        telemetry: Telemetry,
        ledger: Ledger,
        exporter: Exporter,
        *,
        textfile: Path | None = None,
        place_file: Path | None = None,
        place: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost = 0
        self.trouble = ""
        self._telemetry = telemetry
        self._ledger = ledger
        self._exporter = exporter
        self._textfile = textfile
        self._place_file = place_file
        self._place = place
        self._clock = clock
        self._writes_since: float | None = None
        self._samples: deque[tuple[Sweep | None, HostSample | None]] = deque()
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._changed = threading.Condition()
        self._closed = False
        self._due = {"textfile": 0.0, "place": 0.0}
        self._thread = threading.Thread(target=self._run, name="everstep-writer", daemon=True)
        self._thread.start()

    @property
    def lost_rows(self) -> int:
        return self._telemetry.lost

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why something is not written just now."""
        since = self._writes_since
        seconds = 0.0 if since is None else self._clock() - since
        hangs = f"a write has not ended for {seconds:.0f} s" if seconds >= HANGS_SECONDS else ""
        return tuple(one for one in (hangs, self.trouble, self._telemetry.trouble, self._ledger.trouble) if one)

    def take(self, sweep: Sweep | None = None, host: HostSample | None = None) -> None:
        """Hand over a sample. Never waits."""
        with self._changed:
            self._samples.append((sweep, host))
            while len(self._samples) > MOST_SAMPLES:
                self._samples.popleft()
                self.lost += 1
            self._changed.notify()

    def tell(self, event: Event) -> None:
        """Hand over an event. Never waits."""
        with self._changed:
            self._events.append(event)
            self._changed.notify()

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Write all that is at hand; False where that takes longer."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._closed or self._events or self._samples):
                    self._changed.wait(TEXTFILE_SECONDS)
                closed, events, samples = self._closed, list(self._events), list(self._samples)
                self._events.clear()
                self._samples.clear()
            self._writes_since = self._clock()
            try:
                self._write(events, samples, last=closed)
            except Exception as error:  # noqa: BLE001 - the edge of the thread: it is said, and the next round is tried
                self.trouble = f"{type(error).__name__}: {error}"
            finally:
                self._writes_since = None
            if closed:
                self._ledger.close(CLOSE_SECONDS)
                return

    def _write(self, events: list[Event], samples: list[tuple[Sweep | None, HostSample | None]], *, last: bool) -> None:
        for event in events:
            self._ledger.append(event)
        for sweep, host in samples:
            self._telemetry.add(sweep, host)
        if last:
            self._telemetry.close()
        try:
            self._leave(last=last)
            self.trouble = ""
        except OSError as error:
            self.trouble = f"{error.filename or self._textfile} cannot be written: {error.strerror}"

    def _leave(self, *, last: bool) -> None:
        now = time.monotonic()
        if self._textfile is not None and (last or now >= self._due["textfile"]):
            self._due["textfile"] = now + TEXTFILE_SECONDS
            self._exporter.write(self._textfile)
        if self._place_file is not None and (last or now >= self._due["place"]):
            self._due["place"] = now + PLACE_SECONDS
            data = json.dumps({"kernel_log": self._place()}).encode()
            atomic.write(self._place_file, data, sync=False)


def read_place(path: Path) -> str:
    """How far an earlier monitor knew the kernel's log; empty where nobody knows."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_bytes())["kernel_log"])
    return ""
