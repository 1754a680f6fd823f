"""The first deployment: real server, real process worker, blocks; cancelled in mid-segment, retried, gone on with."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling
from rigs.flow_runs import await_state

from blocks.guardrails import Guardrails
from blocks.tiers import StorageTiers
from blocks.tracking import Tracking
from everstep.core.job import TrainJob
from tasks.places import placed

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deployments" / "prefect.yaml"
SECRET, PASSWORD = "se3cret-of-the-tiers", "pa55word-of-mlflow"


@pytest.fixture
def client(prefect_api):
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="module")
def prefect(prefect_api, tmp_path_factory):
    """The `prefect` command line, as the deployment's page has it; run in the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "PREFECT_API_URL": prefect_api,
        "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PWD": str(ROOT),
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.environment = environment
    return run


@pytest.fixture(scope="module")
def deployed(prefect):
    """What docs/deployment.md says to do once: pool, blocks and deployments, by its own commands."""
    page = (ROOT / "docs" / "deployment.md").read_text().splitlines()
    commands = [line.partition("#")[0].split()[1:] for line in page if line.startswith("prefect ")]
    once = [command for command in commands if {"create", "register", "deploy"} & set(command)]
    assert len(once) == 4
    for command in once:
        prefect(*[word for word in command if word != "--no-prompt"])


@pytest.fixture
def worker(prefect, deployed, tmp_path):
    """A real process worker with its log, stopped by its own pid."""
    log = tmp_path / "worker.log"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "everstep", "--limit", "1"]
    reset = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", reset, *command],
            cwd=tmp_path,
            env={name: value for name, value in prefect.environment.items() if name != "PWD"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    yield log
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def await_step(desk, step: int, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for beat in (desk.folder / "nvme").glob("*/r*/heartbeat-0.json"):
            if f'"step":{step}' in beat.read_text().replace(" ", "") or json.loads(beat.read_text())["step"] >= step:
                return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached in {seconds} s")


def save_blocks(client, desk) -> None:
    places = {"local": str(desk.folder / "nvme"), "persistent": str(desk.folder / "persistent")}
    StorageTiers(**places, access_key="AKIA", secret_key=SECRET).save("prod", overwrite=True, _sync=True)
    uri = f"sqlite:///{desk.folder}/mlflow.db"
    Tracking(uri=uri, username="me", password=PASSWORD).save("prod", overwrite=True, _sync=True)


def test_a_deployed_job_is_cancelled_in_mid_segment_retried_and_goes_on(make_desk, worker, prefect, client):
    desk = make_desk("deployed", steps=60, segment_steps=60, config={"pause": 0.15}, tiers="prod", tracking="prod")
    save_blocks(client, desk)
    job = json.loads(subprocess.check_output([sys.executable, "-m", "everstep.host.jobs", str(desk.write())], cwd=ROOT))
    prefect("deployment", "run", "stage/stage", "--params", json.dumps({"job": job}))
    staging = client.read_flow_runs(sort="EXPECTED_START_TIME_DESC", limit=1)[0]
    assert await_state(client, staging.id, {"Completed", "Crashed", "Failed"}, 120) == "Completed"
    assert list((desk.folder / "nvme" / "datasets").glob("*/data/table.npy"))
    started = prefect("deployment", "run", "train/train", "--params", json.dumps({"job": job}))
    run = client.read_flow_runs(sort="EXPECTED_START_TIME_DESC", limit=1)[0]
    assert str(run.id) in started
    assert run.parameters["job"]["tiers"]["block"] == "prod"

    await_step(desk, 8)
    assert len(desk.left()) >= 3, "a rank, the copier and the warden"
    client.set_flow_run_state(run.id, Cancelling(), force=True)
    assert await_state(client, run.id, {"Cancelled", "Completed", "Crashed", "Failed"}, 60) == "Cancelled"
    desk.await_gone()
    stopped = json.loads((desk.run_dir / "result.json").read_text())
    assert stopped["status"] == "stopped"
    assert 8 <= stopped["step"] < 60

    client.set_flow_run_state(run.id, AwaitingRetry())
    assert await_state(client, run.id, {"Completed", "Crashed", "Failed"}, 120) == "Completed"
    done = json.loads((desk.run_dir / "result.json").read_text())
    assert (done["status"], done["step"], done["resumed_from"]) == ("completed", 60, stopped["step"])
    assert client.read_flow_run(run.id).run_count == 2
    desk.await_gone()
    logs = " ".join(entry.message for entry in client.read_logs())
    for text in (logs, worker.read_text(), json.dumps(client.read_flow_run(run.id).parameters)):
        assert SECRET not in text
        assert PASSWORD not in text
    for path in desk.folder.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
            assert PASSWORD.encode() not in path.read_bytes(), path


def test_what_is_deployed_suits_long_jobs_and_gives_a_form(deployed, client):
    named = {one["name"] for one in yaml.safe_load(FILE.read_text())["deployments"]}
    assert named == {"train", "stage", "scrub", "monitor"}
    assert len(client.read_deployments()) == len(named)
    train = client.read_deployment_by_name("train/train")
    assert train.job_variables["stream_output"] is False
    assert train.job_variables["env"] == {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    assert train.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
    assert train.global_concurrency_limit is None, "a lease that is lost would end a healthy run"
    form = train.parameter_openapi_schema
    assert form["required"] == ["job"]
    assert set(form["definitions"]["TrainJob"]["properties"]) == set(TrainJob.model_fields)


def test_guardrails_bound_what_a_deployed_job_may_name(make_desk, worker, prefect, client):
    """Refused before anything of the job runs, in one sentence; what is allowed goes through."""
    desk = make_desk("bounded", steps=5)
    job = json.loads(subprocess.check_output([sys.executable, "-m", "everstep.host.jobs", str(desk.write())], cwd=ROOT))
    rules = {"programs": ["everstep.programs"], "data": [str(desk.folder)], "tiers": [str(desk.folder)]}
    Guardrails(**rules).save(Guardrails.NAME, overwrite=True, _sync=True)
    try:
        prefect("deployment", "run", "train/train", "--params", json.dumps({"job": job}))
        run = client.read_flow_runs(sort="EXPECTED_START_TIME_DESC", limit=1)[0]
        assert await_state(client, run.id, {"Completed", "Crashed", "Failed"}, 120) == "Failed"
        said = client.read_flow_run(run.id).state.message
        assert f"program: '{desk.folder}/mine.py:build' is not allowed in a job that comes through this server" in said
        assert "(allowed: everstep.programs); whoever looks after the Guardrails block 'default' can allow it." in said
        assert not list(desk.folder.glob("persistent/*"))
        assert not list(desk.folder.glob("nvme/datasets"))

        Guardrails(**rules | {"programs": [str(desk.folder)]}).save(Guardrails.NAME, overwrite=True, _sync=True)
        prefect("deployment", "run", "stage/stage", "--params", json.dumps({"job": job}))
        run = client.read_flow_runs(sort="EXPECTED_START_TIME_DESC", limit=1)[0]
        assert await_state(client, run.id, {"Completed", "Crashed", "Failed"}, 120) == "Completed"
    finally:
        Guardrails.delete(Guardrails.NAME, _sync=True)


@pytest.mark.parametrize(("field", "slug"), [("tiers", "storage-tiers"), ("tracking", "everstep-tracking")])
def test_a_block_that_is_not_there_is_said_in_one_sentence(client, prefect_api, field, slug):
    job = TrainJob(name="x", program="a.py:b", data={"source": "d"}, steps=1, **{field: "nowhere"})
    with (
        pytest.raises(ValueError, match=f"^{field}: Prefect at {prefect_api} has no {slug} block named 'nowhere'; "),
        placed(job, StorageTiers, Tracking),
    ):
        raise AssertionError


def test_a_block_that_is_not_right_any_more_is_said_without_its_secrets(client, ask):
    StorageTiers(local="/a", persistent="/b", access_key="AKIA", secret_key=SECRET).save("old", _sync=True)
    document = client.read_block_document_by_name("old", "storage-tiers")
    data = {"local": "a", "persistent": "/b", "secret_key": SECRET}
    client.request("PATCH", "/block_documents/{id}", path_params={"id": document.id}, json={"data": data})
    job = TrainJob(name="x", program="a.py:b", data={"source": "d"}, steps=1, tiers="old")
    with (
        pytest.raises(ValueError, match=r"the block 'old' is not right \(local: must be an absolute") as refused,
        placed(job, StorageTiers, Tracking),
    ):
        raise AssertionError
    assert SECRET not in str(refused.value)


def test_the_places_of_a_block_take_the_place_of_the_job_s(client, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "of-the-shell")
    places = {"local": "/a", "persistent": "/b", "object": "s3://models/runs"}
    store = {"endpoint_url": "http://store:9000", "access_key": "AKIA", "secret_key": SECRET}
    StorageTiers(**places, **store).save("full", overwrite=True, _sync=True)
    Tracking(uri="http://mlflow:5000", username="me", password=PASSWORD).save("full", overwrite=True, _sync=True)
    job = TrainJob(name="x", program="a.py:b", data={"source": "d"}, steps=1, tiers="full", tracking="full")
    with placed(job, StorageTiers, Tracking) as (resolved, access):
        assert (resolved.tiers.local, resolved.tiers.object) == ("/a", "s3://models/runs")
        assert (access.endpoint_url, access.keys.access_key) == ("http://store:9000", "AKIA")
        assert SECRET not in repr(access)
        assert resolved.tracking.uri == "http://mlflow:5000"
        assert os.environ["MLFLOW_TRACKING_PASSWORD"] == PASSWORD
        assert "MLFLOW_TRACKING_TOKEN" not in os.environ, "credentials of the shell are not for the block's server"
    assert os.environ["MLFLOW_TRACKING_TOKEN"] == "of-the-shell"
    assert "MLFLOW_TRACKING_PASSWORD" not in os.environ


def test_a_job_cannot_send_a_block_s_keys_elsewhere(client):
    StorageTiers(local="/a", persistent="/b", object="s3://models/runs", access_key="AKIA", secret_key=SECRET).save(
        "strict", overwrite=True, _sync=True
    )
    job = TrainJob(
        name="x", program="a.py:b", data={"source": "d"}, steps=1, tiers="strict", s3={"endpoint_url": "http://evil:1"}
    )
    with pytest.raises(ValueError, match="would be given your keys"), placed(job, StorageTiers, Tracking):
        raise AssertionError
