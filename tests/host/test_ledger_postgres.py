"""The ledger on a real PostgreSQL server of its own: shared by two writers, lost and back, nothing twice."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs import postgres

from everstep.core.ledger import Event
from everstep.host.ledger import Ledger, events


def event(number: int) -> Event:
    return Event(
        id=f"{number:06d}", time=1000.0 + number, kind="test.happened", job="job", run="run", data={"n": number}
    )


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.serving("ledger") as one:
        yield one


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
