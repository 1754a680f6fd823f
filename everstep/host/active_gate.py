"""The active gate: devices put to the test by a process for each (`python -m everstep.trainer.exam`), with a deadline.

The processes wait for one another before they begin, so that all are measured at once. They are killed when they are done,
when the time is up, when this process dies, and whenever the gate is closed; one that no signal ends, as it hangs in a
driver, is left behind and counted.
"""

import contextlib
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from everstep.core.check import GateReport
from everstep.core.exam import CPU, Examination, Part, Task, judge
from everstep.core.floors import DEFAULT, Floors
from everstep.host import exam_process, process
from everstep.host.exam_process import ExamProcess
from everstep.host.process import Process

COMMAND = (sys.executable, "-m", "everstep.trainer.exam")
START_SECONDS = 120.0
"""Importing torch and waking a GPU may take so long; a rank that is not ready then does not take part."""

MEASURING_SHARE = 0.2
"""Of the seconds that a test may take; the rest is for what cannot be cut short, and for a machine that is busy."""

PATIENCE_SHARE = 0.6
KILL_SECONDS = 1.0
LOOPBACK = "127.0.0.1"

_LEFT: list[Process] = []


class ActiveGate:
    """One test at a time, for one thread: `start`, then `poll` until it gives the report; or `run`, which waits.

    `token` marks the processes, `log` takes what they print. A rank that a report is missing of is told as not measured.
    """

    def __init__(
        self,
        token: str = "",
        log: Path = Path(os.devnull),
        floors: Floors = DEFAULT,
        *,
        command: Sequence[str] = COMMAND,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._token = token or f"gate/{os.getpid()}/{secrets.token_hex(4)}"
        self._log = log
        self._floors = floors
        self._command = tuple(command)
        self._start_seconds = start_seconds
        self._ranks: list[ExamProcess] = []
        self._seconds = 0.0
        self._began = self._until = 0.0
        self._going = False
        self._killed: float | None = None
        self._trouble = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Whether a test has been started whose report has not been given."""
        return bool(self._ranks) or bool(self._trouble)

    def start(self, devices: Sequence[str], *, seconds: float = 20.0, memory_bytes: int | None = None) -> None:
        """Begin to test these devices, each a GPU's UUID or `cpu`; one rank for each. Returns at once.

        `seconds` is what the test may take once its processes are up, of which a fifth is measuring. `memory_bytes` is
        what one part of it may take of a device, at most; see `core.exam.Task`. A machine that cannot start processes is
        no error: the report says that nothing was measured.
        """
        if self.running:
            raise RuntimeError("a test is running; poll it to its end, or close it")
        if not devices:
            raise ValueError("devices: there is none to test; give UUIDs of GPUs, or cpu")
        self._seconds, self._going, self._killed = seconds, False, None
        self._began = time.monotonic()
        self._until = self._began + self._start_seconds
        try:
            self._spawn(devices, memory_bytes)
        except OSError as error:
            self.close()
            self._trouble = f"the test cannot be started: {error.strerror or error}"
        except BaseException:
            self.close()
            raise

    def poll(self, wait: float = 0.0) -> GateReport | None:
        """The report, once, as soon as the test is over; None until then. `wait`: seconds to wait for news at most."""
        if self._trouble:
            trouble, self._trouble = self._trouble, ""
            return self._report([Examination(rank=0, why=trouble)])
        if not self._ranks:
            return None
        now = time.monotonic()
        if self._killed is None:
            self._listen(wait)
            now = time.monotonic()
            if not self._going and self._may_go(now):
                self._go(now)
            if now < self._until and not all(one.is_over or self._waits_in_vain(one) for one in self._ranks):
                return None
            self._end()
            self._killed = now
        until = self._killed + KILL_SECONDS
        for one in self._ranks:
            if one.process.wait(min(wait, until - now)) is None and time.monotonic() < until:
                return None
        report = self._report([self._examination(one) for one in self._ranks])
        self._forget()
        return report

    def run(self, devices: Sequence[str], *, seconds: float = 20.0, memory_bytes: int | None = None) -> GateReport:
        """Test these devices and wait for the report; see `start`."""
        try:
            self.start(devices, seconds=seconds, memory_bytes=memory_bytes)
            while (report := self.poll(0.1)) is None:
                pass
            return report
        finally:
            self.close()

    def close(self) -> None:
        """End the test, if one runs; nothing of it is left."""
        self._trouble = ""
        self._end()
        until = time.monotonic() + KILL_SECONDS
        for one in self._ranks:
            one.process.wait(until - time.monotonic())
        self._forget()

    # -- its ranks ----------------------------------------------------------------------------------------------------

    def _spawn(self, devices: Sequence[str], memory_bytes: int | None) -> None:
        size = len(devices)
        with contextlib.ExitStack() as ours:
            turns = os.memfd_create("everstep-turns")
            ours.callback(os.close, turns)
            listener = ours.enter_context(socket.socket())
            listener.bind((LOOPBACK, 0))
            listener.listen(size)
            for rank, device in enumerate(devices):
                task = Task(
                    rank=rank,
                    world_size=size,
                    master_port=listener.getsockname()[1],
                    listen_fd=listener.fileno() if rank == 0 else None,
                    turn_fd=turns,
                    waits=True,
                    device=CPU if device == CPU else "cuda:0",
                    seconds=self._seconds * MEASURING_SHARE,
                    patience=self._seconds * PATIENCE_SHARE,
                    memory_bytes=memory_bytes,
                    threads=max(1, len(os.sched_getaffinity(0)) // size),
                )
                one = exam_process.spawn(task, device, self._command, f"{self._token}/{rank}", self._log)
                self._ranks.append(one)

    def _listen(self, wait: float) -> None:
        poll = select.poll()
        for one in self._ranks:
            if not one.hung_up:
                poll.register(one.read, select.POLLIN)
        poll.poll(max(0.0, wait) * 1000)
        for one in self._ranks:
            one.listen()

    def _may_go(self, now: float) -> bool:
        return now >= self._until or all(one.ready or one.is_over for one in self._ranks)

    def _go(self, now: float) -> None:
        """All that are ready begin together; the others have had their time."""
        self._going = True
        if any(one.ready and not one.is_over for one in self._ranks):
            self._until = now + self._seconds
        for one in self._ranks:
            if one.ready:
                with contextlib.suppress(BrokenPipeError):
                    process.tell(one.process, b"go\n")
            elif not one.is_over:
                one.late = True
                one.process.kill_group()

    def _waits_in_vain(self, one: ExamProcess) -> bool:
        """Whether it waits for others of which one has ended before it came to where they meet."""
        return one.at is Part.all_reduce and any(other.is_lost for other in self._ranks)

    def _end(self) -> None:
        for one in self._ranks:
            one.process.kill_group()

    def _forget(self) -> None:
        for one in self._ranks:
            os.close(one.read)
            if one.process.status() is None:
                _LEFT.append(one.process)
            else:
                one.process.close()
        self._ranks = []
        for gone in [one for one in _LEFT if one.status() is not None]:
            _LEFT.remove(gone)
            gone.close()

    # -- what they said -----------------------------------------------------------------------------------------------

    def _examination(self, one: ExamProcess) -> Examination:
        return Examination(
            rank=one.rank, device=one.device, model=one.model, measured=tuple(one.measured), why=self._why(one)
        )

    def _why(self, one: ExamProcess) -> str:
        """Why parts of its test are missing."""
        if one.done:
            last = one.measured[-1:] and one.measured[-1].why
            return last or "the device failed before"
        where = f", in {one.at.words}" if one.at else ""
        if one.late:
            return f"it was not ready within {self._start_seconds:.0f} s"
        if one.ended:
            return f"its process ended by itself ({one.ended}){where}"
        if self._waits_in_vain(one):
            lost = ", ".join(str(other.rank) for other in self._ranks if other.is_lost)
            return f"rank {lost} ended before"
        stuck = " and it cannot be killed: it hangs in the driver" if one.process.status() is None else ""
        if not self._going:
            return f"it was not ready within {self._start_seconds:.0f} s{stuck}"
        return f"no answer within {self._seconds:.0f} s{where}{stuck}"

    def _report(self, found: Sequence[Examination]) -> GateReport:
        spent = time.monotonic() - self._began
        return GateReport(gate="active", time=time.time(), seconds=round(spent, 3), checks=judge(found, self._floors))
