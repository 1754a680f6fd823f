"""The ledger on a real PostgreSQL server of its own: shared by two writers, lost and back, nothing twice."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from everstep.core.ledger import Event
from everstep.host.ledger import Ledger, events

BINARIES = next((path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)
MISSING = "PostgreSQL is not installed; `make test-setup` installs it with apt"


def event(number: int) -> Event:
    return Event(
        id=f"{number:06d}", time=1000.0 + number, kind="test.happened", job="job", run="run", data={"n": number}
    )


@dataclass
class Server:
    """A private cluster, run by the user postgres where the tests run as root."""

    folder: Path
    port: int

    @property
    def uri(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def call(self, program: str, *arguments: str) -> None:
        command = [str(BINARIES / program), *arguments]
        if os.getuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60, cwd=self.folder
        )

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder} -c fsync=off"
        self.call(
            "pg_ctl", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-w", "-o", options, "start"
        )

    def stop(self) -> None:
        self.call("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    if BINARIES is None:
        assert not os.environ.get("CI"), MISSING
        pytest.skip(MISSING)
    folder = Path("/tmp") / tmp_path_factory.mktemp("postgres").name  # sockets need a short path
    folder = Path(str(folder) + f"-{os.getpid()}")
    folder.mkdir(mode=0o755)
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    one = Server(folder, port)
    one.call("initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "postgres")
    one.start()
    yield one
    one.stop()
    shutil.rmtree(folder)


def journal(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name / "events.jsonl"


def test_two_runs_append_to_one_database_at_once(server, tmp_path):
    ledgers = [Ledger(server.uri, journal(tmp_path, name)) for name in ("one", "two")]
    for number in range(200):
        ledgers[number % 2].append(event(number))
    assert all(ledger.close(30) for ledger in ledgers)
    assert sorted(one.id for one in events(server.uri)) == [f"{number:06d}" for number in range(200)]
    assert {one.id: one.data for one in events(server.uri)}["000007"] == {"n": 7}


def test_what_happens_while_the_server_is_away_arrives_when_it_is_back(server, tmp_path):
    ledger = Ledger(server.uri, journal(tmp_path, "away"), longest_wait=0.2)
    ledger.append(event(1000))
    assert ledger.flush(30)
    server.stop()
    begun = time.monotonic()
    for number in range(1001, 1011):
        ledger.append(event(number))
    assert time.monotonic() - begun < 5, "appending waits for no database"
    server.start()
    ledger.append(event(1011))
    assert ledger.close(30)
    known = [one.id for one in events(server.uri) if one.id >= "001000"]
    assert known == [f"{number:06d}" for number in range(1000, 1012)]


def test_a_journal_that_is_replayed_whole_changes_nothing(server, tmp_path):
    path = journal(tmp_path, "again")
    first = Ledger(server.uri, path)
    for number in range(2000, 2010):
        first.append(event(number))
    assert first.close(30)
    before = events(server.uri)
    path.with_name("events.jsonl.drained").unlink()
    again = Ledger(server.uri, path)
    again.append(event(2010))
    assert again.close(30)
    assert [one for one in events(server.uri) if one.id != "002010"] == before
