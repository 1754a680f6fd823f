"""The embedded Prefect server: a child of ours that dies with us, for runs that no other server looks after.

No UI and no background service but the one that records task runs, its own database and home in a folder of its own,
loopback only. We listen, it inherits the socket: the port cannot be lost on the way, and who connects before the server
is ready simply waits. `docs/decisions/0003-embedded-server.md` has the measurements.
"""

import fcntl
import importlib.metadata
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from everstep.core.errors import EverstepError
from everstep.host import process
from everstep.host.process import Process
from everstep.host.server_boot import TEMPLATE

_BOOT = str(Path(__file__).with_name("server_boot.py"))
_FOLDER = "everstep-prefect-"
_OFF = ("CANCELLATION_CLEANUP", "EVENT_PERSISTER", "FOREMAN", "LATE_RUNS", "PAUSE_EXPIRATIONS", "SCHEDULER", "TRIGGERS")
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ahead: "Server | None" = None


@dataclass
class Server:
    """A started server; `url` is what `PREFECT_API_URL` is to be."""

    url: str
    process: Process
    log: Path
    _folder: Path
    _lock: int

    def wait_ready(self, deadline: float) -> None:
        """Return when it answers; raises EverstepError when it died or did not answer within `deadline` seconds."""
        until = time.monotonic() + deadline
        while time.monotonic() < until:
            status = self.process.status()
            if status is not None:
                raise EverstepError(f"The embedded Prefect server ended with status {status}; {self.log} says why.")
            if self._answers(until - time.monotonic()):
                return
            time.sleep(0.02)
        raise EverstepError(f"The embedded Prefect server did not answer within {deadline:.0f} s; look at {self.log}.")

    def stop(self) -> None:
        """End it and remove its database. Nothing in there outlives the flow, so it need not be asked."""
        if self._lock < 0:
            return
        self.process.kill_group()
        self.process.wait(5.0)
        process.sweep(self.process.token, 0.0)
        self.process.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _answers(self, patience: float) -> bool:
        try:
            with _NO_PROXY.open(f"{self.url}/health", timeout=max(0.05, min(patience, 1.0))) as answer:
                return bool(answer.status == 200)
        except OSError:  # not accepting yet, or slow on a busy machine
            return False


def start(log: Path, cache: Path | None = None) -> Server:
    """Start a server whose output is appended to `log` (a file, or a folder for one); returns at once.

    `cache` holds the migrated template; the user's cache folder if not given.
    Start it from a thread that lives as long as the server should, best the main thread.
    """
    log = log / "prefect-server.log" if log.is_dir() else log
    _remove_abandoned()
    folder, lock = _own_folder()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or every answer in two pieces waits 40 ms
    try:
        cache = cache or _cache()
        argv = [sys.executable, "-I", "-S", _BOOT, str(cache), str(folder / "server.db"), str(listener.fileno())]
        child = process.spawn(
            argv,
            process.child_environment((), _settings(folder)),
            f"prefect-server/{os.getpid()}-{secrets.token_hex(4)}",
            log,
            pass_fds=(listener.fileno(), lock),
            death_signal=signal.SIGKILL,
            cwd=folder,
        )
        return Server(f"http://127.0.0.1:{listener.getsockname()[1]}/api", child, log, folder, lock)
    finally:
        listener.close()


def start_ahead(log: Path) -> None:
    """Start the server that this process is going to `take`: it comes up while Python imports the rest."""
    global _ahead  # noqa: PLW0603 - one process, one embedded server
    _ahead = start(log)


def take() -> Server:
    """The server that was started ahead, or a new one. It is the caller's now."""
    global _ahead
    taken, _ahead = _ahead, None
    return taken or start(default_log())


def stop_ahead() -> None:
    """Stop a server that was started ahead and not taken."""
    if _ahead is not None:
        _ahead.stop()


def is_prepared() -> bool:
    """Whether this machine has the migrated template, which takes the first start some seconds to make."""
    return (_cache() / TEMPLATE).exists()


def default_log() -> Path:
    """A log in the user's cache folder, for whoever has no better place; in the temporary one where that is closed."""
    log = _cache().with_name("prefect-server.log")
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / log.name
    return log if os.access(log.parent, os.W_OK) else Path(tempfile.gettempdir()) / log.name


def _settings(folder: Path) -> dict[str, str]:
    """No user's profile or project file counts: home and working directory are the server's own folder."""
    settings = {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'server.db'}",
        "PREFECT_API_DATABASE_MIGRATE_ON_START": "false",
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_ENABLED": "false",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        "DO_NOT_TRACK": "1",
    }
    return settings | {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in _OFF}


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "everstep" / f"prefect-{importlib.metadata.version('prefect')}"


def _own_folder() -> tuple[Path, int]:
    """A new folder and the descriptor of its lock. The server inherits the lock, so it is held while either lives."""
    new = Path(tempfile.mkdtemp(prefix="everstep-new-"))
    lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return new.rename(new.with_name(new.name.replace("everstep-new-", _FOLDER))), lock


def _remove_abandoned() -> None:
    """Folders of servers that were killed together with their flow: nobody holds their lock any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:
            continue  # another user's, or just being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
