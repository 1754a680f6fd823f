"""Staging as a flow: by itself and as a part of train, from a directory and from S3."""

import json

import pytest
from rigs.proxy import Fault


@pytest.fixture(scope="module")
def objects(s3_server, table):
    """A place in a bucket that holds the table of the desks' program."""
    bucket = s3_server.bucket()
    s3_server.put(bucket, {"data/table.npy": (table / "table.npy").read_bytes()})
    return f"s3://{bucket}/data"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def everything_left(desk):
    """All bytes that a run leaves in files, by name."""
    return [(path, path.read_bytes()) for path in desk.folder.rglob("*") if path.is_file() and not path.is_symlink()]


@pytest.mark.sampled
def test_a_directory_is_staged_alone(make_desk, table):
    desk = make_desk("alone")
    ended = desk.run(module="flows.stage")
    assert (ended.code, ended.final["status"], ended.final["fetched"]) == (0, "completed", 1), ended.err
    assert content(desk.folder / "nvme" / "datasets")["table.npy"] == (table / "table.npy").read_bytes()
    again = desk.run(module="flows.stage")
    assert (again.code, again.final["fetched"]) == (0, 0)
    assert again.final["dataset"] == ended.final["dataset"]
    assert desk.run(("--help",), module="flows.stage").err == "usage: python -m flows.stage job.yaml\n"


@pytest.mark.sampled
def test_train_stages_from_a_bucket_in_a_subflow_and_leaves_no_secret(make_desk, objects, s3_server, ask):
    desk = make_desk("bucket", data={"source": objects})
    ended = desk.run(**s3_server.env())
    assert ended.code == 0, ended.err
    assert ended.final["step"] == 20
    runs = ask("flow_runs/filter", {"flow_runs": {"name": {"any_": ["stage-bucket"]}}})
    assert [run["state"]["type"] for run in runs] == ["COMPLETED"]
    assert "s3" in json.dumps(runs[0]["parameters"])
    secrets = [secret.encode() for _, secret in s3_server.keys.values()]
    assert [path for path, data in everything_left(desk) if any(secret in data for secret in secrets)] == []
    told = json.dumps(runs) + ended.out + ended.err
    assert not any(secret.decode() in told for secret in secrets)


SENTENCES = {
    "unknown key": ({"AWS_ACCESS_KEY_ID": "UNKNOWN"}, {}, 2, "does not know the access key; check AWS_ACCESS_KEY_ID"),
    "wrong secret": ({"AWS_SECRET_ACCESS_KEY": "wrong"}, {}, 2, "the secret key does not belong to the access key"),
    "no bucket": ({}, {"source": "s3://no-such-bucket/x"}, 2, "s3://no-such-bucket: there is no such bucket at http"),
    "nothing there": ({}, {"source": "{}/none"}, 2, "holds no objects; put the data there or name another prefix"),
    "no credentials": ({"AWS_ACCESS_KEY_ID": ""}, {}, 2, "no AWS credentials were found; set AWS_ACCESS_KEY_ID"),
    "endpoint in the job": (
        {"AWS_ENDPOINT_URL": ""},
        {"s3": True},
        2,
        "nothing but the job names it; set AWS_ENDPOINT",
    ),
}


AT_ONCE = ("wrong secret", "endpoint in the job")


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.sampled] * (one not in AT_ONCE)) for one in SENTENCES]
)
def test_what_the_user_must_mend_is_one_plain_sentence(make_desk, objects, s3_server, case):
    changes, data, code, words = SENTENCES[case]
    more = {"s3": {"endpoint_url": s3_server.endpoint}} if data.get("s3") else {}
    desk = make_desk("refused", data={"source": data.get("source", objects).format(objects)}, **more)
    env = {name: value for name, value in (s3_server.env() | changes).items() if value}
    ended = desk.run(module="flows.stage", **env)
    assert ended.code == code, ended.err
    said = [line for line in ended.err.splitlines() if "starting" not in line]
    assert len(said) == 1, said
    assert words in said[0]
    assert "Traceback" not in ended.err


@pytest.mark.sampled
def test_a_long_staging_has_a_progress_bar_in_prefect(make_desk, objects, s3_server, s3_proxy, ask):
    desk = make_desk("slow", data={"source": objects})
    s3_proxy.plan(Fault("stall", "GET", path="table.npy", seconds=2.5))
    ended = desk.run(module="flows.stage", **(s3_server.env() | {"AWS_ENDPOINT_URL": s3_proxy.endpoint}))
    assert ended.code == 0, ended.err
    (bar,) = ask("artifacts/filter", {"artifacts": {"key": {"any_": ["staging-slow"]}}})
    assert (bar["type"], float(bar["data"])) == ("progress", 100.0)
    assert bar["description"].startswith("100 % | ")


@pytest.mark.sampled
def test_no_right_to_read_is_one_plain_sentence(make_desk, objects, s3_server):
    desk = make_desk("stranger", data={"source": objects})
    ended = desk.run(module="flows.stage", **s3_server.env("stranger"))
    assert ended.code == 2
    assert "gives these credentials no right to list it; ask its owner" in ended.err


@pytest.mark.sampled
def test_a_flow_that_is_killed_while_it_stages_goes_on(make_desk, objects, s3_server):
    desk = make_desk("killed", data={"source": objects})
    plan = desk.plan({"point": "stage.before_commit"})
    assert desk.run(module="flows.stage", **s3_server.env(), **plan).code == -9
    ended = desk.run(**s3_server.env())
    assert ended.code == 0, ended.err
    assert len(list((desk.folder / "nvme" / "datasets").glob("[0-9a-f]*"))) == 1
