"""Blocks hand out plain objects, refuse what cannot be right, and show no secret."""

import pytest
from pydantic import SecretStr, ValidationError

from blocks.guardrails import Guardrails
from blocks.tiers import StorageTiers
from blocks.tracking import Tracking
from everstep.core.guardrails import Guardrails as Rules
from everstep.core.job import Tiers
from everstep.core.place import S3Settings

PLACES = {"local": "/nvme", "persistent": "/mnt/runs"}
KEYS = {"access_key": "AKIA1", "secret_key": "s3cr3t-of-ours", "session_token": "t0ken-of-ours"}


def test_places_are_handed_out_as_a_job_would_write_them():
    block = StorageTiers(**PLACES, object="s3://models/runs", budget_gb=100)
    assert block.tiers() == Tiers(local="/nvme", persistent="/mnt/runs", object="s3://models/runs", budget_gb=100)
    assert StorageTiers(**PLACES).tiers().object is None


def test_what_a_job_says_of_its_store_comes_before_the_block():
    block = StorageTiers(**PLACES, endpoint_url="http://store:9000", region="eu-1", addressing="path")
    own = S3Settings(endpoint_url="http://store:9000", region="eu-1", addressing="path")
    assert block.s3(S3Settings()) == block.s3(S3Settings(endpoint_url=None, addressing="auto")) == own
    assert block.s3(S3Settings(region="us-2")).region == "us-2"
    assert block.hosts() == ("store:9000",)
    assert StorageTiers(**PLACES, allowed_hosts=["other"]).hosts() == ("other",)


def test_keys_are_handed_out_whole_or_not_at_all():
    keys = StorageTiers(**PLACES, **KEYS).keys()
    assert (keys.access_key, keys.secret.get_secret_value()) == ("AKIA1", "s3cr3t-of-ours")
    assert keys.token == SecretStr("t0ken-of-ours")
    assert StorageTiers(**PLACES).keys() is None


def test_tracking_hands_out_a_place_and_credentials_for_the_flow_alone():
    block = Tracking(uri="http://mlflow:5000", username="me", password="pa55")
    assert block.tracking().uri == "http://mlflow:5000"
    assert block.environment() == {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "pa55"}
    assert Tracking(uri="http://mlflow:5000", token="t0k").environment() == {"MLFLOW_TRACKING_TOKEN": "t0k"}
    assert Tracking(uri="http://mlflow:5000").environment() == {}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (StorageTiers, PLACES | {"local": "nvme"}, "must be an absolute path"),
        (StorageTiers, PLACES | {"persistent": "/nvme"}, "needs a second place"),
        (StorageTiers, PLACES | {"object": "ftp://x"}, "is a URL of another kind"),
        (StorageTiers, PLACES | {"endpoint_url": "store:9000"}, "must be http"),
        (StorageTiers, PLACES | {"addressing": "sideways"}, "should be .auto., .path. or .virtual."),
        (StorageTiers, PLACES | KEYS | {"access_key": None}, "belong together"),
        (Guardrails, {"programs": ["a"], "data": ["data"]}, "neither an absolute folder nor s3"),
        (Guardrails, {"programs": ["a/b.py"], "data": ["/d"]}, "neither a module nor an absolute folder"),
        (Guardrails, {"programs": [], "data": ["/d"]}, "at least 1 item"),
        (Tracking, {"uri": "http://me:pa55-of-ours@mlflow"}, "holds a password"),
        (Tracking, {"uri": "http://mlflow", "username": "me"}, "belong together"),
        (
            Tracking,
            {"uri": "http://m", "username": "me", "password": "pa55-of-ours", "token": "t0"},
            "give one of them",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_without_repeating_a_secret(kind, fields, said):
    with pytest.raises(ValidationError, match=said) as refused:
        kind(**fields)
    assert "-of-ours" not in str(refused.value)


def test_no_secret_is_shown():
    tiers = StorageTiers(**PLACES, **KEYS)
    tracking = Tracking(uri="http://mlflow", username="me", password="pa55-of-ours")
    for block in (tiers, tracking):
        assert "-of-ours" not in f"{block!r} {block} {block.model_dump()} {block.model_dump_json()}"
    assert "-of-ours" not in repr(tiers.keys())


@pytest.mark.parametrize("kind", [Guardrails, StorageTiers, Tracking])
def test_every_field_of_the_form_says_what_it_is(kind):
    """The form in Prefect's UI is made from the schema."""
    fields = kind.model_json_schema()["properties"]
    assert all(one["title"] and one["description"] for one in fields.values()), fields
    secrets = {name for name, one in kind.model_fields.items() if "SecretStr" in str(one.annotation)}
    assert {name.partition(".")[0] for name in kind.model_json_schema()["secret_fields"]} == secrets


def test_guardrails_are_handed_out_as_plain_lists():
    block = Guardrails(programs=["acme", "/srv/programs"], data=["/srv/data", "s3://corpora"])
    assert block.rules() == Rules(programs=("acme", "/srv/programs"), data=("/srv/data", "s3://corpora"))
