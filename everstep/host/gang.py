"""A gang: the rank processes of one attempt, started together, watched together, ended together.

A warm standby and a cold start are the same thing: the ranks are spawned, import what they need, and block on their
standard input until `go` hands each its `AttemptSpec`. A gang that is never told to go leaves quietly at end of file.
"""

import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from everstep.core.segment import AttemptSpec
from everstep.host import process, scratch
from everstep.host.process import Process

COMMAND = (sys.executable, "-m", "everstep.trainer")
CAP_SYS_NICE = 23


class Gang:
    """The rank processes of one attempt; see the module. Make one with `spawn`."""

    def __init__(self, ranks: Sequence[Process], token: str, logs: Sequence[Path], port: int, fd: int | None) -> None:
        self.ranks = tuple(ranks)
        self.token = token
        self.started = time.monotonic()
        self._logs = tuple(logs)
        self._port = port
        self._listen_fd = fd
        self._ended: set[int] = set()
        self._gone = False

    @classmethod
    def spawn(
        cls,
        size: int,
        env: Mapping[str, str],
        token: str,
        folder: Path,
        *,
        command: Sequence[str] = COMMAND,
        nice: int = 0,
    ) -> "Gang":
        """Start `size` ranks that wait for their specs. Their output goes to files in `folder` until `go`.

        Rank 0 inherits a listening socket for the rendezvous: its port cannot be lost to another process on the way.
        `nice` makes the ranks give way to others until `go`, where this process may take that back.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs = [folder / f"gang-{token.replace('/', '-')}-rank-{rank}.log" for rank in range(size)]
        listener = _listen(size) if size > 1 else None
        fd = listener.fileno() if listener else None
        ranks: list[Process] = []
        try:
            for rank, log in enumerate(logs):
                inherited = [fd] if rank == 0 and fd is not None else []
                ranks.append(process.spawn(command, env, token, log, stdin=subprocess.PIPE, pass_fds=inherited))
            gang = cls(ranks, token, logs, listener.getsockname()[1] if listener else 0, fd)
        except BaseException:
            for one in ranks:
                one.kill_group()
                one.wait(1.0)
                one.close()
            raise
        finally:
            if listener:
                listener.close()  # rank 0 holds the port now, and gives it back when it dies
        if nice and _may_take_niceness_back():
            gang._be_nice(nice)
        return gang

    def go(self, spec: AttemptSpec, log: Callable[[int], Path]) -> None:
        """Hand each rank its spec (`spec` with rank, port and descriptor filled in); its output is `log(rank)` from now.

        A rank that died meanwhile is no error here: `wait` tells it at once.
        """
        if self.is_nice:
            self._be_nice(os.getpriority(os.PRIO_PROCESS, 0))
        for rank, one in enumerate(self.ranks):
            self._logs[rank].replace(log(rank))
            update = {
                "rank": rank,
                "local_rank": rank,
                "world_size": len(self.ranks),
                "master_port": self._port,
                "listen_fd": self._listen_fd if rank == 0 else None,
            }
            process.tell(one, spec.model_copy(update=update).model_dump_json().encode() + b"\n")
            process.hang_up(one)

    def wait(self, timeout: float) -> list[int]:
        """The ranks that have ended since the last call; waits up to `timeout` seconds for one, and no longer."""
        waiting = [one for rank, one in enumerate(self.ranks) if rank not in self._ended and one.pidfd >= 0]
        if not waiting:
            return []
        poll = select.poll()
        for one in waiting:
            poll.register(one.pidfd, select.POLLIN)
        poll.poll(max(0.0, timeout) * 1000)
        fresh = [rank for rank, status in self.statuses().items() if status is not None and rank not in self._ended]
        self._ended |= set(fresh)
        return fresh

    def wait_all(self, timeout: float) -> bool:
        """Whether all ranks have ended, waiting up to `timeout` seconds for it."""
        until = time.monotonic() + timeout
        while len(self._ended) < len(self.ranks) and time.monotonic() < until:
            self.wait(until - time.monotonic())
        return len(self._ended) == len(self.ranks)

    def statuses(self) -> dict[int, int | None]:
        """By rank: exit code, negative signal number, or None for a living one."""
        return {rank: one.status() for rank, one in enumerate(self.ranks)}

    @property
    def whole(self) -> bool:
        return not self._gone and all(status is None for status in self.statuses().values())

    def signal(self, number: int) -> None:
        for one in self.ranks:
            one.signal(number)

    def kill(self) -> list[int]:
        """End the ranks and all that they started, for certain; whom a search by the mark still found."""
        if self._gone:
            return []
        for one in self.ranks:
            one.kill_group()
        self.wait_all(2.0)
        stragglers = process.sweep(self.token, 0.0)
        scratch.clear(self.token, pids=[*(one.pid for one in self.ranks), *stragglers])
        for one in self.ranks:
            one.close()
        self._gone = True
        return stragglers

    def dismiss(self) -> None:
        """End a gang that was never told to go, and remove its logs, which say nothing."""
        self.kill()
        for log in self._logs:
            log.unlink(missing_ok=True)

    @property
    def is_nice(self) -> bool:
        return any(_niceness(one.pid) > os.getpriority(os.PRIO_PROCESS, 0) for one in self.ranks)

    def _be_nice(self, niceness: int) -> None:
        """Niceness belongs to threads in Linux; later ones inherit it."""
        for one in self.ranks:
            for thread in _threads(one.pid):
                try:
                    os.setpriority(os.PRIO_PROCESS, thread, niceness)
                except ProcessLookupError:
                    continue


def _listen(size: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(max(128, size))
    return listener


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - names only
    except FileNotFoundError:
        return []


def _niceness(pid: int) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except ProcessLookupError:
        return -20


def _may_take_niceness_back() -> bool:
    """Raising a priority needs CAP_SYS_NICE or a limit that allows it; without, a nice rank would stay slow for ever."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= 20 - os.getpriority(os.PRIO_PROCESS, 0):
        return True
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_NICE & 1)
