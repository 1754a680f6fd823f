"""No outage of Prefect, MLflow or the ledger stops a healthy training process."""

import json
import os
import signal
import socket
import sqlite3

import pytest
from plans import Shape

from everstep.host import server


def check(ended, untouched):
    assert ended.code == 0, ended.err
    assert ended.final["restarts"] == 0
    assert ended.final["weights"] == untouched(Shape()).final["weights"]


def test_the_prefect_server_dies_in_mid_run(make_drill, untouched, tmp_path):
    drill = make_drill(config={"pause": 0.1})
    own = server.start(tmp_path)
    try:
        own.wait_ready(120)
        drill.api = own.url
        flow = drill.start(environment={"PREFECT_CLIENT_MAX_RETRIES": "1"})  # the default tries for a minute and a half
        drill.await_step(5, flow)
    finally:
        own.stop()
    ended = drill.wait(flow, timeout=240)
    check(ended, untouched)
    assert "Traceback" not in ended.err


@pytest.fixture
def silent_server():
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_mlflow_hangs(make_drill, untouched, silent_server):
    drill = make_drill(tracking={"uri": silent_server})
    check(drill.run(), untouched)


def test_mlflow_is_away_and_hears_everything_later(make_drill, untouched):
    """BC-102, BC-106: no gap, no double, one run over two flow runs, and the true end status."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    drill = make_drill(tracking={"uri": closed}, steps=40)
    first = drill.run()
    assert first.code == 0, first.err
    assert first.final["mlflow_run"] is None
    drill.job |= {"steps": 60, "tracking": {"uri": "sqlite:///mlflow.db"}}
    second = drill.run({"point": "train.mid_step", "hit": 7})
    assert second.code == 0, second.err
    assert second.final["weights"] == untouched(Shape()).final["weights"]
    with sqlite3.connect(drill.folder / "mlflow.db") as database:
        steps = [row[0] for row in database.execute("select step from metrics where key = 'loss' order by step")]
        status = database.execute("select status from runs").fetchall()
    database.close()
    assert steps == list(range(1, 61))
    assert status == [("FINISHED",)]


def test_the_ledger_is_away_and_hears_everything_later(make_drill, untouched):
    drill = make_drill(ledger={"uri": "sqlite:////proc/nowhere/ledger.db"}, steps=40)
    assert drill.run().code == 0
    drill.job |= {"steps": 60, "ledger": {"uri": "sqlite:///ledger.db"}}
    check(drill.run(), untouched)
    journal = [json.loads(line)["id"] for line in (drill.run_dir / "events.jsonl").read_text().splitlines()]
    with sqlite3.connect(drill.folder / "ledger.db") as database:
        known = [row[0] for row in database.execute("select id from events")]
    database.close()
    assert sorted(known) == sorted(journal)


def test_a_child_whose_heartbeat_cannot_be_read_is_left_alone(make_drill, untouched):
    """BC-105: unreachable but progressing is not failed."""
    drill = make_drill(config={"pause": 0.05}, limits={"train_floor": 1, "start": 60})
    flow = drill.start()
    drill.await_step(5, flow)
    local = drill.folder / "nvme" / "tiny" / drill.run_dir.name
    beat = local / "heartbeat-0.json"
    beat.unlink(missing_ok=True)
    beat.mkdir()
    check(drill.wait(flow), untouched)


def test_a_stopped_rank_is_called_hung_by_its_own_step_time_and_restarted(make_drill, untouched):
    drill = make_drill(config={"pause": 0.02}, limits={"train_floor": 1.5})
    flow = drill.start({"point": "train.mid_step", "hit": 25, "do": "stop"})
    ended = drill.wait(flow)
    assert ended.code == 0, ended.err
    assert ended.final["restarts"] == 1
    events = [json.loads(line) for line in (drill.run_dir / "events.jsonl").read_text().splitlines()]
    causes = [event["data"]["cause"]["kind"] for event in events if event["kind"] == "attempt.ended"]
    assert causes == ["hang", "none"]
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
    drill.await_gone()


def test_a_killed_embedded_flow_leaves_no_process(make_drill):
    """The flow brings its own Prefect server; SIGKILL to the flow takes all with it within 30 s."""
    drill = make_drill(embedded=True, config={"pause": 0.05})
    flow = drill.start()
    drill.await_step(5, flow)
    servers = drill.children(flow.pid)
    assert servers
    os.kill(flow.pid, signal.SIGKILL)
    drill.wait(flow)
    drill.await_gone()
    drill.await_ended(servers)
