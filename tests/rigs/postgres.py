"""A real PostgreSQL server of one's own: loopback, a free port, dead when the block ends."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

BINARIES = next((path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)
MISSING = "PostgreSQL is not installed; `make test-setup` installs it with apt"


@dataclass
class Server:
    """A private cluster, run by the user postgres where the tests run as root. With a password nobody gets in without."""

    folder: Path
    port: int
    password: str = ""

    @property
    def uri(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def bare_uri(self) -> str:
        """Without a user."""
        return self.uri.replace("postgres@", "")

    def call(self, program: str, *arguments: str) -> None:
        command = [str(BINARIES / program), *arguments]
        if os.getuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60, cwd=self.folder
        )

    def make(self) -> None:
        ways = ["-A", "trust"]
        if self.password:
            file = self.folder / "password"
            file.write_text(self.password)
            if os.getuid() == 0:
                shutil.chown(file, "postgres")
            ways = ["-A", "scram-sha-256", "--pwfile", str(file)]
        self.call("initdb", "-D", str(self.folder / "data"), *ways, "-U", "postgres")

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder} -c fsync=off"
        self.call(
            "pg_ctl", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-w", "-o", options, "start"
        )

    def stop(self) -> None:
        self.call("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")


@contextmanager
def serving(name: str, password: str = "") -> Iterator[Server]:
    """A server for the length of the block; skips where PostgreSQL is not installed."""
    if BINARIES is None:
        assert not os.environ.get("CI"), MISSING
        pytest.skip(MISSING)
    folder = Path(f"/tmp/{name}-{os.getpid()}")  # sockets need a short path
    folder.mkdir(mode=0o755)
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    one = Server(folder, port, password)
    try:
        one.make()
        one.start()
        try:
            yield one
        finally:
            one.stop()
    finally:
        shutil.rmtree(folder)
