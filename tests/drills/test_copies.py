"""Copies are never lost in silence: a run whose copies have not landed is no success, and a hanging tier stalls no step."""

import json
import sqlite3

import pytest
from plans import Shape
from rigs import fuse
from rigs.proxy import Fault

from everstep import open_run
from everstep.core.segment import Heartbeat


def use(drill, place, **tiers):
    drill.job["tiers"] = {"local": "nvme", "persistent": "persistent", "object": place} | tiers
    return drill


def tags(drill):
    with sqlite3.connect(drill.folder / "mlflow.db") as database:
        found = dict(database.execute("select key, value from tags"))
    database.close()
    return found


def events(drill, kind):
    lines = (drill.run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture
def away(make_drill, s3_server, s3_proxy):
    """A job with a store that answers 503 to every PUT, and the environment that leads there."""
    drill = use(make_drill(steps=30, limits={"drain": 4}), f"s3://{s3_server.bucket()}/runs")
    s3_proxy.plan(Fault("slow_down", "PUT", times=-1))
    return drill, s3_server.env() | {"AWS_ENDPOINT_URL": s3_proxy.endpoint}


def test_a_store_that_takes_nothing_leaves_a_run_that_is_no_success_until_the_copy_alone_is_made(away, s3_proxy):
    """Case BC-032: the flow fails, MLflow shows what is missing, the copy on the persistent tier is kept."""
    drill, environment = away
    ended = drill.run(environment=environment)
    assert (ended.code, ended.final["status"], ended.final["step"]) == (1, "degraded", 30), ended.err
    assert "did not take it within 4 s; when it answers, run the same command" in ended.err
    assert tags(drill)["everstep.object"] == "missing step-00000030.a1"
    assert (drill.run_dir / "checkpoints" / "step-00000030.a1" / "manifest.json").exists()
    assert ended.final["checkpoint"].endswith("step-00000030.a1")
    assert open_run(drill.run_dir).status == "degraded"
    still = drill.run(environment=environment)
    assert (still.code, still.final["status"]) == (1, "degraded"), "still no success, and nothing is trained again"
    s3_proxy.clear()
    drill.job["limits"] = {"drain": 60}
    healed = drill.run(environment=environment)
    assert (healed.code, healed.final["status"]) == (0, "completed"), healed.err
    assert (healed.final["attempts"], healed.final["weights"]) == (1, ended.final["weights"])
    assert s3_proxy.seen("PUT", "step-00000030.a1/manifest.json")
    assert tags(drill)["everstep.object"] == "complete"
    assert tags(drill)["everstep.checkpoint"].startswith("s3://")
    assert open_run(drill.run_dir).status == "completed"
    drill.await_gone()


def test_a_job_may_say_that_it_is_complete_without_the_object_tier(away):
    drill, environment = away
    drill.job["tiers"]["object_required"] = False
    ended = drill.run(environment=environment)
    assert (ended.code, ended.final["status"]) == (0, "completed"), ended.err
    assert tags(drill)["everstep.object"] == "missing step-00000030.a1"
    assert len(events(drill, "object.behind")) == 1


@pytest.mark.skipif(bool(fuse.why_not()), reason=fuse.why_not())
def test_a_persistent_tier_that_hangs_stalls_no_step_and_loses_nothing(make_drill, untouched, tmp_path):
    """Copies hang in the middle of a write; the steps go on at their pace, overtaken copies are named, the end waits."""
    with fuse.mount(tmp_path / "mounted") as tier:
        drill = make_drill(config={"pause": 0.05}, segment_steps=60, checkpoint={"every_steps": 5, "keep": 2})
        drill.job["tiers"]["persistent"] = str(tier.path)
        home = drill.folder / "persistent"
        home.symlink_to(tier.path)
        flow = drill.start()
        drill.await_step(4, flow, seconds=200)
        tier.plan(fuse.Fault("hang", "write", r"step-.*\.part$"))
        tier.await_hanging()
        drill.await_step(min(55, step_of(drill) + 25), flow)
        assert tier.hanging(), "it hung all the while"
        tier.clear()
        ended = drill.wait(flow)
        assert ended.code == 0, ended.err
        assert ended.final["weights"] == untouched(Shape()).final["weights"]
        assert ended.final["restarts"] == 0
        named = {event["data"]["checkpoint"] for event in events(drill, "checkpoint.overtaken")}
        durable = {event["data"]["checkpoint"] for event in events(drill, "checkpoint.durable")}
        saved = {event["data"]["checkpoint"] for event in events(drill, "checkpoint.saved")}
        assert "step-00000060.a1" in durable
        assert saved - durable == named
        assert named, "copies that were overtaken are dropped and named"


@pytest.mark.skipif(bool(fuse.why_not()), reason=fuse.why_not())
def test_a_persistent_tier_that_never_takes_the_last_checkpoint_is_no_success(make_drill, tmp_path):
    """BC-032 for the persistent tier: the copies hang past the limit, the run says so, and goes on from there later."""
    with fuse.mount(tmp_path / "mounted") as tier:
        drill = make_drill(steps=30, limits={"drain": 4})
        drill.job["tiers"]["persistent"] = str(tier.path)
        (drill.folder / "persistent").symlink_to(tier.path)
        tier.plan(fuse.Fault("errno:28", "write", r"step-.*\.part$"))
        ended = drill.run()
        assert (ended.code, ended.final["status"]) == (1, "failed"), ended.err
        assert "did not take the last checkpoint within 4 s" in ended.err
        tier.clear()
        drill.job["limits"] = {"drain": 60}
        again = drill.run()
        assert (again.code, again.final["status"], again.final["step"]) == (0, "completed", 30), again.err
        assert again.final["resumed_from"] == 30


def step_of(drill):
    path = next((drill.folder / "nvme").glob("tiny/r*/heartbeat-0.json"))
    return Heartbeat.parse(path.read_bytes(), str(path.parent), path.name).step
