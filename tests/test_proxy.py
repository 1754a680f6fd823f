"""The fault proxy does what its plan says, and passes all else on unchanged."""

import os
import threading
import time

import pytest
from rigs.proxy import Fault

BODY = os.urandom(300_000)


@pytest.fixture
def client(s3_server, s3_proxy):
    import boto3
    from botocore.config import Config

    made = boto3.session.Session().client(
        "s3",
        endpoint_url=s3_proxy.endpoint,
        aws_access_key_id=s3_server.access_key,
        aws_secret_access_key=s3_server.secret_key,
        region_name=s3_server.region,
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            read_timeout=2,
            response_checksum_validation="when_required",
        ),
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(s3_server):
    return s3_server.bucket()


@pytest.fixture
def bucket(s3_server, shared):
    """Empty: making a new one takes the server a second."""
    s3_server.client().delete_object(Bucket=shared, Key="a")
    return shared


def read(client, bucket, key="a"):
    return client.get_object(Bucket=bucket, Key=key)["Body"].read()


def test_requests_pass_unchanged_and_are_written_down(client, bucket, s3_proxy):
    client.put_object(Bucket=bucket, Key="a", Body=BODY)
    assert read(client, bucket) == BODY
    assert client.head_object(Bucket=bucket, Key="a")["ContentLength"] == len(BODY)
    assert [one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]] == ["a"]
    client.delete_object(Bucket=bucket, Key="a")
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    assert [one.method for one in s3_proxy.requests] == ["PUT", "GET", "HEAD", "GET", "DELETE", "GET"]


@pytest.mark.parametrize(
    ("do", "code", "status"),
    [("internal", "InternalError", 500), ("slow_down", "SlowDown", 503), ("expired", "ExpiredToken", 403)],
)
def test_a_refusal_is_one_of_s3_and_the_server_does_not_see_the_request(client, bucket, s3_proxy, do, code, status):
    from botocore.exceptions import ClientError

    s3_proxy.plan(Fault(do, "PUT"))
    with pytest.raises(ClientError) as refused:
        client.put_object(Bucket=bucket, Key="a", Body=BODY)
    assert (refused.value.response["Error"]["Code"], s3_proxy.requests[0].status) == (code, status)
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="a", Body=BODY)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("reset", "PUT", at=1000),
        Fault("reset", "PUT"),
        Fault("lose_reply", "PUT"),
        Fault("stall", "PUT"),
        Fault("stall", "GET", at=100_000),
        Fault("reset", "GET"),
        Fault("cut", "GET", at=100_000),
    ],
    ids=lambda fault: f"{fault.method}-{fault.do}-{fault.at}",
)
def test_what_a_network_does_is_seen_by_the_client(client, bucket, s3_proxy, s3_server, fault):
    from botocore.exceptions import BotoCoreError

    s3_server.put(bucket, {"a": b"old"} if fault.method == "PUT" else {"a": BODY})
    s3_proxy.plan(fault)
    with pytest.raises(BotoCoreError):
        client.put_object(Bucket=bucket, Key="a", Body=BODY) if fault.method == "PUT" else read(client, bucket)
    there = s3_server.client().get_object(Bucket=bucket, Key="a")["Body"].read()
    assert there == (BODY if fault.do == "lose_reply" or fault.method == "GET" else b"old")
    assert read(client, bucket) == there


def test_a_body_may_be_short_holed_or_another(client, bucket, s3_proxy, s3_server):
    s3_server.put(bucket, {"a": BODY})
    s3_proxy.plan(Fault("short", "GET", at=7), Fault("zeros", "GET", at=70_000, count=10), Fault("changed", "GET"))
    assert read(client, bucket) == BODY[:7]
    assert read(client, bucket) == BODY[:70_000] + bytes(10) + BODY[70_010:]
    assert read(client, bucket) == bytes(byte ^ 255 for byte in BODY)


def test_a_listing_may_be_stale_and_a_hook_may_change_the_object(client, bucket, s3_proxy, s3_server):
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    s3_proxy.plan(Fault("stale", "GET", "list-type"), Fault("call", "GET", "/a", hook=lambda: put(b"new")))

    def put(data):
        s3_server.put(bucket, {"a": data})

    put(b"old")
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    assert [one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]] == ["a"]
    assert read(client, bucket) == b"new"


def test_faults_may_skip_repeat_and_end_with_the_proxy(client, bucket, s3_proxy, s3_server):
    from botocore.exceptions import ClientError

    s3_server.put(bucket, {"a": BODY})
    s3_proxy.plan(Fault("internal", "GET", skip=1, times=-1))
    assert read(client, bucket) == BODY
    for _ in range(3):
        with pytest.raises(ClientError):
            read(client, bucket)
    s3_proxy.clear()
    s3_proxy.plan(Fault("stall", "GET"))
    threading.Timer(0.3, s3_proxy.close).start()
    began = time.monotonic()
    with pytest.raises(Exception, match="onnection"):
        read(client, bucket)
    assert time.monotonic() - began < 1.5
