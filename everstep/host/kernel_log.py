"""The kernel's log as it grows: /dev/kmsg, or the journal where that is not allowed.

Nothing here waits. What has not been fetched stays in the kernel's ring or in the pipe, so memory is bounded whatever the
log does; what was lost meanwhile is counted.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from everstep.core.log_lines import Origin
from everstep.core.log_stamps import KMSG as RECORD
from everstep.core.log_stamps import Clock
from everstep.host import process
from everstep.host.log_file import LONGEST_LINE, Piece
from everstep.host.process import Process

KMSG = Path("/dev/kmsg")
LONGEST_RECORD = 8192  # the kernel gives no longer one (CONSOLE_EXT_LOG_MAX)
ASK_SECONDS = 5.0
SLACK_SECONDS = 1.0  # a record is there a moment after its stamp
_SERIAL = re.compile(rb"(\d{1,3}),(\d{1,20}),\d")
_CURSOR = re.compile(rb'"__CURSOR" ?: ?"([^"]{1,512})"')


class Kmsg:
    """The kernel's own ring. `after` is the number of the last record that is known already, -1 for all that is there."""

    def __init__(self, handle: int, after: int = -1, *, wall: Callable[[], float] = time.time) -> None:
        self.name = "/dev/kmsg"
        self.trouble = ""
        self.lost = 0
        self.last = after
        self._handle = handle
        self._wall = wall
        self._empty_at: float | None = None
        self._behind = 0.0
        os.set_blocking(handle, False)

    def read(self, most: int) -> Piece:
        found: list[str] = []
        size = 0
        oldest, began = self._empty_at, self._wall()
        while size < most:
            try:
                record = os.read(self._handle, LONGEST_RECORD)
            except BlockingIOError:
                self._empty_at = began
                break
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EINVAL):  # overwritten before it was read; too long a record
                    self.lost += 1
                    continue
                self.trouble = f"{self.name} cannot be read: {error.strerror}"
                break
            if not record:
                break
            self.trouble = ""
            if line := self._line(record):
                found.append(line)
                size += len(line)
        return Piece("".join(found), Origin.kernel, Clock(boot=self._boot(found[0] if found else "", oldest)))

    def _boot(self, first: str, oldest: float | None) -> float:
        """The Unix time at which the kernel's stamps begin.

        They come from another clock than any that can be asked, which stays behind where a machine was suspended or moved.
        So a record that was not there at the last look is taken for no older than that.
        """
        now = self._wall()
        boot = now - time.clock_gettime(time.CLOCK_MONOTONIC)
        if oldest is not None and (stamp := RECORD.match(first)):
            seen = boot + int(stamp["micro"]) / 1e6
            self._behind = min(max(self._behind, oldest - SLACK_SECONDS - seen), max(0.0, now - seen))
        return boot + self._behind

    def _line(self, record: bytes) -> str:
        """The record as a line; empty for one that is known, or that a program wrote into the kernel's log."""
        named = _SERIAL.match(record)
        if named is None or int(named[2]) <= self.last:
            return ""
        self.last = int(named[2])
        if int(named[1]) >> 3:  # the facility; 0 is the kernel, and nobody else can write it
            return ""
        return record.partition(b"\n")[0].decode("utf-8", "replace") + "\n"

    def close(self) -> None:
        os.close(self._handle)


class JournalPipe:
    """The kernel's messages by `journalctl --follow`, which is started again where it ends, later each time."""

    def __init__(self, program: str, cursor: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = "journal"
        self.trouble = ""
        self.lost = 0
        self.cursor = cursor
        self._program = program
        self._clock = clock
        self._process: Process | None = None
        self._pipe = -1
        self._rest = b""
        self._failures = 0
        self._not_before = 0.0

    def read(self, most: int) -> Piece:
        found = b""
        while len(found) < most and self._starts():
            try:
                data = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self._ends()
                break
            self._failures, self.trouble = 0, ""
            whole, _, self._rest = (self._rest + data).rpartition(b"\n")
            found += whole + b"\n" if whole else b""
            if len(self._rest) > LONGEST_LINE:
                self._rest, self.lost = b"", self.lost + 1
        if cursors := _CURSOR.findall(found):
            self.cursor = cursors[-1].decode("ascii", "replace")
        return Piece(found.decode("utf-8", "replace"), Origin.unknown, Clock())  # each record names its writer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill_group()
            self._process.wait(1.0)
            self._process.close()
            self._process = None
            os.close(self._pipe)

    def _starts(self) -> bool:
        if self._process is not None:
            return True
        if self._clock() < self._not_before:
            return False
        since = ("--after-cursor", self.cursor) if self.cursor else ("--boot",)
        options = ("--dmesg", "--follow", "--lines=all", "--output=json", "--quiet", "--no-pager", *since)
        read, write = os.pipe()
        os.set_blocking(read, False)
        command = ["/bin/sh", "-c", 'exec "$0" "$@" >"/proc/self/fd/$OUT" 2>/dev/null', self._program, *options]
        env = process.child_environment((), {"OUT": str(write)})
        try:
            self._process = process.spawn(
                command, env, f"journal/{os.getpid()}", Path(os.devnull), pass_fds=(write,), death_signal=signal.SIGKILL
            )
        except OSError as error:
            os.close(read)
            self._pause(f"journalctl cannot be started: {error.strerror}")
            return False
        finally:
            os.close(write)
        self._pipe, self._rest = read, b""
        return True

    def _ends(self) -> None:
        self.close()
        self._pause("journalctl ended")

    def _pause(self, why: str) -> None:
        self.trouble = why
        self._failures += 1
        self._not_before = self._clock() + min(60.0, 2.0**self._failures)


def open_kernel_log(
    place: str = "", *, kmsg: Path = KMSG, journalctl: str | None = None
) -> tuple[Kmsg | JournalPipe | None, str]:
    """The kernel's log by the way that is allowed here; else none, and why: then it is not measured.

    `place` is how far it is known, as `place_of` gave it.
    """
    kind, _, value = place.partition(" ")
    try:
        handle = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        _try(handle)
        after = value.rpartition(" ")
        return Kmsg(handle, int(after[2]) if kind == "kmsg" and after[0] == _boot() else -1), ""
    except OSError as error:
        refused = f"{kmsg}: {error.strerror}"
    program = journalctl or shutil.which("journalctl")
    if program is None:
        return None, f"{refused}; there is no journalctl"
    try:
        asked = [program, "--dmesg", "--boot", "--lines=1", "--output=json", "--quiet", "--no-pager"]
        done = subprocess.run(asked, capture_output=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{refused}; journalctl: {error}"
    if not done.stdout.strip():
        return None, f"{refused}; the journal shows this user no message of the kernel"
    return JournalPipe(program, value if kind == "journal" else ""), ""


def place_of(source: Kmsg | JournalPipe) -> str:
    """How far a kernel's log has been read, to go on from there in another process."""
    if isinstance(source, Kmsg):
        return f"kmsg {_boot()} {source.last}"
    return f"journal {source.cursor}"


def _try(handle: int) -> None:
    """Read nothing of it, but be refused now where reading is refused. Raises OSError."""
    try:
        os.lseek(handle, 0, os.SEEK_SET)  # the oldest record of the ring
        os.read(handle, LONGEST_RECORD)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EPIPE, errno.EINVAL):
            os.close(handle)
            raise
    os.lseek(handle, 0, os.SEEK_SET)


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
