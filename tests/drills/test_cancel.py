"""A flow run of a process work pool, cancelled in Prefect in mid-segment: saved, gone, and resumed to the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from uuid import UUID

import pytest
from drill import ROOT, Drill
from plans import Shape
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling
from rigs.flow_runs import await_state

POOL = "everstep-drill"


@pytest.fixture
def worker(prefect_api, tmp_path):
    """A real process worker on a pool of its own, stopped by its own pid."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "PREFECT_API_URL": prefect_api,
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }
    prefect = [sys.executable, "-m", "prefect"]
    subprocess.run(
        [*prefect, "--no-prompt", "work-pool", "create", POOL, "--type", "process", "--overwrite"],
        env=environment,
        check=True,
        capture_output=True,
        timeout=120,
    )
    with (tmp_path / "worker.log").open("w") as log:
        process = subprocess.Popen(
            [*prefect, "worker", "start", "--pool", POOL],
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    yield process
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
def client(prefect_api):
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        yield client


def deploy(client, drill: Drill) -> UUID:
    """A deployment of the train flow on the pool, with the drill's job as its parameter."""
    from flows.train import train

    flow = client.create_flow(train)
    return client.create_deployment(
        flow_id=flow,
        name=f"drill-{time.monotonic_ns()}",
        work_pool_name=POOL,
        entrypoint="flows/train.py:train",
        path=str(ROOT),
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
        parameters={"job": drill.absolute_job()},
        job_variables={"stream_output": False, "env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}},
    )


def test_a_cancelled_flow_run_saves_leaves_nothing_and_goes_on_later(make_drill, untouched, worker, client):
    """BC-071."""
    drill = make_drill(config={"pause": 0.15})
    deployment = deploy(client, drill)
    first = client.create_flow_run_from_deployment(deployment).id
    drill.await_step(15, worker, seconds=150)
    client.set_flow_run_state(first, Cancelling(), force=True)
    assert await_state(client, first, {"Cancelled", "Completed", "Crashed", "Failed"}) == "Cancelled"
    drill.await_gone()
    final = json.loads((drill.run_dir / "result.json").read_text())
    assert final["status"] == "stopped"
    assert final["step"] >= 15
    second = client.create_flow_run_from_deployment(deployment).id
    assert await_state(client, second, {"Completed", "Crashed", "Failed", "Cancelled"}, seconds=200) == "Completed"
    done = json.loads((drill.run_dir / "result.json").read_text())
    assert done["resumed_from"] == final["step"]
    assert done["weights"] == untouched(Shape()).final["weights"]
    drill.await_gone()
