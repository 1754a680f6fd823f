"""The job file: what is wrong with it is said in one sentence, and what is the same run stays the same run."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from everstep.core.job import TrainJob, explain

GOOD: dict[str, Any] = {"name": "x", "program": "a.b:build", "data": {"source": "d"}, "steps": 10}
CALLABLE = "must name a callable as package.module:build or path/to/file.py:build"
NAMED = "must be 1 to 63 characters of a-z, 0-9 and dashes, and not begin or end with a dash"
DIGEST = "d" * 64


def job(**fields: Any) -> TrainJob:
    return TrainJob.model_validate(GOOD | fields)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stepz": 3}, "stepz is not a field of a job; did you mean steps?"),
    ({"checkpoint": {"every_step": 1}}, "checkpoint.every_step is not a field of a job; did you mean every_steps?"),
    ({"data": {"sorce": "d"}}, "data.sorce is not a field of a job; did you mean source?"),
    ({"data": {}}, "data.source is missing; every job needs it."),
    ({"retries": {"zzz": 1}}, "retries.zzz is not a field of a job; it takes per_cause, per_job."),
    ({"steps": -1}, "steps: -1: must be greater than 0."),
    ({"steps": 0}, "steps: 0: must be greater than 0."),
    ({"steps": True}, "steps: True: must be a number, not yes or no."),
    ({"steps": 1.5}, "steps: 1.5: must be a valid integer, got a number with a fractional part."),
    ({"segment_steps": -5}, "segment_steps: -5: must be greater than 0."),
    ({"evaluate_every_steps": 0}, "evaluate_every_steps: 0: must be greater than 0."),
    ({"checkpoint": {"every_steps": 0}}, "checkpoint.every_steps: 0: must be greater than 0."),
    ({"checkpoint": {"every_minutes": float("nan")}}, "checkpoint.every_minutes: nan: must be a finite number."),
    ({"checkpoint": {"every_minutes": -1}}, "checkpoint.every_minutes: -1: must be greater than 0."),
    ({"checkpoint": {"keep": 0}}, "checkpoint.keep: 0: must be greater than or equal to 1."),
    (
        {"checkpoint": {"every_steps": 1, "every_minutes": 2}},
        "checkpoint: has both every_steps and every_minutes; give one of them.",
    ),
    (
        {"checkpoint": {"every": "auto", "every_minutes": 2}},
        "checkpoint: has both every and every_minutes; give one of them.",
    ),
    ({"checkpoint": {"every": 5}}, "checkpoint.every: 5: must be 'auto'."),
    ({"checkpoint": {"keep_every_steps": 0}}, "checkpoint.keep_every_steps: 0: must be greater than 0."),
    ({"checkpoint": {"budget_gb": {"local": 0}}}, "checkpoint.budget_gb.local: 0: must be greater than 0."),
    (
        {"checkpoint": {"budget_gb": {"lokal": 1}}},
        "checkpoint.budget_gb.lokal is not a field of a job; did you mean local?",
    ),
    (
        {"checkpoint": {"best": {"metric": "a", "mode": "low"}}},
        "checkpoint.best.mode: 'low': must be 'min' or 'max'.",
    ),
    ({"checkpoint": 3}, "checkpoint: 3: must be a group of fields."),
    (
        {"segment_steps": 1, "segment_minutes": 2},
        "the job has both segment_steps and segment_minutes; give one of them.",
    ),
    (
        {"tiers": {"local": "a", "persistent": "a"}},
        "tiers: has the same folder as local and persistent; a copy needs a second place.",
    ),
    (
        {"tiers": {"local": "s3://x"}},
        "tiers.local: 's3://x': is a URL; name a folder or a mount.",
    ),
    (
        {"data": {"source": "s3://b/x"}},
        "data.source: 's3://b/x': names no bucket ('b'); write s3://bucket/prefix.",
    ),
    (
        {"data": {"source": "gs://bucket/x"}},
        "data.source: 'gs://bucket/x': is a URL of another kind; give a directory or s3://bucket/prefix.",
    ),
    (
        {"tiers": {"object": "s3://bucket/a/../b"}},
        "tiers.object: 's3://bucket/a/../b': has an empty or dotted part in its prefix; write s3://bucket/prefix.",
    ),
    (
        {"s3": {"endpoint_url": "http://me:secret@host"}},
        "s3.endpoint_url: 'http://...@host': must be http(s)://host[:port], without a user or a path.",
    ),
    ({"data": "corpus"}, "data: 'corpus': must be a group of fields."),
    ({"config": [1]}, "config: [1]: must be a group of fields."),
    ({"env": "HOME"}, "env: 'HOME': must be a list."),
    ({"ranks": 0}, "ranks: 0: must be greater than or equal to 1."),
    ({"nodes": 2}, "nodes: 2: must be less than or equal to 1."),
    ({"seed": -1}, "seed: -1: must be greater than or equal to 0."),
    ({"device": "tpu"}, "device: 'tpu': must be 'auto', 'cpu' or 'cuda'."),
    ({"grace_seconds": 28}, "grace_seconds: 28: must be less than or equal to 27."),
    ({"limits": {"train_factor": 1}}, "limits.train_factor: 1: must be greater than or equal to 2."),
    *(
        ({"name": name}, f"name: {name!r}: {NAMED}.")
        for name in ("", ".", "..", "../up", "a/b", "A", "-a", "a-", "a_b", "a\n", "a\0", "ä", "a" * 64)
    ),
    *(
        ({"program": program}, f"program: {program!r}: {CALLABLE}.")
        for program in ("", "a.b", ":build", "a.b:", "a b:build", "a.b:2x", "a..b:build", "a.b:x.y")
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), WRONG, ids=lambda value: value[:50] if isinstance(value, str) else "")
def test_what_is_wrong_is_said_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        job(**fields)
    assert explain(caught.value, "job.yaml") == f"job.yaml: {sentence}"


@pytest.mark.parametrize("field", GOOD)
def test_what_is_missing_is_named(field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainJob.model_validate({name: value for name, value in GOOD.items() if name != field})
    assert explain(caught.value, "job.yaml") == f"job.yaml: {field} is missing; every job needs it."


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ValidationError) as caught:
        job(device="x" * 500)
    assert len(explain(caught.value, "job.yaml")) < 160


@pytest.mark.parametrize("name", ["a", "0", "a-b", "stdlib-gpt", "a" * 63, "a--b"])
def test_names_that_are_folders(name: str) -> None:
    assert job(name=name).name == name


@pytest.mark.parametrize(
    "program", ["a:b", "a.b.c:build", "x.py:build", "../x.py:build", "/abs/olute.py:make", "~/x.py:b"]
)
def test_programs_that_name_a_callable(program: str) -> None:
    assert job(program=program).program == program


def test_a_job_survives_its_own_json_and_cannot_be_changed() -> None:
    one = job(checkpoint={"every_minutes": 15}, config={"layers": 4, "deep": {"lr": 0.1}})
    assert TrainJob.model_validate_json(one.model_dump_json()) == one
    with pytest.raises(ValidationError):
        one.steps = 5  # type: ignore[misc]


def test_relative_places_are_taken_from_the_job_file() -> None:
    one = job(program="train/it.py:build", data={"source": "corpus"}).resolve(Path("/jobs"))
    assert (one.program, one.data.source) == ("/jobs/train/it.py:build", "/jobs/corpus")
    assert (one.tiers.local, one.tiers.persistent) == ("/jobs/.everstep/nvme", "/jobs/.everstep/persistent")
    assert one.tracking.uri == "sqlite:////jobs/.everstep/mlflow.db"
    assert one.ledger.uri is None
    assert one.resolve(Path("/elsewhere")) == one


@pytest.mark.parametrize(
    "uri", ["http://host:5000", "sqlite://", "sqlite:///:memory:", "sqlite:////abs.db", "postgresql://h/d"]
)
def test_addresses_that_are_no_relative_files_stay(uri: str) -> None:
    one = job(tracking={"uri": uri}, ledger={"uri": uri}).resolve(Path("/jobs"))
    assert (one.tracking.uri, one.ledger.uri) == (uri, uri)


def test_fingerprints_are_the_same_in_every_release() -> None:
    """Runs on disk are found by these. A change here orphans them all: it needs a decision, not a new literal."""
    assert job().fingerprint(DIGEST) == "588961feecf63d79e91131d4e4f5b0a4ac79e76a497ed17a8c1f11fc46b87270"
    config = {"layers": 4, "lr": 1e-3, "b": [1, None, True]}
    other = job(program="p/q.py:build", config=config, seed=7)
    assert other.fingerprint(DIGEST) == "7990b679d82823ad1cda239af41b076b600a259a170f133578c10f1be7bb6793"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "y"},
        {"steps": 20},
        {"ranks": 4},
        {"threads": 2},
        {"device": "cpu"},
        {"segment_steps": 5},
        {"checkpoint": {"every_steps": 1, "keep": 9}},
        {"tiers": {"local": "l", "persistent": "p"}},
        {"tracking": {"uri": "http://other"}},
        {"retries": {"per_job": 1}},
        {"fresh": True},
        {"data": {"source": "elsewhere"}},
    ],
    ids=str,
)
def test_what_may_change_on_resume_leaves_the_fingerprint(fields: dict[str, Any]) -> None:
    assert job(**fields).fingerprint(DIGEST) == job().fingerprint(DIGEST)


@pytest.mark.parametrize(
    "fields", [{"program": "a.c:build"}, {"program": "a.b:other"}, {"config": {"a": 1}}, {"seed": 1}], ids=str
)
def test_what_makes_another_run_changes_the_fingerprint(fields: dict[str, Any]) -> None:
    assert job(**fields).fingerprint(DIGEST) != job().fingerprint(DIGEST)


def test_the_data_set_belongs_to_the_fingerprint() -> None:
    assert job().fingerprint("e" * 64) != job().fingerprint(DIGEST)


def test_order_of_configuration_and_folder_of_a_program_file_do_not_count() -> None:
    one = job(program="/here/q.py:build", config={"a": 1, "b": 2})
    two = job(program="there/q.py:build", config={"b": 2, "a": 1})
    assert one.fingerprint(DIGEST) == two.fingerprint(DIGEST)


@pytest.mark.parametrize(
    ("policy", "auto"),
    [({}, True), ({"every": "auto"}, True), ({"every_steps": 5}, False), ({"every_minutes": 5}, False)],
)
def test_without_a_rhythm_of_its_own_a_job_saves_as_often_as_costs_least(policy, auto):
    assert job(checkpoint=policy).checkpoint.is_auto is auto
