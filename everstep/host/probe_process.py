"""The outside of a probe: a helper process that may hang in the kernel, and its replacement.

It is asked by lines and answers by lines (`host.probe_worker`). One that does not answer is killed and started anew,
later each time. One that cannot even be killed (a thread in uninterruptible sleep) is left behind, counted and reaped when
the kernel lets it go; with too many of them no more of that module are started in this process.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.host import process
from everstep.host.process import Process

LEFT_LIMIT = 3
KILL_SECONDS = 1.0
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 600.0
LONGEST_LINE = 4 << 20
STARVED_SHARE = 0.5
"""Of the time since it was asked: a probe that could run and got less of a processor than that is starved."""

_LEFT: dict[str, list[Process]] = {}


class ProbeProcess:
    """`python -m <module> <descriptor> <arguments>`, at most one at a time that is asked. For one thread.

    `argv` replaces the command before the descriptor; `environment` is added to the usual variables.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None = None,
        *,
        argv: Sequence[str] | None = None,
        log: Path = Path(os.devnull),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._argv = tuple(argv or (sys.executable, "-m", module))
        self._module = module
        self._environment = dict(environment or {})
        self._log = log
        self._clock = clock
        self._process: Process | None = None
        self._left = _LEFT.setdefault(module, [])
        self._read = -1
        self._rest = b""
        self._asked = (0.0, 0.0)
        self._failures = 0
        self._not_before = 0.0
        self.starts = 0
        self.started = 0.0
        self.ended = ""

    @property
    def runs(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def left_behind(self) -> int:
        """Processes of this module that were killed and have not ended; those that have are reaped."""
        for one in [one for one in self._left if one.status() is not None]:
            self._left.remove(one)
            one.close()
        return len(self._left)

    def start(self, *arguments: str) -> bool:
        """Start it, unless it runs; False where it may not be started now, and `ended` says why there is none."""
        if self._process is not None:
            return True
        if self.left_behind >= LEFT_LIMIT:
            self.ended = f"{self.left_behind} probes hang in the kernel and cannot be killed; no more are started"
            return False
        if self._clock() < self._not_before:
            return False
        read, write = os.pipe()
        os.set_blocking(read, False)
        try:
            env = process.child_environment((), self._environment)
            token = f"probe/{self._module}/{os.getpid()}/{self.starts}"
            argv = [*self._argv, str(write), *arguments]
            self._process = process.spawn(
                argv, env, token, self._log, stdin=subprocess.PIPE, pass_fds=(write,), death_signal=signal.SIGKILL
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._read, self._rest = read, b""
        self.starts += 1
        self.started = self._clock()
        self.ended = ""
        self._asked = (self.started, 0.0)
        return True

    @property
    def starves(self) -> bool:
        """Whether it has work to do and gets no processor for it: that it does not answer says nothing then."""
        if self._process is None:
            return False
        runnable, seconds = _at_work(self._process.pid)
        asked, before = self._asked
        return runnable and seconds - before < STARVED_SHARE * (self._clock() - asked)

    def tell(self, message: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._asked = (self._clock(), _at_work(self._process.pid)[1])
            process.tell(self._process, json.dumps(message).encode() + b"\n")

    def receive(self, until: float) -> list[dict[str, Any]]:
        """The messages that are there, or the next ones, waiting for them to the moment `until`; none: it said nothing.

        One that ended, or that said what is no message, is gone afterwards (`runs` is false, `ended` says why).
        """
        while self._process is not None:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            poll.poll(max(0.0, until - self._clock()) * 1000)
            try:
                data = os.read(self._read, 1 << 20)
            except BlockingIOError:
                return []
            if not data:
                self._ended_itself()
                return []
            *lines, self._rest = (self._rest + data).split(b"\n")
            try:
                found = [json.loads(line) for line in lines if line]
            except ValueError:
                self.replace("the probe said what nobody understands")
                return []
            if len(self._rest) > LONGEST_LINE or not all(isinstance(one, dict) for one in found):
                self.replace("the probe said what nobody understands")
                return []
            if found:
                return found
        return []

    def replace(self, why: str, pause: float | None = None) -> None:
        """Kill it; another may be started after a pause, by default one that doubles with each failure in a row."""
        if self._process is None:
            return
        self.ended = why
        self._end(self._process)
        self._failures += pause is None
        if pause is None:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self._failures - 1))
            pause *= random.uniform(0.9, 1.1)  # noqa: S311 - no secret: probes of many nodes are not to start in step
        self._not_before = self._clock() + pause

    def is_well(self) -> None:
        """It has answered: the next failure is a first one."""
        self._failures = 0

    def close(self) -> None:
        """End it. One that cannot be killed stays behind."""
        self.replace("closed", 0.0)
        _ = self.left_behind

    def _ended_itself(self) -> None:
        assert self._process is not None
        status = self._process.wait(KILL_SECONDS)
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        self.replace(self.ended or f"the probe ended by itself ({how})")

    def _end(self, one: Process) -> None:
        self._process = None
        os.close(self._read)
        self._read = -1
        one.kill_group()
        if one.wait(KILL_SECONDS) is None:
            self._left.append(one)
        else:
            one.close()


def _at_work(pid: int) -> tuple[bool, float]:
    """Whether a thread of it could run just now, and the processor seconds it has used (proc(5), stat)."""
    runnable, ticks = False, 0
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            runnable |= (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
    return runnable, ticks / os.sysconf("SC_CLK_TCK")
