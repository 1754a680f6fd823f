"""Promotion of checkpoints whose bytes are on S3: released, reproduced from there alone, rolled back, killed at every step."""

import json
import shutil
from collections.abc import Iterator

import pytest
from plans import Shape
from rigs import mlflow_server
from test_object import LONG, events, use

import everstep
from everstep.host import mlflow_run, registry

pytestmark = pytest.mark.timeout(1200)  # each kill is a flow run
KILLS = ("promote.before_version", "promote.before_production")
MORE_KILLS = (
    "promote.begin",
    "promote.before_artifact",
    "promote.after_version",
    "promote.before_candidate",
    "promote.after_candidate",
    "promote.before_move",
    "promote.before_previous",
    "promote.after_production",
    "promote.before_done",
    "flow.report",
)
FAR_KILLS = ("fetch.mid_file",)
MORE_FAR_KILLS = (
    "promote.begin",
    "fetch.before_manifest",
    "promote.before_artifact",
    "promote.before_candidate",
    "promote.before_move",
    "promote.before_previous",
    "promote.before_production",
    "promote.after_production",
    "promote.before_done",
)


@pytest.fixture
def mlflow_uri(request, tmp_path, mlflow_template) -> Iterator[str]:
    """MLflow as a database file, or as its own server on one."""
    shutil.copy(mlflow_template, tmp_path / "shared.db")
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'shared.db'}"
        return
    with mlflow_server.serving(tmp_path / "shared.db", tmp_path / "artifacts") as port:
        yield f"http://127.0.0.1:{port}"


SQLITE = pytest.mark.parametrize("mlflow_uri", ["sqlite"], indirect=True)


def killed_at(drill, points, environment):
    """Flow runs of the drill, each killed at one of the points, and the one that comes through."""
    ended = drill.run(*({"point": point} for point in points), environment=environment)
    for _ in points:
        if ended.code == 0:
            break
        assert ended.code == -9, ended.err
        ended = drill.run(plan=drill.last_plan, environment=environment)
    assert ended.code == 0, ended.err
    assert drill.fired() == len(points), "every kill has happened"
    return ended


def check_bytes(client, number, place, monkeypatch, s3_server) -> str:
    """The version names a checkpoint on S3 whose weights are those that it says; its URI."""
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    tags = client.get_model_version("tiny", number).tags
    assert tags["everstep.uri"].startswith(f"{place}/tiny/")
    assert everstep.verify_checkpoint(tags["everstep.uri"]).ok
    assert everstep.weights_digest(everstep.load_checkpoint(tags["everstep.uri"])) == tags["everstep.digest"]
    return tags["everstep.uri"]


def one_version_each(client) -> bool:
    versions = client.search_model_versions("name='tiny'")
    digests = [one.tags["everstep.digest"] for one in versions]
    return len(digests) == len(set(digests))


@pytest.mark.parametrize(
    ("mlflow_uri", "points"),
    [
        ("sqlite", KILLS),
        pytest.param("sqlite", MORE_KILLS, marks=LONG),
        pytest.param("server", (*KILLS, *MORE_KILLS), marks=LONG),
    ],
    indirect=["mlflow_uri"],
)
def test_a_release_that_is_killed_again_and_again_ends_in_production_with_its_bytes_on_s3(
    make_drill, s3_server, mlflow_uri, points, untouched, monkeypatch
):
    place = f"s3://{s3_server.bucket()}/runs"
    drill = use(make_drill(release=True, tracking={"uri": mlflow_uri}, limits={"drain": 90}), place)
    ended = killed_at(drill, points, s3_server.env())
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
    promoted = ended.final["promotion"]
    assert promoted["status"] == "production", ended.err
    client = mlflow_run.connect(mlflow_uri)
    number = promoted["version"]
    assert dict(registry.aliases(client, "tiny")) == {"candidate": number, "production": number}
    check_bytes(client, number, place, monkeypatch, s3_server)
    assert one_version_each(client)
    assert promoted["checkpoint"] in json.loads((drill.run_dir / "promote.json").read_text()), "kept there for good"
    drill.await_gone()


@pytest.mark.parametrize(
    ("mlflow_uri", "points"),
    [
        ("server", FAR_KILLS),
        pytest.param("sqlite", (*FAR_KILLS, *MORE_FAR_KILLS), marks=LONG),
        pytest.param("server", MORE_FAR_KILLS, marks=LONG),
    ],
    indirect=["mlflow_uri"],
)
def test_what_is_on_s3_only_is_reproduced_from_there_released_and_rolled_back(
    make_drill, s3_server, mlflow_uri, points, monkeypatch
):
    """The machine that releases has the bucket and MLflow, and never saw the run."""
    place = f"s3://{s3_server.bucket()}/runs"
    told = {"tracking": {"uri": mlflow_uri}, "limits": {"drain": 90}}
    ended = use(make_drill(**told), place).run(environment=s3_server.env())
    assert ended.code == 0, ended.err
    assert ended.final["promotion"]["status"] == "candidate"

    other = use(make_drill(release=True, **told), place)
    released = killed_at(other, points, s3_server.env())
    promoted = released.final["promotion"]
    assert promoted == ended.final["promotion"] | {"status": "production", "previous": None}
    assert [one["data"]["tier"] for one in events(other, "checkpoint.fetched")][-1] == "object"
    probed = events(other, "promotion.probe")[-1]
    assert probed["data"]["checkpoint"] == promoted["checkpoint"]
    assert released.final["weights"] == ended.final["weights"]
    assert not (other.home / other.run_dir.name / "checkpoints" / promoted["checkpoint"]).exists()
    client = mlflow_run.connect(mlflow_uri)
    first = promoted["version"]
    assert registry.aliases(client, "tiny")["production"] == first
    uri = check_bytes(client, first, place, monkeypatch, s3_server)
    assert one_version_each(client)
    other.await_gone()

    other.job |= {"fresh": True, "seed": 1}
    newer = other.run(environment=s3_server.env())
    assert (newer.final["promotion"]["status"], newer.final["promotion"]["previous"]) == ("production", first), (
        newer.err
    )
    done = everstep.rollback("tiny", mlflow_uri)
    assert (done.was, done.now) == (newer.final["promotion"]["version"], first)
    assert check_bytes(client, registry.aliases(client, "tiny")["production"], place, monkeypatch, s3_server) == uri
    del other.job["fresh"]
    again = other.run(environment=s3_server.env())
    assert (again.code, again.final) == (0, newer.final), again.err
    assert registry.aliases(client, "tiny")["production"] == first, "what was rolled back is not released again"


@SQLITE
def test_a_store_that_is_away_when_a_release_is_asked_leaves_it_waiting(make_drill, s3_server, mlflow_uri, tmp_path):
    """Unknown is not failed: nothing is refused, and the same command releases when the store answers."""
    place = f"s3://{s3_server.bucket()}/runs"
    told = {"tracking": {"uri": mlflow_uri}}
    drill = use(make_drill(limits={"drain": 60}, **told), place)
    first = drill.run(environment=s3_server.env())
    assert first.final["promotion"]["status"] == "candidate", first.err
    for tier in ("nvme/tiny", f"persistent/tiny/{drill.run_dir.name}/checkpoints"):
        shutil.rmtree(drill.folder / tier)
    drill.job |= {"release": True, "limits": {"drain": 4}}
    away = drill.run(environment=s3_server.env() | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    assert (away.code, away.final["promotion"]["status"]) == (0, "waiting"), away.err
    assert "run the same command again" in away.final["promotion"]["reason"]
    assert s3_server.secret_key not in away.out + away.err
    drill.job["limits"] = {"drain": 90}
    back = drill.run(environment=s3_server.env())
    assert (back.code, back.final["promotion"]["status"]) == (0, "production"), back.err
