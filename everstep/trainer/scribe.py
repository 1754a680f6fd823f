"""A rank's end of its writer process: starts it, asks it, and starts it again when it has died."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from everstep.store import faults
from everstep.trainer import forks, link

if TYPE_CHECKING:  # a standby starts its writer before it imports torch
    from everstep.trainer.buffers import Buffer


class WriterDied(ChildProcessError):
    """The writer process ended while it was asked for something; it can be asked again."""


class Refused(OSError):
    """What a disk answered to the writer; its text is the writer's own."""

    def __str__(self) -> str:
        return str(self.strerror)


class Scribe:
    """The writer of one rank. All but `start` is called by the saver's thread only."""

    def __init__(self) -> None:
        self.deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._rank: int | None = None
        self._known: set[int] = set()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The living writer's pid, as far as is known."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the writer process, unless there is one. A standby does it ahead of time."""
        with self._lock:
            if self._process is not None:
                return
            with forks.starting:
                ours, theirs = socket.socketpair()
                try:
                    argv = [sys.executable, "-m", "everstep.trainer.writer", str(theirs.fileno()), str(os.getpid())]
                    plan = faults.plan()
                    env = os.environ | ({"EVERSTEP_FAULTS": plan} if plan else {})
                    self._process = subprocess.Popen(
                        argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], close_fds=True, env=env
                    )
                except BaseException:
                    ours.close()
                    raise
                finally:
                    theirs.close()
            self._socket = ours
            self._known = set()
            self._rank = None

    def begin(self, rank: int) -> None:
        """Say which rank this is."""
        self.start()
        self._ask({"do": "begin", "rank": rank})
        self._rank = rank

    def write(
        self, rank: int, folder: str, files: list[dict[str, Any]], buffer: "Buffer", moved: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """Have files written from a buffer; path, size and digest of each. Raises OSError and WriterDied."""
        self._introduce(rank)
        if buffer.number not in self._known:
            self._ask({"do": "map", "buffer": buffer.number, "size": buffer.size}, [buffer.descriptor])
            self._known.add(buffer.number)
        found: list[dict[str, Any]] = self._ask(
            {"do": "write", "folder": folder, "files": files, "buffer": buffer.number}, moved=moved
        )["files"]
        return found

    def commit(self, rank: int, folder: str, manifest: str) -> None:
        """Have a manifest published. Raises OSError and WriterDied."""
        self._introduce(rank)
        self._ask({"do": "commit", "folder": folder, "text": manifest})

    def close(self) -> None:
        """Hang up: the writer leaves. A rank that ends need not, as the kernel does it."""
        process, self._process = self._process, None
        if process is None or self._socket is None:
            return
        self._socket.close()
        process.wait(5)

    def _introduce(self, rank: int) -> None:
        if self._process is None or self._rank is None:
            self.begin(rank)

    def _ask(
        self, message: dict[str, Any], descriptors: list[int] | None = None, moved: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        assert self._socket is not None
        try:
            link.send(self._socket, message, descriptors or ())
            while (heard := link.receive(self._socket)) is not None and "moved" in heard[0]:
                if moved:
                    moved(heard[0]["moved"])
        except (BrokenPipeError, ConnectionResetError):
            heard = None
        if heard is None:
            raise self._bury()
        if "error" in heard[0]:
            raise Refused(heard[0]["number"], heard[0]["error"])
        return heard[0]

    def _bury(self) -> WriterDied:
        """Reap the process that has hung up, so that the next question starts another."""
        process, self._process = self._process, None
        assert process is not None
        assert self._socket is not None
        self._socket.close()
        self.deaths += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        status = process.wait()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return WriterDied(f"the writer process ended with {how}")
