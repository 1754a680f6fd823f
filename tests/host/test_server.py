import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from everstep.core.errors import EverstepError
from everstep.host import process, server, server_boot

FLOW = """
import json, time
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.context import get_run_context

@task
def inner():
    return 1

@flow
def outer():
    inner()
    return str(get_run_context().flow_run.id)

run = outer()
with get_client(sync_client=True) as client:
    flow_run = client.read_flow_run(run)
    for _ in range(100):
        tasks = client.read_task_runs()
        if tasks and tasks[0].state_name == "Completed":
            break
        time.sleep(0.05)
    print(json.dumps([flow_run.state_name, tasks[0].state_name]))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The user's own template if there is one by now: making it takes 10 s."""
    return server._cache()


@pytest.fixture
def started(tmp_path, cache):
    one = server.start(tmp_path / "server.log", cache)
    yield one
    one.stop()
    assert process.marked(one.process.token) == []
    assert not one._folder.exists()


def test_who_connects_early_waits_and_a_flow_sees_its_own_states(started, tmp_path):
    with urllib.request.urlopen(f"{started.url}/health", timeout=60) as answer:
        assert answer.status == 200
    started.wait_ready(10)
    env = {**os.environ, "PREFECT_API_URL": started.url, "PREFECT_HOME": str(tmp_path / "home"), "DO_NOT_TRACK": "1",
           "PREFECT_LOGGING_LEVEL": "ERROR"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", FLOW], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["Completed", "Completed"]
    assert "Error" not in (tmp_path / "server.log").read_text()


def test_a_server_that_dies_is_said_at_once(started, tmp_path):
    os.kill(started.process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EverstepError, match=r"ended with status -9; .*server\.log says why"):
        started.wait_ready(60)
    assert time.monotonic() - began < 2


def test_it_dies_with_its_parent_and_its_folder_goes_with_the_next_start(tmp_path, cache):
    program = f"import sys, time; from pathlib import Path; from everstep.host import server; s = server.start(Path({str(tmp_path / 'a.log')!r}), Path({str(cache)!r})); s.wait_ready(60); print(s._folder, s.process.token, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    folder, token = parent.stdout.readline().split()
    assert len(process.marked(token)) == 1
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 5
    while process.marked(token) and time.monotonic() < until:
        time.sleep(0.01)
    assert process.marked(token) == []
    assert Path(folder).exists()
    while Path(folder).exists() and time.monotonic() < until:
        server._remove_abandoned()
    assert not Path(folder).exists()


def test_no_setting_of_the_user_reaches_it(started, tmp_path, monkeypatch):
    environment = Path(f"/proc/{started.process.pid}/environ").read_bytes().decode()
    assert f"PREFECT_HOME={started._folder}" in environment
    assert "PREFECT_API_URL" not in environment


def test_the_folder_of_a_living_server_is_never_removed(started):
    server._remove_abandoned()
    assert started._folder.exists()


def test_a_damaged_template_is_made_again(tmp_path, monkeypatch):
    made = []

    def migrate(database):
        made.append(database)
        connection = server_boot.sqlite3.connect(database)
        connection.executescript("CREATE TABLE alembic_version (v); INSERT INTO alembic_version VALUES ('1');")
        connection.close()

    monkeypatch.setattr(server_boot, "_migrate", migrate)
    server_boot._copy_of_template(tmp_path / "cache", tmp_path / "one.db")
    server_boot._copy_of_template(tmp_path / "cache", tmp_path / "two.db")
    assert len(made) == 1
    (tmp_path / "cache" / "server.db").write_bytes(b"SQLite format 3\\0 torn")
    server_boot._copy_of_template(tmp_path / "cache", tmp_path / "three.db")
    assert len(made) == 2
    assert (tmp_path / "one.db").read_bytes() == (tmp_path / "three.db").read_bytes()
