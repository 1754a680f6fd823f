"""MLflow in a PostgreSQL database, and behind its own basic authentication: whole runs, and no secret in what they leave."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rigs import mlflow_server, postgres

import everstep
from everstep.core.errors import StoreUnavailable
from everstep.core.job import TrainJob
from everstep.host import mlflow_run, registry
from everstep.host.mlflow_speaker import Subject
from everstep.host.promoter import Promoter
from everstep.host.tracking import Tracker
from everstep.store import jsonl

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric

PASSWORD = "pa55-of-the-mlflow-admin"


@dataclass
class Served:
    """An MLflow that asks for user and password; `uri` names neither."""

    uri: str
    user: str


@pytest.fixture(scope="module", params=["postgres", "basic-auth"])
def served(request, tmp_path_factory, mlflow_template) -> Iterator[Served]:
    if request.param == "postgres":
        with postgres.serving("mlflow", PASSWORD) as server:
            migrate(server.uri.replace("postgres@", f"postgres:{PASSWORD}@"))
            yield Served(server.bare_uri, "postgres")
        return
    folder = tmp_path_factory.mktemp("basic-auth")
    shutil.copy(mlflow_template, folder / "server.db")
    with mlflow_server.serving(folder / "server.db", folder / "artifacts", admin=("chief", PASSWORD)) as port:
        yield Served(f"http://127.0.0.1:{port}", "chief")


def migrate(uri: str) -> None:
    """As `mlflow db upgrade` does once; on a busy machine it takes a minute."""
    code = "import sys; from everstep.host import mlflow_run; mlflow_run.connect(sys.argv[1]).search_experiments()"
    subprocess.run([sys.executable, "-c", code, uri], check=True, capture_output=True, timeout=300)


@pytest.fixture
def as_user(served, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", served.user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)


class Told(list):
    """What a tracker says, as (kind, text)."""

    def __call__(self, kind: str, text: str, **_) -> None:
        self.append((kind, text))


def tracker(uri, places, heard, *, run=fabric.RUN, artifacts=None) -> Tracker:
    subject = Subject(fabric.JOB, run, {"everstep.job": fabric.JOB}, {"config": {"layers": 4}}, artifacts)
    return Tracker(
        uri, subject, places.metrics, heard, promoter=Promoter(places), look_seconds=0.05, longest_wait=0.3
    )  # fmt: skip


def train(places, attempt: int, steps: range) -> None:
    rows = [{"attempt": attempt, "step": step, "time": 1000.0 + step, "loss": 1 / step} for step in steps]
    jsonl.append(places.metrics, [json.dumps(row) for row in rows])


def no_secret_below(*folders: Path) -> None:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                assert PASSWORD.encode() not in path.read_bytes(), path


@pytest.mark.sampled
def test_a_run_over_restarts_its_promotion_and_the_way_back(served, as_user, tmp_path):
    """One MLflow run, each step once, files beside it, versions with aliases; and the credentials nowhere."""
    heard, places = Told(), fabric.places(tmp_path)
    artifacts = (tmp_path / "mlartifacts").as_uri()
    for attempt, steps in enumerate((range(1, 11), range(6, 21)), start=1):
        train(places, attempt, steps)
        one = tracker(served.uri, places, heard, artifacts=artifacts)
        one.start()
        one.attempt(attempt, steps.start - 1)
        places.persistent.joinpath("report.html").write_text("<p>a report")
        one.artifacts(["report.html"])
        done = one.promote(fabric.wish(places, 10 * attempt, release=True, loss=1 / attempt), 60)
        assert done.status == "production", (done, heard)
        one.finish("stopped" if attempt == 1 else "completed", None)
        assert one.close(60), heard

    client = mlflow_run.connect(served.uri)
    (found,) = client.search_runs([client.get_experiment_by_name(fabric.JOB).experiment_id])
    assert (found.info.status, found.data.params) == ("FINISHED", {"config.layers": "4"})
    losses = client.get_metric_history(found.info.run_id, "loss")
    assert sorted(metric.step for metric in losses) == list(range(1, 21))
    files = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert files == {"report.html", "checkpoints"}
    assert dict(registry.aliases(client, fabric.JOB)) == {"candidate": "2", "production": "2", "previous": "1"}
    assert everstep.rollback(fabric.JOB, served.uri).now == "1"
    assert registry.aliases(client, fabric.JOB)["production"] == "1"
    assert PASSWORD not in f"{heard} {found.data.tags} {client.get_model_version(fabric.JOB, '1').tags}"
    no_secret_below(tmp_path)
    assert not Path("mlruns").exists(), "files go beside the runs, not into the working directory"


@pytest.mark.sampled
@pytest.mark.parametrize("wrong", ["password", "nothing"])
def test_wrong_credentials_are_said_once_without_them_and_cost_only_the_index(
    served, as_user, tmp_path, monkeypatch, wrong
):
    bad = "wr0ng-pa55word"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", bad)
    if wrong == "nothing":
        monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
        monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
    heard, places = Told(), fabric.places(tmp_path)
    train(places, 1, range(1, 4))
    one = tracker(served.uri, places, heard, run="r009")
    one.start()
    one.finish("completed", None)
    assert not one.close(8)
    assert [kind for kind, _ in heard] == ["tracking.away"]
    assert heard[0][1]
    assert "\n" not in heard[0][1]
    assert bad not in heard[0][1]
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", served.user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    assert tracker(served.uri, places, heard, run="r009").replay(60), heard


def test_a_password_in_a_uri_is_shown_nowhere(served, tmp_path):
    """Whoever writes it there: it is used, and stands in no file of the run, and in no error."""
    scheme, _, rest = served.uri.partition("://")
    uri = f"{scheme}://{served.user}:{PASSWORD}@{rest}"
    heard, places = Told(), fabric.places(tmp_path)
    train(places, 1, range(1, 4))
    one = tracker(uri, places, heard, run="r010")
    one.start()
    one.finish("completed", None)
    assert one.close(60), heard
    away = tracker(uri.replace(rest.partition("/")[0], "127.0.0.1:9"), places, heard, run="r011")
    away.start()
    assert not away.close(8)
    assert PASSWORD not in str(heard)
    with pytest.raises(StoreUnavailable) as refused:
        everstep.rollback("job", uri.replace(rest.partition("/")[0], "127.0.0.1:9"))
    assert PASSWORD not in str(refused.value)
    no_secret_below(tmp_path)


def test_where_files_go_without_a_server(tmp_path):
    """A database keeps no files; the persistent tier does, beside the runs."""
    job = TrainJob(name="x", program="a:b", data={"source": "d"}, steps=1)
    assert mlflow_run.is_database("postgresql+psycopg://host/db")
    assert mlflow_run.is_database("mysql://host/db")
    assert not mlflow_run.is_database(job.tracking.uri)
    assert not mlflow_run.is_database("https://mlflow.internal")
