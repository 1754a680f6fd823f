"""A flow that was killed: MLflow calls no run RUNNING that has no living owner."""

import os
import signal
import time

import pytest

from everstep.host import mlflow_run, process


def status(desk, run: str) -> str | None:
    client = mlflow_run.connect(f"sqlite:///{desk.folder / 'mlflow.db'}")
    found = mlflow_run.find(client, desk.job["name"], run)
    if found is None:
        return None
    assert found.info.status == "RUNNING" or found.info.end_time
    return found.info.status


def await_status(desk, run: str, wanted: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (now := status(desk, run)) != wanted:
        assert time.monotonic() < until, now
        time.sleep(0.2)


def await_gone(mark: str) -> None:
    until = time.monotonic() + 20
    while process.marked(mark):
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.sampled
def test_a_killed_flow_does_not_run_for_ever_in_mlflow(make_desk):
    """BC-091, BC-092: FAILED within half a minute of the kill; RUNNING and FINISHED when a flow goes on with it."""
    desk = make_desk(config={"pause": 0.3}, steps=40)
    flow = desk.start()
    desk.await_step(3, flow)
    run = desk.run_dir.name
    await_status(desk, run, "RUNNING", 60)
    flow.kill()
    await_status(desk, run, "FAILED", 30)
    desk.await_gone()
    await_gone(f"mourner/{run}")

    flow = desk.start()
    desk.await_step(8, flow)
    await_status(desk, run, "RUNNING", 60)
    for pid in process.marked(f"mourner/{run}"):
        os.kill(pid, signal.SIGKILL)
    flow.kill()
    desk.wait(flow)
    desk.await_gone()
    assert status(desk, run) == "RUNNING", "nobody could say so"
    desk.job |= {"fresh": True, "config": {}, "steps": 20}
    ended = desk.run()
    assert ended.code == 0, ended.err
    assert status(desk, run) == "FAILED", "the next flow run of the job did"
    assert status(desk, ended.final["run"]) == "FINISHED"
    await_gone("mourner/" + ended.final["run"])
