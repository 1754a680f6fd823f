"""Whose keys go where: settings, environment, profiles, blocks."""

import json
import os

import pytest
from pydantic import SecretStr

from everstep.core.place import S3Settings
from everstep.store import s3
from everstep.store.s3_access import session_of

NOTHING = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
ENDPOINT = "http://store.example:9000"


def test_the_standard_variables():
    env = NOTHING | {"AWS_ENDPOINT_URL": ENDPOINT + "/", "AWS_REGION": "eu-west-1"}
    found = s3.access(S3Settings(), env=env)
    assert (found.endpoint_url, found.region, found.keys, found.profile) == (ENDPOINT, "eu-west-1", None, None)
    assert s3.access(S3Settings(), env=NOTHING).endpoint_url is None
    assert (
        s3.access(S3Settings(), env=env | {"AWS_ENDPOINT_URL_S3": "http://s3.example"}).endpoint_url
        == "http://s3.example"
    )
    assert s3.access(S3Settings(region="here"), env=env).region == "here"
    assert s3.access(S3Settings(), env=env | {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}).endpoint_url is None


@pytest.fixture
def files(tmp_path):
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = lab-1\nendpoint_url = {ENDPOINT}\n[default]\nregion = usual-1\n"
    )
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = LABKEY\naws_secret_access_key = labsecret\n")
    return {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }


def test_profiles(files, monkeypatch):
    found = s3.access(S3Settings(profile="lab"), env=files)
    assert (found.endpoint_url, found.region, found.profile) == (ENDPOINT, "lab-1", "lab")
    assert s3.access(S3Settings(), env=files | {"AWS_PROFILE": "lab"}) == found
    assert s3.access(S3Settings(), env=files).region == "usual-1"
    for name, value in files.items():
        monkeypatch.setenv(name, value)
    assert session_of(found).get_credentials().access_key == "LABKEY"
    with pytest.raises(ValueError, match=r"s3\.profile: 'nobody': .*nobody.*; correct the AWS configuration files"):
        s3.access(S3Settings(profile="nobody"), env=files)


@pytest.mark.parametrize(
    ("endpoint", "env", "hosts", "served"),
    [
        ("http://evil.example", {}, (), False),
        ("http://evil.example", {"AWS_ENDPOINT_URL": ENDPOINT}, (), False),
        (ENDPOINT, {"AWS_ENDPOINT_URL": ENDPOINT}, (), True),
        (ENDPOINT, {"AWS_ENDPOINT_URL": ENDPOINT + "/"}, (), True),
        ("http://store.example:9001", {"AWS_ENDPOINT_URL": ENDPOINT}, (), False),
        (ENDPOINT, {}, ("store.example",), True),
        (ENDPOINT, {}, ("store.example:9000",), True),
        (ENDPOINT, {}, ("store.example:9001",), False),
        (ENDPOINT, {}, ("example",), False),
        ("https://s3.eu-west-1.amazonaws.com", {}, (), True),
        ("https://s3.amazonaws.com", {}, (), True),
        ("http://s3.amazonaws.com", {}, (), False),
        ("https://s3.evil.amazonaws.com.evil.example", {}, (), False),
        ("https://evil.s3.amazonaws.com.evil", {}, (), False),
        ("https://mine.elb.amazonaws.com", {}, (), False),
    ],
)
def test_an_endpoint_in_a_job_gets_no_keys_unless_somebody_else_names_it(endpoint, env, hosts, served):
    keys = s3.Keys("KEY", SecretStr("hush"))
    for given in (None, keys):
        ask = lambda given=given: s3.access(  # noqa: E731
            S3Settings(endpoint_url=endpoint), keys=given, allowed_hosts=hosts, env=NOTHING | env
        )
        if served:
            assert ask().endpoint_url == endpoint
            continue
        with pytest.raises(
            ValueError, match=r"s3\.endpoint_url: .* nothing but the job names it; set AWS_ENDPOINT_URL"
        ):
            ask()


def test_it_travels_as_json_and_shows_no_secret():
    keys = s3.Keys("KEY", SecretStr("hush-hush"), SecretStr("to-ken"))
    found = s3.access(S3Settings(), keys=keys, env=NOTHING | {"AWS_ENDPOINT_URL": ENDPOINT})
    assert s3.Access.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    bare = found.without_keys()
    assert s3.Access.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare
    assert "hush-hush" in json.dumps(found.to_dict())
    shown = f"{found!r} {found} {keys!r} {s3.open_store('bucket', found)!r}"
    assert "hush" not in shown
    assert "to-ken" not in shown


def test_no_credentials_at_all_is_a_sentence(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in NOTHING.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = s3.open_store("bucket", s3.Access("http://127.0.0.1:9"))
    for call in (lambda: store.read("a"), lambda: list(store.list(""))):
        with pytest.raises(ValueError, match="no AWS credentials were found; set AWS_ACCESS_KEY_ID"):
            call()
