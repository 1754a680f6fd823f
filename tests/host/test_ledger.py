"""The ledger: journal first, database when it answers, nothing lost and nothing twice."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy.dialects import postgresql, sqlite

from everstep.core.ledger import Event
from everstep.host import event_table
from everstep.host.ledger import BATCH, Ledger, event_id, events, former
from everstep.store import jsonl


def event(number: int, kind: str = "test.happened", **fields: object) -> Event:
    return Event(id=f"{number:06d}", time=1000.0 + number, kind=kind, job="job", run="run", **fields)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "events.jsonl"


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'db' / 'ledger.db'}"


def database(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///"))


def written(uri: str) -> list[str]:
    return [one.id for one in events(uri)]


def test_an_event_comes_back_as_it_was(uri: str, journal: Path) -> None:
    ledger = Ledger(uri, journal)
    first = event(
        1, step=7, attempt=2, text="it happened", data={"tier": "local", "bytes": 12, "list": [1, {"a": None}]}
    )
    ledger.append(first)
    assert ledger.close(10)
    assert events(uri) == [first]
    assert list(jsonl.read(journal)) == [first.model_dump(mode="json")]


def test_a_journal_with_a_limit_makes_room_and_the_database_has_all(uri: str, journal: Path) -> None:
    ledger = Ledger(uri, journal, most_bytes=4000)
    for number in range(100):
        ledger.append(event(number))
        assert ledger.flush(10)
    assert ledger.close(10)
    assert written(uri) == [f"{number:06d}" for number in range(100)]
    assert sum(one.stat().st_size for one in (journal, former(journal))) < 2 * 4500
    kept = [row["id"] for one in (former(journal), journal) for row in jsonl.read(one)]
    assert kept == [f"{number:06d}" for number in range(100 - len(kept), 100)]


def test_a_journal_with_a_limit_waits_for_the_database_but_not_for_ever(tmp_path: Path, journal: Path) -> None:
    (tmp_path / "db").write_text("a file where a folder is needed")
    ledger = Ledger(f"sqlite:///{tmp_path / 'db' / 'ledger.db'}", journal, most_bytes=4000)
    for number in range(200):
        ledger.append(event(number))
    assert not ledger.close(0.1)
    sizes = [one.stat().st_size for one in (former(journal), journal)]
    assert 16_000 < sizes[0] < 17_000
    assert sizes[1] > 0


def test_the_reader_selects(uri: str, journal: Path) -> None:
    ledger = Ledger(uri, journal)
    for number in range(6):
        ledger.append(event(number, kind="a.odd" if number % 2 else "a.even"))
    ledger.append(event(6).model_copy(update={"run": "other"}))
    assert ledger.close(10)
    assert [one.id for one in events(uri, kind="a.odd")] == ["000001", "000003", "000005"]
    assert [one.id for one in events(uri, run="run", limit=2)] == ["000004", "000005"]
    assert [one.id for one in events(uri, since=1002.0, until=1004.0)] == ["000002", "000003"]
    assert [one.id for one in events(uri, run="other", job="job")] == ["000006"]


def test_a_ledger_that_nobody_wrote_is_empty_and_reading_makes_no_file(uri: str) -> None:
    assert events(uri) == []
    assert not database(uri).exists()


def test_what_was_written_before_is_replayed_once(uri: str, journal: Path) -> None:
    jsonl.append(journal, [event(number).model_dump_json() for number in range(2 * BATCH + 3)])
    for _ in range(2):
        assert Ledger(uri, journal).close(20)
    assert written(uri) == [f"{number:06d}" for number in range(2 * BATCH + 3)]


def test_without_its_mark_the_journal_is_offered_again_and_ids_keep_it_single(uri: str, journal: Path) -> None:
    ledger = Ledger(uri, journal)
    ledger.append(event(1))
    assert ledger.close(10)
    for spoilt in (b"", b"{torn", b'{"ledger": 3}', b"[]"):
        journal.with_name("events.jsonl.drained").write_bytes(spoilt)
        assert Ledger(uri, journal).close(10)
    assert written(uri) == ["000001"]


def test_torn_and_foreign_lines_cost_only_themselves(uri: str, journal: Path) -> None:
    jsonl.append(journal, [event(1).model_dump_json()])
    with journal.open("ab") as file:
        file.write(b'{"id": "torn')
    ledger = Ledger(uri, journal)
    assert ledger.flush(10)
    assert written(uri) == ["000001"]
    jsonl.append(journal, ['{"id": "x", "schema_version": 99}', "not json"])
    ledger.append(event(2))
    assert ledger.close(10)
    assert written(uri) == ["000001", "000002"]


def test_a_deleted_database_is_filled_again(uri: str, journal: Path) -> None:
    ledger = Ledger(uri, journal)
    ledger.append(event(1))
    assert ledger.flush(10)
    database(uri).unlink()
    ledger.append(event(2))
    assert ledger.flush(10)
    assert written(uri) == ["000001", "000002"]
    shutil.rmtree(database(uri).parent)
    assert ledger.close(10)
    assert written(uri) == ["000001", "000002"]


def test_a_locked_database_holds_up_nobody(uri: str, journal: Path) -> None:
    ledger = Ledger(uri, journal, longest_wait=0.2)
    ledger.append(event(1))
    assert ledger.flush(10)
    lock = sqlite3.connect(database(uri), isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    for number in range(2, 6):
        ledger.append(event(number))
    assert time.monotonic() - began < 1
    assert not ledger.flush(0.3)
    lock.execute("ROLLBACK")
    lock.close()
    assert ledger.close(20)
    assert ledger.trouble == ""
    assert written(uri) == [f"{number:06d}" for number in range(1, 6)]


def test_a_place_that_is_no_database_is_named_and_replayed_when_mended(uri: str, journal: Path) -> None:
    database(uri).parent.mkdir()
    database(uri).write_bytes(b"this is not a database, but long enough to be read as one" * 20)
    ledger = Ledger(uri, journal, longest_wait=0.2)
    ledger.append(event(1))
    assert not ledger.flush(0.5)
    assert "not a database" in ledger.trouble
    database(uri).unlink()
    assert ledger.close(10)
    assert written(uri) == ["000001"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_database_is_waited_for(uri: str, journal: Path) -> None:
    database(uri).parent.mkdir(mode=0o500)
    ledger = Ledger(uri, journal, longest_wait=0.2)
    ledger.append(event(1))
    assert not ledger.flush(0.5)
    database(uri).parent.chmod(0o700)
    assert ledger.close(10)
    assert written(uri) == ["000001"]


@pytest.mark.parametrize(
    "uri", ["postgresql+nodriver://here/db", "no-such-database://x", "not a url", "postgresql+psycopg://127.0.0.1:1/x"]
)
def test_a_hopeless_address_hurts_nobody(uri: str, journal: Path) -> None:
    ledger = Ledger(uri, journal)
    ledger.append(event(1))
    assert not ledger.close(0.5)
    assert ledger.trouble
    assert len(list(jsonl.read(journal))) == 1


def test_a_journal_that_cannot_be_written_is_caught_up_in_order(uri: str, tmp_path: Path) -> None:
    journal = tmp_path / "later" / "events.jsonl"
    ledger = Ledger(uri, journal, longest_wait=0.2)
    for number in range(3):
        ledger.append(event(number))
    assert not ledger.flush(0.3)
    assert "later" in ledger.trouble
    journal.parent.mkdir()
    assert ledger.close(10)
    assert [one["id"] for one in jsonl.read(journal)] == ["000000", "000001", "000002"]
    assert written(uri) == ["000000", "000001", "000002"]


def test_odd_characters_and_numbers_are_kept_as_far_as_databases_can(uri: str, journal: Path) -> None:
    ledger = Ledger(uri, journal)
    ledger.append(event(1, text="zero \0 lone \udcff", data={"loss": float("nan"), "path\udc80": ["\0"]}))
    assert ledger.close(10)
    (found,) = events(uri)
    assert found.text == "zero \N{REPLACEMENT CHARACTER} lone ?"
    assert found.data == {"loss": "nan", "path?": ["\N{REPLACEMENT CHARACTER}"]}


WRITER = """
import sys
from pathlib import Path
from everstep.core.ledger import Event
from everstep.host.ledger import Ledger
uri, journal, name, count, wait = sys.argv[1:]
ledger = Ledger(uri, Path(journal))
for number in range(int(count)):
    ledger.append(Event(id=f"{name}-{number:04d}", time=float(number), kind="test.happened", run=name))
    print(number, flush=True)
sys.exit(0 if ledger.close(float(wait)) else 1)
"""


def writer(uri: str, journal: Path, name: str, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, uri, str(journal), name, str(count), "30"]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_two_processes_share_one_database(uri: str, tmp_path: Path) -> None:
    processes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        processes.append(writer(uri, tmp_path / name / "events.jsonl", name, 120))
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    assert {name: len(events(uri, run=name)) for name in ("a", "b")} == {"a": 120, "b": 120}


def test_a_killed_writer_loses_nothing_that_it_had_appended(uri: str, journal: Path) -> None:
    process = writer(uri, journal, "a", 100_000)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 30:
            break
    process.send_signal(signal.SIGKILL)
    appended = int((line + process.stdout.read()).split()[-1]) + 1
    process.wait()
    process.stdout.close()
    assert Ledger(uri, journal).close(30)
    found = written(uri)
    assert found == [f"a-{number:04d}" for number in range(len(found))]
    assert len(found) >= appended


def test_ids_sort_as_they_were_made() -> None:
    ids = [event_id(lambda moment=moment: moment) for moment in (1.0, 1.5, 2.0, 3e9)]
    assert ids == sorted(ids)
    assert {len(one) for one in ids} == {32}
    assert len({event_id() for _ in range(1000)}) == 1000


@pytest.mark.parametrize("dialect", [sqlite, postgresql])
def test_known_ids_are_ignored_on_both_databases(dialect: object) -> None:
    statement = dialect.insert(event_table.EVENTS).on_conflict_do_nothing(index_elements=["id"])
    assert "ON CONFLICT (id) DO NOTHING" in str(statement.compile(dialect=dialect.dialect()))
