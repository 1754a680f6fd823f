"""The gates on GPU health in whole flow runs, on stand-in GPUs under the real driver library's bindings.

The ranks train on the CPU; `health.gpus: all` makes the GPUs of the node count all the same.
"""

import json
import time

import pytest
from rigs import nvml


@pytest.fixture
def fake(tmp_path):
    node = nvml.node(tmp_path, 2)
    node.train()
    return node


def job(**more):
    health = {"gpus": "all", "every_seconds": 1.0, "test_seconds": 3.0} | more
    return {"config": {"pause": 0.25}, "steps": 60, "segment_steps": 20, "health": health}


def events(desk, kind):
    rows = [json.loads(line) for line in (desk.run_dir / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def await_event(desk, flow, kind, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := events(desk, kind):
            return found[0]
        assert flow.poll() is None, flow.communicate()
        time.sleep(0.1)
    raise AssertionError(f"no {kind} in {seconds} s")


@pytest.mark.sampled
def test_a_gpu_that_falls_off_the_bus_ends_the_run_in_order_and_says_what_to_do(make_desk, fake, ask):
    desk = make_desk(**job())
    flow = desk.start(**fake.environment)
    desk.await_step(6, flow)
    fake.xid(1, 79)
    ended = desk.wait(flow)
    assert ended.code == 1
    assert "Xid 79" in ended.err
    assert "What to do: reboot the node" in ended.err
    assert ended.final["status"] == "failed"
    assert ended.final["step"] > 6, "it saved what it had"
    assert ended.final["attempts"] == 1, "no restart on a node that has failed"
    (told,) = events(desk, "attempt.ended")
    assert told["data"]["cause"]["kind"] == "health"
    assert events(desk, "gate.health_closed")
    assert events(desk, "everstep.gpu.xid")[0]["data"]["uuid"] == fake.uuid(1)
    desk.await_gone()
    reported = (desk.run_dir / "report.html").read_text()
    assert "Xid 79" in reported
    check_that_it_goes_on_when_a_person_has_noted_the_remedy(desk)


def check_that_it_goes_on_when_a_person_has_noted_the_remedy(desk):
    """On the node without the faulty GPU the same command finishes the run."""
    program = desk.folder / "mine.py"
    program.write_text(program.read_text().replace('config.get("pause", 0.0)', "0"))
    done = desk.run()
    assert done.code == 0, done.err
    assert done.final["step"] == 60


@pytest.mark.sampled
def test_a_suspect_gpu_is_tested_between_segments_and_training_goes_on(make_desk, fake, ask):
    desk = make_desk("doubt", **job())
    flow = desk.start(**fake.environment)
    desk.await_step(3, flow)
    fake.set(1, temperature=90)
    ended = desk.wait(flow)
    assert ended.code == 0, ended.err
    assert ended.final["attempts"] == 1
    assert events(desk, "gate.health_hold"), "the next segment was not leased before the test"
    tested = events(desk, "gate.active")
    assert len(tested) == 1, "the same cause is tested once"
    assert tested[0]["data"]["outcome"] == "pass"
    passive = [row["data"]["outcome"] for row in events(desk, "gate.passive")]
    assert "fail" in passive
    trained = [row["data"]["outcome"] for row in events(desk, "gate.training")]
    assert len(trained) == 3
    assert "fail" not in trained
    assert ended.final["buckets"]["gate"] > 0, "the wait is accounted as a gate's"
    found = ask("artifacts/filter", {"artifacts": {"key": {"any_": ["gates-doubt"]}}, "sort": "UPDATED_DESC"})
    rows = json.loads(found[0]["data"]) if isinstance(found[0]["data"], str) else found[0]["data"]
    assert {row["gate"] for row in rows} >= {"passive", "active", "training"}
    assert all(row["rule"] for row in rows)


@pytest.mark.sampled
def test_a_driver_that_hangs_stops_no_training(make_desk, fake):
    desk = make_desk(**job())
    flow = desk.start(**fake.environment)
    desk.await_step(3, flow)
    fake.hang("temperature")
    ended = desk.wait(flow)
    fake.answer("temperature")
    assert ended.code == 0, ended.err
    assert not events(desk, "gate.health_closed")
    assert events(desk, "everstep.gpu.unknown"), "and it is told"
    desk.await_gone()
