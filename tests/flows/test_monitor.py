"""`python -m flows.monitor` as a service meets it: its events in Prefect's server, its last line, and what it leaves."""

import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from rigs import nvml

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Desk

from everstep.host import process, server

PATIENCE = 120.0


@pytest.fixture
def node(tmp_path, tmp_path_factory, monkeypatch):
    """A folder, on a machine with two stand-in GPUs, and a Prefect server that keeps events as a shared one does."""
    monkeypatch.setattr(server, "_OFF", tuple(one for one in server._OFF if one != "EVENT_PERSISTER"))
    own = server.start(tmp_path_factory.mktemp("prefect"))
    fake = nvml.node(tmp_path, 2)
    desk = Desk(tmp_path, own.url, {})
    try:
        own.wait_ready(120)
        yield desk, fake
    finally:
        desk.close()
        own.stop()


def ask(desk, path, body):
    request = urllib.request.Request(
        f"{desk.api}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def journal(desk):
    with contextlib.suppress(FileNotFoundError):
        text = (desk.folder / "telemetry" / "n1" / "events.jsonl").read_text()
        return [json.loads(line)["kind"] for line in text.splitlines()]
    return []


def await_(holds, why):
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until, why()
        time.sleep(0.1)


def told(desk, kind):
    found = ask(desk, "events/filter", {"filter": {"event": {"name": [kind]}}})["events"]
    return [one for one in found if one["payload"].get("node") == "n1"]


def probes(pid):
    modules = ("gpu_probe", "host_probe")
    return [found for module in modules for found in process.marked(f"probe/everstep.host.{module}/{pid}")]


@pytest.mark.sampled
def test_its_events_reach_prefect_and_it_ends_when_its_time_is_over_or_when_it_is_told_to(node):
    desk, fake = node
    file = desk.folder / "monitor.yaml"
    file.write_text(yaml.safe_dump({"node": "n1", "folder": "telemetry", "gpus": 2, "kernel_log": False}))
    flow = desk.start([str(file), "--minutes", "0.2"], module="flows.monitor", **fake.environment)
    await_(lambda: "everstep.monitor.started" in journal(desk), lambda: (journal(desk), flow.poll()))
    fake.xid(1, 79)
    ended = desk.wait(flow)
    assert ended.code == 0, ended.err
    assert (ended.final["status"], ended.final["state"], ended.final["node"]) == ("completed", "failed", "n1")
    assert "gpu.xid GPU 1" in ended.out
    await_(lambda: told(desk, "everstep.gpu.failed"), lambda: ask(desk, "events/filter", {"filter": {}}))
    (xid,) = told(desk, "everstep.gpu.xid")
    assert xid["resource"]["prefect.resource.id"] == f"everstep.gpu.{fake.uuid(1)}"
    assert "everstep.node.n1" in [one["prefect.resource.id"] for one in xid["related"]]
    assert (xid["payload"]["xid"], xid["payload"]["action"], xid["payload"]["severity"]) == (
        79, "reboot_node", "critical",
    )  # fmt: skip
    (run,) = ask(desk, "flow_runs/filter", {"flow_runs": {"name": {"any_": ["monitor of n1"]}}})
    assert run["state"]["type"] == "COMPLETED"
    assert probes(flow.pid) == []

    before = len(journal(desk))
    flow = desk.start([str(file)], module="flows.monitor", **fake.environment)
    await_(lambda: "everstep.monitor.started" in journal(desk)[before:], lambda: (journal(desk), flow.poll()))
    assert probes(flow.pid)
    os.kill(flow.pid, signal.SIGTERM)
    ended = desk.wait(flow)
    assert ended.code == 75, ended.err
    assert ended.err.splitlines()[-1] == "Stopped on request."
    assert journal(desk)[-1] == "everstep.monitor.stopped"
    assert "everstep.gpu.xid" not in journal(desk)[before:], "what was told is not told again"
    await_(lambda: not probes(flow.pid), lambda: probes(flow.pid))


def test_it_is_deployed_beside_the_trainings_and_not_in_their_place():
    file = yaml.safe_load((Path(__file__).parents[2] / "deployments" / "prefect.yaml").read_text())
    pools = {one["name"]: one["work_pool"]["name"] for one in file["deployments"]}
    (one,) = [one for one in file["deployments"] if one["name"] == "monitor"]
    assert one["entrypoint"] == "flows/monitor.py:monitor"
    assert pools["monitor"] not in {pool for name, pool in pools.items() if name != "monitor"}
    assert "schedules" not in one
