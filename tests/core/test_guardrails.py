"""Guardrails: what a job may name, and every way in which one could try to name something else."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.guardrails import Guardrails
from everstep.core.job import TrainJob

BASE = Path("/srv/checkout")
RULES = Guardrails(
    programs=("acme.training", "everstep.programs.digits:build", "/srv/programs"),
    data=("/srv/data", "s3://corpora/public"),
    tiers=("/scratch", "s3://models/team"),
    hosts=("mlflow.internal:5000", "store.internal"),
    variables=("HF_HOME",),
)
GOOD = {"name": "x", "program": "acme.training:build", "data": {"source": "/srv/data/set"}, "steps": 1}


def refusal(**changes) -> str:
    return RULES.refusal(TrainJob.model_validate(GOOD | changes), BASE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"program": "acme.training.vision:build"},
        {"program": "everstep.programs.digits:build"},
        {"program": "/srv/programs/deep/one.py:build"},
        {"data": {"source": "/srv/data"}},
        {"data": {"source": "s3://corpora/public/2024"}},
        {"data": {"source": "s3://corpora/public", "gate": {"suite": "/srv/data/suite.json"}}},
        {"tiers": "prod", "tracking": "prod"},
        {"tiers": {"local": "/scratch/a", "persistent": "/scratch/b", "object": "s3://models/team/x"}},
        {"tiers": {"local": "/srv/checkout/.everstep/nvme"}},
        {"tracking": {"uri": "https://me:pw@mlflow.internal:5000"}},
        {"tracking": {"uri": "sqlite:////scratch/mlflow.db"}},
        {"ledger": {"uri": "postgresql+psycopg://store.internal:5432/ledger"}},
        {"s3": {"endpoint_url": "http://store.internal:9000"}},
        {"env": ["HF_HOME"]},
    ],
)
def test_what_is_allowed_passes(changes):
    assert refusal(**changes) == ""


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("program", {"program": "os:system"}),
        ("program", {"program": "acme.trainingevil:build"}),
        ("program", {"program": "acme:build"}),
        ("program", {"program": "everstep.programs.digits:other"}),
        ("program", {"program": "/srv/programs/../other/one.py:build"}),
        ("program", {"program": "/srv/programs-of-others/one.py:build"}),
        ("program", {"program": "one.py:build"}),
        ("data.source", {"data": {"source": "/srv/data/../../etc"}}),
        ("data.source", {"data": {"source": "/etc"}}),
        ("data.source", {"data": {"source": "s3://corpora/publicity"}}),
        ("data.source", {"data": {"source": "s3://corpora"}}),
        ("data.gate.suite", {"data": {"source": "/srv/data", "gate": {"suite": "/etc/shadow"}}}),
        ("tiers.local", {"tiers": {"local": "/home/other/.everstep/nvme"}}),
        ("tiers.persistent", {"tiers": {"persistent": "/"}}),
        ("tiers.object", {"tiers": {"object": "s3://models/teammates"}}),
        ("tracking.uri", {"tracking": {"uri": "http://evil:5000"}}),
        ("tracking.uri", {"tracking": {"uri": "http://mlflow.internal:5000@evil"}}),
        ("tracking.uri", {"tracking": {"uri": "sqlite:////home/other/x.db"}}),
        ("ledger.uri", {"ledger": {"uri": "postgresql://evil/db"}}),
        ("s3.endpoint_url", {"s3": {"endpoint_url": "http://evil:9000"}}),
        ("env", {"env": ["PREFECT_API_KEY"]}),
    ],
)
def test_what_is_not_is_refused_in_one_sentence_that_names_the_field(field, changes):
    said = refusal(**changes)
    assert said.startswith(f"{field}: ")
    assert "is not allowed in a job that comes through this server (allowed: " in said
    assert "\n" not in said


def test_links_are_followed(tmp_path):
    """What counts is where a path comes to."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "out").symlink_to("/etc")
    rules = RULES.model_copy(update={"data": (str(tmp_path / "data"),)})
    job = TrainJob.model_validate(GOOD | {"data": {"source": str(tmp_path / "data" / "out")}})
    assert rules.refusal(job, BASE, os.path.realpath).startswith("data.source: ")


@given(st.lists(st.sampled_from(["..", "a", ".", "data", "srv", "b-c"]), max_size=8))
def test_no_way_leads_out_of_a_folder(parts):
    source = "/".join(["/srv/data", *parts])
    allowed = not refusal(data={"source": source})
    inside = Path(os.path.normpath(source)).is_relative_to("/srv/data")
    assert allowed == inside


def test_an_empty_list_allows_nothing():
    rules = Guardrails(programs=(), data=())
    assert rules.refusal(TrainJob.model_validate(GOOD), BASE).endswith("(allowed: none).")
