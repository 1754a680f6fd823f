"""From a run's folders to the registry, on a database: what goes there, what is taken back, what is left for later."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from everstep.core.promotion import Wish
from everstep.host import mlflow_run, registry
from everstep.host.promoter import Gone, Promoter
from everstep.host.tracking import Subject, Tracker
from everstep.store import marks
from everstep.store.tensors import weights_digest_of

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric


class Stage:
    """A run with checkpoints, and its MLflow run."""

    def __init__(self, uri: str, tmp: Path) -> None:
        self.uri = uri
        self.places = fabric.places(tmp)
        self.client = mlflow_run.connect(uri)
        experiment = self.client.create_experiment(fabric.JOB, (tmp / "mlartifacts").as_uri())
        self.run_id = self.client.create_run(experiment).info.run_id
        self.promoter = Promoter(self.places)

    def wish(self, step: int, **how) -> Wish:
        return fabric.wish(self.places, step, **how)

    def fulfil(self, wish: Wish):
        return self.promoter.fulfil(self.client, self.run_id, wish)

    def steps(self) -> dict[str, str]:
        return {one.number: one.tags["everstep.step"] for one in registry.versions_of(self.client, "job", self.run_id)}


@pytest.fixture
def stage(uri, tmp_path) -> Stage:
    return Stage(uri, tmp_path)


def test_digest_manifest_and_names_are_in_the_registry(stage):
    wish = stage.wish(10, loss=0.5)
    folder = stage.places.checkpoints("persistent") / "step-00000010.a1"
    assert stage.fulfil(wish).status == "candidate"
    version = registry.version(stage.client, "job", "1")
    assert version.tags["everstep.digest"] == weights_digest_of(folder)
    source = Path(stage.client.get_model_version("job", "1").source.removeprefix("file://"))
    assert (source / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()
    assert json.loads((source / "checkpoint.json").read_text()) == version.tags


def test_a_checkpoint_that_reached_a_more_durable_tier_later_is_named_there(stage):
    wish = stage.wish(10, loss=0.5)
    stage.fulfil(wish)
    later = wish.candidate.model_copy(update={"uri": "s3://bucket/job/x"})
    stage.fulfil(wish.model_copy(update={"candidate": later}))
    assert registry.version(stage.client, "job", "1").tags["everstep.uri"] == "s3://bucket/job/x"
    assert stage.steps() == {"1": "10"}


def test_versions_whose_bytes_are_gone_go_and_those_with_an_alias_stay(stage):
    stage.fulfil(stage.wish(10, release=True, loss=0.5))
    stage.fulfil(stage.wish(20, loss=0.6))
    for step in (10, 20):
        shutil.rmtree(stage.places.checkpoints("persistent") / f"step-000000{step}.a1")
    stage.fulfil(stage.wish(30, loss=0.7))
    assert stage.steps() == {"1": "10", "3": "30"}
    assert marks.pinned(stage.places) == {"step-00000010.a1"}
    assert dict(registry.aliases(stage.client, "job")) == {"production": "1", "candidate": "3"}


def test_a_checkpoint_that_turned_out_bad_is_no_candidate(stage):
    """BC-173: it keeps its version, as evidence, with the reason."""
    stage.fulfil(stage.wish(10, loss=0.5))
    marks.quarantine(stage.places, "step-00000010.a1", "persistent", "rank-0.safetensors holds NaN in x")
    stage.fulfil(stage.wish(20, loss=0.6))
    assert (
        registry.version(stage.client, "job", "1").tags["everstep.quarantined"] == "rank-0.safetensors holds NaN in x"
    )
    assert registry.aliases(stage.client, "job")["candidate"] == "2"


def test_a_checkpoint_that_went_before_mlflow_heard_of_it(stage):
    wish = stage.wish(10, loss=0.5)
    shutil.rmtree(stage.places.checkpoints("persistent") / "step-00000010.a1")
    with pytest.raises(Gone, match="was removed before"):
        stage.fulfil(wish)
    other = stage.wish(10, loss=0.4)
    assert other.candidate.manifest != wish.candidate.manifest
    with pytest.raises(Gone):
        stage.fulfil(wish)


def test_a_wish_outlives_the_tracker_that_could_not_tell_it(stage, tmp_path, monkeypatch):
    """BC-102: asked while MLflow was away, done by the next tracker; nobody waited longer than allowed."""
    metrics = stage.places.metrics
    subject = Subject(fabric.JOB, fabric.RUN)

    def tracker(uri: str, heard: list) -> Tracker:
        promoter = Promoter(stage.places)
        return Tracker(
            uri, subject, metrics, lambda kind, text, **data: heard.append((kind, data)), promoter=promoter,
            look_seconds=0.05, longest_wait=0.3,
        )  # fmt: skip

    for name, value in (("TIMEOUT", "1"), ("MAX_RETRIES", "0")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    heard: list = []
    away = tracker("http://127.0.0.1:9", heard)
    away.start()
    done = away.promote(stage.wish(10, release=True, loss=0.5), 1.0)
    assert done.status == "waiting"
    assert "run the same command again" in done.reason
    assert not away.close(0.2)

    back = tracker(stage.uri, heard)
    assert back.replay(60)
    assert back.promotion.status == "production"
    assert [kind for kind, _ in heard if kind.startswith("promotion")] == ["promotion.released"]
    assert registry.aliases(stage.client, "job")["production"] == back.promotion.version
    assert not metrics.with_name("tracking.json").exists()


def test_proposals_of_which_only_the_newest_counts(stage):
    heard: list = []
    one = Tracker(
        stage.uri, Subject(fabric.JOB, fabric.RUN), stage.places.metrics,
        lambda kind, text, **data: heard.append((kind, data.get("step"))), promoter=Promoter(stage.places),
    )  # fmt: skip
    for step in (10, 20, 30):
        one.propose(stage.wish(step, loss=0.5).candidate)
    one.start()
    assert one.close(60)
    assert heard == [("promotion.candidate", 30)]
