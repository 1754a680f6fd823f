"""The flow's face to Prefect: entrypoints, the form, names and states, and the server that comes and goes with it."""

import os
import signal
import time

import pytest
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from everstep.core.job import TrainJob
from everstep.host import process


@pytest.mark.parametrize("entrypoint", ["flows.train:train", "flows/train.py:train"])
def test_it_loads_from_both_kinds_of_entrypoint(entrypoint):
    flow = load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)
    assert flow.name == "train"
    assert flow.flow_run_name == "train-{job.name}"
    assert flow.should_validate_parameters


def test_the_form_is_made_from_the_job(request):
    from flows.train import train

    schema = parameter_schema(train.fn)
    assert list(schema.properties) == ["job", "take_over"]
    assert schema.required == ["job"]
    job = schema.definitions["TrainJob"]
    assert set(job["properties"]) == set(TrainJob.model_fields)
    assert job["required"] == ["name", "program", "data", "steps"]
    assert all(field["title"] for field in job["properties"].values() if "$ref" not in field)
    assert job["properties"]["steps"]["description"] == "Optimizer steps of the whole run."
    assert "Ask another living flow run" in schema.properties["take_over"]["description"]


def test_a_wrong_parameter_is_refused_by_validation():
    from prefect.exceptions import ParameterTypeError

    from flows.train import train

    job = {"name": "mine", "program": "mine.py:build", "data": {"source": "data"}, "steps": 5}
    assert train.validate_parameters({"job": job, "take_over": False})["job"] == TrainJob.model_validate(job)
    with pytest.raises(ParameterTypeError, match=r"(?s)job\.steps.*greater than 0"):
        train.validate_parameters({"job": job | {"steps": -5}, "take_over": False})


@pytest.mark.sampled
def test_the_given_server_knows_the_flow_run_by_name_and_state(completed, make_desk, ask):
    assert completed[1].code == 0, completed[1].err
    states = {(whole["state"]["type"], whole["state"]["name"]) for whole in runs(ask, "train-whole")}
    assert states == {("COMPLETED", "Completed")}

    desk = make_desk("halted", config={"pause": 0.2})
    flow = desk.start()
    desk.await_step(3, flow)
    (desk.run_dir / "stop").touch()
    ended = desk.wait(flow)
    assert ended.code == 75, ended.err
    (halted,) = runs(ask, "train-halted")
    assert (halted["state"]["type"], halted["state"]["name"]) == ("COMPLETED", "Stopped")
    assert f"stopped on request at step {ended.final['step']}" in halted["state"]["message"]


@pytest.mark.sampled
def test_a_failed_run_is_failed_with_our_sentence(make_desk, ask):
    desk = make_desk("broken", config={"build": ["raise ValueError('no good')"]})
    ended = desk.run()
    assert ended.code == 2
    (broken,) = runs(ask, "train-broken")
    assert broken["state"]["type"] == "FAILED"
    assert ended.err.splitlines()[-1] in broken["state"]["message"]


@pytest.mark.sampled
def test_a_run_that_is_cancelled_there_saves_and_is_cancelled(make_desk, ask):
    """Without a worker nobody signals the flow: it sees by itself that it is cancelled."""
    desk = make_desk("unwanted", config={"pause": 0.2}, steps=200)
    flow = desk.start()
    desk.await_step(3, flow)
    (run,) = runs(ask, "train-unwanted")
    ask(f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    ended = desk.wait(flow, timeout=60)
    assert ended.code == 75, ended.err
    assert ended.final["status"] == "stopped"
    assert ended.final["step"] > 3
    (run,) = runs(ask, "train-unwanted")
    assert run["state"]["type"] == "CANCELLED"


@pytest.mark.sampled
def test_nothing_is_left_of_a_flow_that_is_killed_with_its_embedded_server(make_desk):
    desk = make_desk("killed", server="own", config={"pause": 0.2})
    flow = desk.start()
    desk.await_step(2, flow)
    tokens = [mark for _, mark in process.marks("prefect-server") if mark.split("/")[1].startswith(f"{flow.pid}-")]
    assert len(tokens) == 1
    assert len(desk.left()) >= 3, "a rank, the copier and the warden"
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    until = time.monotonic() + 30
    while process.marked(tokens[0]) and time.monotonic() < until:
        time.sleep(0.05)
    assert process.marked(tokens[0]) == []
    desk.await_gone(30)


def runs(ask, name):
    return ask("flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
