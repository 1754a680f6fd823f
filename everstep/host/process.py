"""Processes: started so that they cannot be orphaned, found by a mark in their environment, ended for certain.

The mark is `EVERSTEP_ATTEMPT=<run>/<which of that name>/<supervisor>/<serial>`. Children of children inherit it whatever they do to their
session, group or parent, so `sweep` finds what a process group misses (loader workers, double forks).
"""

import contextlib
import fcntl
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the warden imports this module, and is to start in no time
    from everstep.core.checkpoint import RunRecord

MARK = "EVERSTEP_ATTEMPT"
PIPE_LIMIT = 1 << 20
CERTAIN_LOOKS = 5  # empty looks in a row that end a sweep: one look can miss a process that is just forking

_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_USUAL = re.compile(
    r"(PATH|HOME|LANG|TMPDIR|TZ|USER|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV"
    r"|(LC|CUDA|NVIDIA|NCCL|GLOO|OMP|MKL|OPENBLAS|TORCH|EVERSTEP)_.*)"
)


def token(run: "RunRecord") -> str:
    """The mark of all processes of a run, whoever started them.

    A run's id alone is not enough: two jobs that differ only in their name, or two persistent tiers on one machine,
    can have the same one.
    """
    which = hashlib.sha256(f"{run.name}/{run.run}/{run.created!r}".encode()).hexdigest()
    return f"{run.run}/{which[:8]}"


class Process:
    """A child started by `spawn`. It stays unreaped until `close`, so its pid is never another's."""

    def __init__(self, popen: subprocess.Popen[bytes], token: str) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.token = token
        self.pidfd = os.pidfd_open(popen.pid)

    @property
    def stdin(self) -> IO[bytes] | None:
        return self._popen.stdin

    def status(self) -> int | None:
        """The exit code, the negative number of the signal that killed it, or None while it lives."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 0  # SIGCHLD is ignored in this process: the kernel keeps no status, only that it ended
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def wait(self, timeout: float) -> int | None:
        """The status, waiting for it up to `timeout` seconds."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.poll(max(0.0, timeout) * 1000)
        return self.status()

    def signal(self, number: int) -> None:
        if self.status() is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """SIGKILL for it and all that stayed in its process group."""
        if self._popen.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return  # nobody is left in it (macOS and some kernels say EPERM for a group of zombies)

    def close(self) -> int | None:
        """Forget the process after its end: reap it and close its descriptors. Its status, None if it still lives."""
        if self._popen.stdin:
            self._popen.stdin.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return self._popen.poll()


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    token: str,
    log: Path,
    *,
    stdin: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
    death_signal: int = signal.SIGTERM,
    cwd: Path | None = None,
) -> Process:
    """Start `argv` in a session of its own, marked with `token`, with both outputs appended to the file `log`.

    It never shares a stream with this process (an inherited stdout keeps whoever reads it waiting after our death), and
    it gets `death_signal` when the calling thread ends; 0 is none.
    """
    launch = [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), str(int(death_signal)), "--", *argv]
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        popen = subprocess.Popen(
            launch,
            env={**env, MARK: token},
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            cwd=cwd,
            bufsize=0,
        )
    finally:
        os.close(output)
    return Process(popen, token)


def tell(one: Process, line: bytes) -> None:
    """Write the whole line to its standard input at once, although it may still be starting: the pipe must hold it.

    One that is dead already is no error here. Raises ValueError for a line that no pipe holds.
    """
    if one.stdin is None:
        return
    if len(line) > PIPE_LIMIT:
        raise ValueError(f"config: {len(line)} bytes are too many to hand to build(); put large values into a file.")
    if len(line) > fcntl.fcntl(one.stdin, fcntl.F_GETPIPE_SZ):
        with contextlib.suppress(PermissionError):  # the user's share of pipe memory is used up: writing waits instead
            fcntl.fcntl(one.stdin, fcntl.F_SETPIPE_SZ, PIPE_LIMIT)
    with contextlib.suppress(BrokenPipeError):
        while line:
            line = line[one.stdin.write(line) :]


def hang_up(one: Process) -> None:
    """Close its standard input: nothing more will be said."""
    if one.stdin is not None:
        one.stdin.close()


def child_environment(names: Iterable[str], extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child: the usual variables, those in `names`, and `extra`. No secrets of ours."""
    wanted = set(names)
    return {name: value for name, value in os.environ.items() if name in wanted or _USUAL.fullmatch(name)} | dict(extra)


def marked(prefix: str) -> list[int]:
    """The living processes whose mark is `prefix` or stands below it (`run` finds `run/a/1`, never `run2/a/1`)."""
    return [pid for pid, _ in marks(prefix)]


def marks(prefix: str) -> list[tuple[int, str]]:
    """The living processes marked `prefix` or below, each with its mark; not this one.

    Zombies, processes that vanish meanwhile and those of other users are skipped: none of them shows an environment.
    """
    return [(one.pid, one.mark) for one in _look(prefix)]


def sweep(prefix: str, grace: float, *, spare: str | None = None, certain_within: float = 5.0) -> list[int]:
    """End every process marked `prefix` or below, except those marked `spare` or below; returns whom SIGKILL had to end.

    SIGTERM first, SIGKILL after `grace` seconds (0: at once), again and again until nobody is left and everyone hunted
    has ended whole (files and ports closed), also not one that was being forked meanwhile: SIGKILL goes to the process
    groups, which the kernel holds still while it signals, since a process that forks and leaves faster than one can
    look would outrun signals to single processes. Gives up `certain_within` seconds after the first SIGKILL: a process
    in an uninterruptible system call cannot be ended by anybody.
    """
    hunted: dict[int, int] = {}  # each with a descriptor that becomes readable when it has ended
    killed: set[int] = set()
    polite_until = time.monotonic() + grace
    empty = 0
    try:
        while empty < CERTAIN_LOOKS:
            found = _look(prefix)
            left = [one for one in found if not _below(one.mark, spare)]
            spared = {one.group for one in found if _below(one.mark, spare)} | {os.getpgrp()}
            fresh = _hold([one.pid for one in left], prefix, hunted)
            alive = [pid for pid, handle in hunted.items() if not _ended(handle, 0.0)]
            empty = 0 if left or alive else empty + 1
            now = time.monotonic()
            if empty:
                time.sleep(0.002)
                continue
            if now >= polite_until + certain_within:
                break
            if now < polite_until:
                for pid in fresh:
                    _signal(hunted[pid], signal.SIGTERM)
                wait = min(polite_until - now, 0.25)
            else:
                for group in {one.group for one in left if one.group} - spared:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(group, signal.SIGKILL)
                for pid in alive:
                    _signal(hunted[pid], signal.SIGKILL)
                killed |= set(alive)
                wait = 0.25
            until = now + wait
            for pid in alive:
                _ended(hunted[pid], until - time.monotonic())
    finally:
        for handle in hunted.values():
            os.close(handle)
    return sorted(killed)


class _Seen(NamedTuple):
    """A marked process; `group` is its process group, 0 if it was gone before that was read."""

    pid: int
    mark: str
    group: int


def _look(prefix: str) -> list[_Seen]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            mark = _mark(entry.path)
            if _below(mark, prefix):
                group = 0
                with contextlib.suppress(OSError):  # at once: it may live for milliseconds only
                    group = os.getpgid(int(entry.name))
                found.append(_Seen(int(entry.name), mark, group))
    return found


def _below(mark: str, prefix: str | None) -> bool:
    return prefix is not None and (mark == prefix or mark.startswith(f"{prefix}/"))


def _mark(folder: str) -> str:
    try:
        with open(f"{folder}/environ", "rb") as file:  # noqa: PTH123 - thousands of times, in a hurry
            environment = file.read()
    except OSError:
        return ""
    key = f"{MARK}=".encode()
    for line in environment.split(b"\0"):
        if line.startswith(key):
            return line[len(key) :].decode(errors="replace")
    return ""


def _hold(pids: Iterable[int], prefix: str, held: dict[int, int]) -> list[int]:
    """Hold those that still bear the mark by a descriptor (a pid may be another's by now); returns the new ones."""
    fresh = []
    for pid in pids:
        if pid in held and not _ended(held[pid], 0.0):
            continue
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        if not _below(_mark(f"/proc/{pid}"), prefix):
            os.close(handle)
            continue
        if pid in held:
            os.close(held[pid])
        held[pid] = handle
        fresh.append(pid)
    return fresh


def _signal(handle: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(handle, number)


def _ended(handle: int, timeout: float) -> bool:
    """Whether it has ended, after waiting for that for `timeout` seconds at most."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1000))
