"""Logs that grow in files: read as far as they have come, through rotation and truncation.

Nothing here waits. What has not been fetched stays in the file, so memory is bounded whatever the log does; what was passed
over because it came too fast is counted.
"""

import contextlib
import glob
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from everstep.core.log_lines import Origin
from everstep.core.log_stamps import Clock

LONGEST_LINE = 1 << 16
MOST_FILES = 64
MOST_OLD = 10_000
LOOK_SECONDS = 5.0
LIVELY_SECONDS = 86_400.0
"""A file that nobody has written to for so long is not followed."""


class Piece(NamedTuple):
    """Whole lines of one log; empty where there is nothing new."""

    text: str
    origin: Origin
    clock: Clock


class Source(Protocol):
    """A log that is followed. `trouble` says why it cannot be read just now, `lost` how much was passed over unread."""

    name: str
    trouble: str

    @property
    def lost(self) -> int: ...

    def read(self, most: int) -> Piece:
        """What is new, whole lines, about `most` bytes at most."""
        ...

    def close(self) -> None: ...


class LogFile:
    """A file of a program that is written to, renamed or cut meanwhile. `from_start` also reads what is there already."""

    HEAD = 256
    FAR_BEHIND = 64 << 20
    KEPT = 8 << 20

    def __init__(self, path: Path, origin: Origin = Origin.program, *, from_start: bool = False) -> None:
        self.name = str(path)
        self.trouble = ""
        self.lost = 0
        self._path = path
        self._origin = origin
        self._handle = -1
        self._offset = 0
        self._head = b""
        self._at_end = not from_start
        self._rest = b""
        self._skips = False

    def read(self, most: int) -> Piece:
        try:
            text = self._read(most)
        except OSError as error:
            self.trouble = f"{self._path}: {error.strerror}"
            text = ""
        return Piece(text, self._origin, Clock())

    @property
    def identity(self) -> tuple[int, int] | None:
        """Device and inode of the file that is open."""
        if self._handle < 0:
            return None
        mine = os.fstat(self._handle)
        return mine.st_dev, mine.st_ino

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _read(self, most: int) -> str:
        if self._handle < 0 and not self._opens():
            return ""
        text = self._grown(most)
        if not text and self._is_replaced():
            text, self._rest = self._rest.decode("utf-8", "replace"), b""  # a last line without an end
            self.close()
        return text

    def _opens(self) -> bool:
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self._at_end = False  # whatever comes there is new
            return False
        size = os.fstat(handle)
        if not stat.S_ISREG(size.st_mode):
            os.close(handle)
            self.trouble = f"{self._path} is no regular file"
            return False
        self.trouble = ""
        self._handle, self._rest, self._skips = handle, b"", False
        self._offset = size.st_size if self._at_end else 0
        self._at_end = False
        self._head = os.pread(handle, self.HEAD, 0)
        return True

    def _grown(self, most: int) -> str:
        size = os.fstat(self._handle).st_size
        if size < self._offset or os.pread(self._handle, len(self._head), 0) != self._head:
            self._offset, self._rest, self._head, self._skips = 0, b"", b"", False  # it was cut and begins anew
        if len(self._head) < self.HEAD:
            self._head = os.pread(self._handle, self.HEAD, 0)
        if size - self._offset > self.FAR_BEHIND:
            self.lost += size - self.KEPT - self._offset
            self._offset, self._rest, self._skips = size - self.KEPT, b"", True
        data = os.pread(self._handle, most, self._offset)
        self._offset += len(data)
        if self._skips:
            _, end, data = data.partition(b"\n")
            self._skips = not end
        whole, end, rest = (self._rest + data).rpartition(b"\n")
        self._rest = rest
        if len(rest) > LONGEST_LINE:
            self._rest, self._skips = b"", True
            whole += end + rest[:LONGEST_LINE]
            end = b"\n"
        return (whole + end).decode("utf-8", "replace")

    def _is_replaced(self) -> bool:
        """Whether the path has another file by now. One that is only gone may still be written to."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) != self.identity


class LogFiles:
    """All files that some patterns name, such as `<tier>/*/*/logs/*.log`: the newest 64, new ones from their first line."""

    def __init__(
        self,
        patterns: Sequence[str],
        origin: Origin = Origin.program,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.name = ", ".join(patterns)
        self.trouble = ""
        self._patterns = tuple(patterns)
        self._origin = origin
        self._clock = clock
        self._wall = wall
        self._files: dict[str, LogFile] = {}
        self._lost = 0
        self._look_at = clock()
        self._old: set[str] | None = None
        self._turn = 0

    @property
    def lost(self) -> int:
        return self._lost + sum(one.lost for one in self._files.values())

    def read(self, most: int) -> Piece:
        """What is new in the next file that has something new: each gets its turn."""
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + LOOK_SECONDS
            self._look()
        files = list(self._files.values())
        for step in range(len(files)):
            one = files[(self._turn + step) % len(files)]
            piece = one.read(most)
            if piece.text:
                self._turn = (self._turn + step + 1) % len(files)
                return piece
        self.trouble = next((one.trouble for one in files if one.trouble), "")
        return Piece("", self._origin, Clock())

    def close(self) -> None:
        for one in self._files.values():
            one.close()

    def _look(self) -> None:
        """Follow the newest files. One that was there before the first look is followed from its end."""
        found: dict[str, os.stat_result] = {}
        for path in (path for pattern in self._patterns for path in glob.iglob(pattern)):  # noqa: PTH207
            with contextlib.suppress(OSError):
                found[path] = os.stat(path)  # noqa: PTH116 - patterns are strings, and there may be many
        if self._old is None:
            self._old = set(sorted(found)[:MOST_OLD])
        lively = {
            path: one.st_mtime
            for path, one in found.items()
            if stat.S_ISREG(one.st_mode) and self._wall() - one.st_mtime <= LIVELY_SECONDS
        }
        newest = sorted(lively, key=lambda path: (lively[path], path), reverse=True)[:MOST_FILES]
        open_ones = {one.identity for one in self._files.values()}
        for path in newest:
            if path not in self._files and (found[path].st_dev, found[path].st_ino) not in open_ones:
                self._files[path] = LogFile(Path(path), self._origin, from_start=path not in self._old)
        for path in [path for path in self._files if path not in newest]:
            if path not in found or len(self._files) > MOST_FILES:
                self._drop(path)

    def _drop(self, path: str) -> None:
        one = self._files.pop(path)
        self._lost += one.lost
        one.close()
