"""The object tier: both other tiers lost, a machine that has nothing, a store that is away, kills during the upload."""

import contextlib
import json
import os
import shutil
import signal
import socket
import time

import pytest
from drill import new_drill
from plans import Shape
from rigs.proxy import Fault

import everstep
from everstep.core.checkpoint import AttemptClaim
from everstep.host import mlflow_run, process
from everstep.store import object_tier

LAST, BEFORE, FIRST = "step-00000040.a1", "step-00000030.a1", "step-00000020.a1"
LONG = pytest.mark.skipif("EVERSTEP_ALL" not in os.environ, reason="long; runs with EVERSTEP_ALL")
UPLOAD_POINTS = ("upload.begin", "upload.mid_file", "upload.verify", "upload.before_manifest", "upload.after_manifest")


def use(drill, place, **tiers):
    drill.job["tiers"] = {"local": "nvme", "persistent": "persistent", "object": str(place)} | tiers
    return drill


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def events(drill, kind):
    lines = (drill.run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def check(ended, untouched, resumed_from):
    assert ended.code == 0, ended.err
    assert ended.final["resumed_from"] == resumed_from, ended.err
    assert ended.final["weights"] == untouched(Shape()).final["weights"]


@pytest.fixture(scope="module")
def at_40(tmp_path_factory, prefect_api, mlflow_template):
    """A run that has got to step 40 with a directory as its object tier. Copy it before you change anything."""
    drill = new_drill(tmp_path_factory.mktemp("forty") / "run", prefect_api, mlflow_template, "tiny", steps=40)
    use(drill, "object")
    ended = drill.run()
    drill.close()
    assert ended.code == 0, ended.err
    return drill


@pytest.fixture
def fresh(at_40, make_drill, tmp_path):
    """Another machine with the same job: it has the object tier, and an MLflow that has heard of nothing."""
    shutil.copytree(at_40.folder / "object", tmp_path / "object")
    return use(make_drill(), tmp_path / "object")


def held(place, name="tiny"):
    return sorted(path.parent.name for path in place.glob(f"{name}/r*/checkpoints/*/manifest.json"))


def test_every_checkpoint_that_is_kept_is_there_and_mlflow_names_it(at_40):
    assert held(at_40.folder / "object") == [FIRST, BEFORE, LAST]
    (there,) = (at_40.folder / "object" / "tiny").glob("r*")
    assert {path.name for path in there.iterdir()} >= {"run.json", "structure.json", "attempts", "history"}


def test_a_machine_that_has_nothing_goes_on_from_the_object_tier_alone(fresh, untouched):
    """Neither run directory nor MLflow knows of the run."""
    ended = fresh.run()
    check(ended, untouched, 40)
    assert ended.final["attempts"] == 2
    assert "it was found in" in ended.err
    assert [event["data"]["checkpoint"] for event in events(fresh, "checkpoint.fetched")] == [LAST]
    fresh.await_gone()


def test_a_machine_that_has_nothing_knows_that_a_run_is_complete(at_40, fresh):
    fresh.job["steps"] = 40
    ended = fresh.run()
    assert (ended.code, ended.final["weights"]) == (
        0,
        json.loads((at_40.run_dir / "result.json").read_text())["weights"],
    )
    assert ended.final["attempts"] == 1, "nothing was trained again"


def test_a_machine_that_has_nothing_refuses_a_changed_job_under_an_unfinished_name(fresh, tmp_path):
    (result,) = tmp_path.glob("object/tiny/*/result.json")
    result.unlink()
    fresh.job["seed"] = 7
    ended = fresh.run()
    assert (ended.code, "seed" in ended.err) == (2, True), ended.err


def test_another_node_with_an_empty_local_tier_goes_on_in_the_same_mlflow_run(make_drill, untouched):
    """Case BC-110: everything is killed at once, so nothing of the dying node could tell anybody anything."""
    drill = make_drill(config={"pause": 0.2})
    flow = drill.start()
    client = mlflow_run.connect(f"sqlite:///{drill.folder / 'mlflow.db'}")
    until = time.monotonic() + 60
    while client.get_experiment_by_name("tiny") is None or not (
        found := mlflow_run.find(client, "tiny", drill.run_dir.name)
    ):
        assert time.monotonic() < until
        time.sleep(0.1)
    drill.await_step(14, flow)
    for pid in (flow.pid, *process.marked(drill.token())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    drill.wait(flow)
    drill.await_gone()
    shutil.rmtree(drill.folder / "nvme")
    ended = drill.run()
    assert (ended.code, ended.final["weights"]) == (0, untouched(Shape()).final["weights"]), ended.err
    assert ended.final["resumed_from"] >= 10
    assert ended.final["mlflow_run"] == found.info.run_id
    assert len(client.search_runs([client.get_experiment_by_name("tiny").experiment_id])) == 1


def test_what_mlflow_names_and_the_store_has_lost_is_said_and_walked_back_from(at_40, fresh, untouched):
    (there,) = (fresh.folder.parent / "object" / "tiny").glob("r*")
    shutil.rmtree(there / "checkpoints" / LAST)
    shutil.copy(at_40.folder / "mlflow.db", fresh.folder / "mlflow.db")
    shutil.move(at_40.folder / "object", at_40.folder / "away")
    try:
        ended = fresh.run()
    finally:
        shutil.move(at_40.folder / "away", at_40.folder / "object")
    check(ended, untouched, 30)
    (unreadable,) = events(fresh, "checkpoint.unreadable")
    assert (unreadable["data"]["checkpoint"], unreadable["data"]["tier"]) == (LAST, "mlflow")


def test_damage_on_the_object_tier_is_quarantined_by_name_and_walked_back_from(fresh, untouched):
    (there,) = (fresh.folder.parent / "object" / "tiny").glob("r*")
    file = next((there / "checkpoints" / LAST).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    ended = fresh.run()
    check(ended, untouched, 30)
    assert ended.final["quarantined"] == [(there / "checkpoints" / LAST).as_uri()]
    assert file.read_bytes() == data, "evidence is kept"


@LONG
def test_a_persistent_tier_that_is_older_is_overtaken_by_the_object_tier(at_40, make_drill, untouched, tmp_path):
    drill = make_drill()
    for name in ("object", "persistent"):
        shutil.copytree(at_40.folder / name, drill.folder / name)
    use(drill, "object")
    for folder in (LAST, BEFORE):
        shutil.rmtree(drill.run_dir / "checkpoints" / folder)
    (drill.run_dir / "result.json").unlink()
    check(drill.run(), untouched, 40)


def test_nothing_starts_at_step_0_when_the_object_tier_does_not_answer(make_drill):
    """A machine that has nothing cannot tell whether the run is there: it says so and trains nothing."""
    drill = use(make_drill(), "s3://bucket/runs")
    keys = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_EC2_METADATA_DISABLED": "true"}
    ended = drill.run(environment={"AWS_ENDPOINT_URL": closed_port(), **keys})
    assert ended.code == 1
    assert "cannot be told" in ended.err
    assert "Traceback" not in ended.err
    assert not list(drill.home.glob("r*"))


def test_kills_at_every_step_of_the_upload_cost_nothing(make_drill, untouched, tmp_path):
    drill = use(make_drill(config={"pause": 0.03}), tmp_path / "object")
    ended = drill.run(*({"point": point, "hit": 1} for point in UPLOAD_POINTS))
    check(ended, untouched, None)
    assert drill.fired() == len(UPLOAD_POINTS)
    assert ended.final["restarts"] == 0, "the uploader's death is nothing to the ranks"
    assert held(tmp_path / "object") == ["step-00000040.a1", "step-00000050.a1", "step-00000060.a1"]


def all_files(folder):
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path, path.read_bytes()


def test_on_s3_a_store_that_fails_and_goes_away_stops_nothing_and_a_fresh_machine_goes_on(
    make_drill, s3_server, s3_proxy, untouched, monkeypatch
):
    """The whole life on a real server: faults while it trains, both tiers lost, and no secret in anything that is left."""
    place = f"s3://{s3_server.bucket()}/runs"
    first = use(make_drill(steps=40, config={"pause": 0.02}, limits={"drain": 60}), place)
    s3_proxy.plan(
        Fault("slow_down", "PUT", "checkpoints", times=2),
        Fault("reset", "PUT", "safetensors", at=100),
        Fault("zeros", "GET", "safetensors", at=200, count=32),
        Fault("cut", "GET", "safetensors", at=50),
    )
    env = s3_server.env() | {"AWS_ENDPOINT_URL": s3_proxy.endpoint}
    ended = first.run({"point": "upload.before_manifest", "hit": 2}, environment=env)
    assert ended.code == 0, ended.err
    bucket = place.split("/")[2]
    keys = [one["Key"] for one in s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]]
    committed = sorted(key.split("/")[-2] for key in keys if key.endswith("manifest.json"))
    assert committed == [FIRST, BEFORE, LAST]
    second = use(make_drill(config={"pause": 0.02}), place)
    shutil.copy(first.folder / "mlflow.db", second.folder / "mlflow.db")
    last = second.run(environment=s3_server.env())
    check(last, untouched, 40)
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    final = f"{place}/tiny/{second.run_dir.name}/checkpoints/step-00000060.a2"
    assert everstep.weights_digest(everstep.load_checkpoint(final)) == last.final["weights"]
    hints = [event["data"]["checkpoint"] for event in events(second, "tracking.hint")]
    assert hints == [f"{place}/tiny/{second.run_dir.name}/checkpoints/{LAST}"]
    for folder in (first.folder, second.folder):
        for path, data in all_files(folder):
            assert s3_server.secret_key.encode() not in data, path
    for drill in (first, second):
        drill.await_gone()


@LONG
def test_a_store_that_is_away_delays_the_end_by_its_limit_only_and_is_told_later(make_drill, s3_server, untouched):
    place = f"s3://{s3_server.bucket()}/runs"
    drill = use(make_drill(steps=40), place)
    assert drill.run(environment=s3_server.env()).code == 0
    drill.job |= {"steps": 60, "limits": {"drain": 3}}
    began = time.monotonic()
    ended = drill.run(environment=s3_server.env() | {"AWS_ENDPOINT_URL": closed_port()})
    assert (ended.code, ended.final["status"]) == (1, "degraded"), ended.err
    assert ended.final["resumed_from"] == 40
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
    assert time.monotonic() - began < 120
    assert [event["kind"] for event in events(drill, "object.behind")] == ["object.behind"]
    drill.job["limits"] = {"drain": 60}
    again = drill.run(environment=s3_server.env())
    assert again.code == 0, again.err
    bucket = place.split("/")[2]
    keys = [one["Key"] for one in s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert any(key.endswith("step-00000060.a2/manifest.json") for key in keys)


def test_of_two_machines_with_their_own_tiers_the_newest_attempt_owns_the_run(make_drill, tmp_path):
    """zombie-run-state: the first saves and leaves when it finds that another machine has claimed a newer attempt."""
    drill = use(make_drill(config={"pause": 0.05}, steps=1000), tmp_path / "object")
    flow = drill.start()
    drill.await_step(25, flow)
    tier = object_tier.open_run(str(tmp_path / "object" / "tiny" / drill.run_dir.name))
    assert tier.claim(AttemptClaim(attempt=2, resumed_from=20, host="another", pid=1, boot="b", time=time.time()))
    ended = drill.wait(flow)
    assert (ended.code, ended.final["status"]) == (75, "stopped"), ended.err
    assert ended.final["step"] < 1000
    failed = [event["text"] for event in events(drill, "checkpoint.failed")]
    assert failed == [f"Attempt 2 of run {drill.run_dir.name} was claimed on the object tier by another machine."]
