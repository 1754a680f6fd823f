"""Keeps the copier running beside the training, and starts it again when it dies. No fault of it reaches the training."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from everstep.core.health import Severity
from everstep.host import process
from everstep.host.process import Process

FIRST_DELAY = 0.25
LONGEST_DELAY = 30.0
HEALTHY_SECONDS = 60.0


class Keeper:
    """A helper: a command that reads `line` on its standard input, and finishes and leaves when that is closed."""

    def __init__(
        self,
        command: Sequence[str],
        line: bytes,
        env: Mapping[str, str],
        token: str,
        log: Path,
        record: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
        name: str = "copier",
    ) -> None:
        self.restarts = 0
        self._name = name
        self._command = tuple(command)
        self._line = line
        self._env = dict(env)
        self._token = token
        self._log = log
        self._record = record
        self._clock = clock
        self._process: Process | None = None
        self._started = 0.0
        self._delay = FIRST_DELAY
        self._again_at: float | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it unless it runs."""
        if self._process is not None:
            return
        try:
            self._process = process.spawn(self._command, self._env, self._token, self._log, stdin=subprocess.PIPE)
        except OSError as error:
            self._try_later(f"the {self._name} cannot be started: {error}")
            return
        self._started = self._clock()
        self._again_at = None
        process.tell(self._process, self._line)

    def tend(self) -> None:
        """Look after it: a dead one is started again, later each time, soon again after a minute of health."""
        if self._again_at is not None and self._clock() >= self._again_at:
            self.restarts += 1
            self.start()
            if self._process is not None:
                self._record("copier.restarted", restarts=self.restarts, name=self._name)
        elif self._process is not None and (status := self._process.status()) is not None:
            self._process.close()
            self._process = None
            if self._clock() - self._started >= HEALTHY_SECONDS:
                self._delay = FIRST_DELAY
            self._try_later(f"the {self._name} ended with status {status}")

    def drain(self, seconds: float) -> bool:
        """Tell it that nothing more comes, and wait until it has finished. Whether it did, and well.

        One that dies over it is started again, like at any other time.
        """
        until = self._clock() + seconds
        while self._clock() < until:
            if self._process is None:
                if self._again_at is None:
                    return False
                time.sleep(max(0.0, min(self._again_at, until) - self._clock()))
                self.tend()
                continue
            process.hang_up(self._process)
            if self._process.wait(until - self._clock()) == 0:
                return True
            self.tend()
        return False

    def stop(self) -> None:
        """End it at once: what it copies is committed by the manifest, so a torn copy is none."""
        if self._process is not None:
            self._process.kill_group()
            self._process.wait(2.0)
            self._process.close()
            self._process = None
        self._again_at = None

    def _try_later(self, why: str) -> None:
        self._again_at = self._clock() + self._delay
        self._delay = min(2 * self._delay, LONGEST_DELAY)
        self._record("copier.died", severity=Severity.medium, text=why)
