"""What a monitor reads beside the GPUs: logs, heartbeats of trainings, the node's own signals.

Each has a thread of its own, as a mount may hang: the Xid events of the GPUs wait for none of them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from everstep.core.errors import Damaged
from everstep.core.health import Finding
from everstep.core.host import HostSample
from everstep.core.segment import Heartbeat, Phase
from everstep.host.host_signals import HostSampler
from everstep.host.log_follower import LogFollower

LOOK_SECONDS = 0.2
HOST_SECONDS = 10.0
BEATS_SECONDS = 2.0
BEAT_LIVES_SECONDS = 60.0
MOST_FOUND = 10_000
COMPUTES = frozenset({Phase.train, Phase.save, Phase.eval})
"""Phases in which a training is at work on the GPUs, or soon is again."""


class Training(NamedTuple):
    """Whether a training computes on this node now: True, or None where nobody can say. `since` in Unix seconds."""

    computes: bool | None = None
    since: float | None = None
    job: str = ""


class Trainings:
    """Reads the heartbeats below a local tier."""

    def __init__(self, local: Path, *, wall: Callable[[], float] = time.time) -> None:
        self._local = local
        self._wall = wall
        self._began: dict[str, float] = {}

    def look(self) -> Training:
        """The training that has computed for longest."""
        now = self._wall()
        beating: dict[str, str] = {}
        for path in self._local.glob("*/*/heartbeat-*.json"):
            try:
                beat = Heartbeat.parse(path.read_bytes(), str(path.parent), path.name)
            except (OSError, Damaged):
                continue
            if now - beat.time <= BEAT_LIVES_SECONDS and beat.phase in COMPUTES:
                beating[str(path.parent)] = path.parent.parent.name
        self._began = {run: self._began.get(run, now) for run in beating}
        if not beating:
            return Training()
        run = min(beating, key=lambda one: (self._began[one], one))
        return Training(computes=True, since=self._began[run], job=beating[run])


class Watch:
    """The thread. `findings` gives what is new and forgets it."""

    def __init__(
        self, follower: LogFollower, trainings: Trainings | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.training = Training()
        self.trouble = ""
        self._follower = follower
        self._trainings = trainings
        self._clock = clock
        self._found: deque[Finding] = deque(maxlen=MOST_FOUND)
        self._came_round = clock()
        self._beats_at = clock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-watch", daemon=True)

    @property
    def silent_s(self) -> float:
        return self._clock() - self._came_round

    @property
    def lost(self) -> int:
        return self._follower.lost

    @property
    def behind(self) -> bool:
        return self._follower.behind

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """One round."""
        self._found.extend(self._follower.poll())
        self.trouble = next((one.trouble for one in self._follower.sources if one.trouble), "")
        if self._trainings is not None and self._clock() >= self._beats_at:
            self._beats_at = self._clock() + BEATS_SECONDS
            self.training = self._trainings.look()
        self._came_round = self._clock()

    def findings(self) -> list[Finding]:
        found = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._follower.close()

    def _run(self) -> None:
        while True:  # the first look at once: what is written from now on is new
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - the edge of the thread: it is said, and looked at again
                self.trouble = f"logs cannot be followed: {type(error).__name__}: {error}"
            if self._over.wait(LOOK_SECONDS):
                return


class HostWatch:
    """Samples the node's own signals every so many seconds, in a thread of its own."""

    def __init__(self, seconds: float = HOST_SECONDS, make: Callable[[], HostSampler] = HostSampler) -> None:
        self._seconds = seconds
        self._make = make
        self._newest: deque[HostSample] = deque(maxlen=1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-host", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def newest(self) -> HostSample | None:
        """A sample that was not given yet. Never waits."""
        return self._newest.popleft() if self._newest else None

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        with self._make() as sampler:  # its probe lives as long as this thread
            while not self._over.is_set():
                with suppress(OSError):  # no process can be started just now: there is no sample
                    self._newest.append(sampler.sample())
                self._over.wait(self._seconds)
