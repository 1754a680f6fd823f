"""Staging from a real S3 server, with a proxy between that does harm."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from pydantic import SecretStr
from rigs.proxy import Fault

from everstep.core.dataset import DatasetManifest, FileEntry
from everstep.core.errors import StoreUnavailable
from everstep.core.place import S3Settings
from everstep.host import arrival, fetching, staging
from everstep.store import digest, s3

SMALL = {f"d/{number:02d}": os.urandom(3000) for number in range(20)}
CODE = """
import sys
from pathlib import Path
from everstep.host import arrival, fetching, staging
fetching.PART, arrival.STRETCH = 1 << 20, 2 << 20
found = staging.stage(sys.argv[1], Path(sys.argv[2]))
print(found.fetched, found.bytes)
"""


@pytest.fixture(scope="module")
def bucket(s3_server):
    return s3_server.bucket()


@pytest.fixture
def prefix(request):
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def local(tmp_path):
    return tmp_path / "nvme"


@pytest.fixture
def put(s3_server, bucket, prefix):
    """Put objects below the test's prefix."""
    return lambda objects: s3_server.put(bucket, {f"{prefix}/{name}": body for name, body in objects.items()})


@pytest.fixture
def stage(s3_server, s3_proxy, bucket, prefix, local, monkeypatch):
    """Stage the test's prefix by way of the proxy."""
    monkeypatch.setitem(s3.open_store.__kwdefaults__, "patience", s3.Patience(4, 10.0, 0.01, 0.05))
    key, secret = s3_server.keys["admin"]
    env = s3_server.env() | {"AWS_ENDPOINT_URL": s3_proxy.endpoint}
    access = s3.access(S3Settings(), keys=s3.Keys(key, SecretStr(secret)), env=env)

    def run(source=f"s3://{bucket}/{prefix}", **more):
        return staging.stage(source, local, **({"access": access} | more))

    return run


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def gets(proxy, prefix):
    return proxy.seen("GET", f"/{prefix}/")


def test_a_data_set_is_brought_once(stage, put, s3_proxy, prefix, local):
    put(SMALL | {"empty": b"", "big": os.urandom(9 << 20), "a folder/": b""})
    told = []
    first = stage(progress=lambda done, total: told.append((done, total)))
    assert sorted(content(first.data)) == sorted([*SMALL, "empty", "big"])
    assert (first.fetched, first.bytes) == (22, (9 << 20) + 60_000)
    assert told[-1] == (first.bytes, first.bytes)
    s3_proxy.clear()
    second = stage()
    assert (second.fetched, second.bytes, second.data, second.manifest) == (0, 0, first.data, first.manifest)
    assert gets(s3_proxy, prefix) == []
    assert len(s3_proxy.requests) == 1


def test_it_is_the_same_data_set_as_in_a_directory(stage, put, tmp_path, local):
    put(SMALL)
    found = stage()
    shutil.copytree(found.data, tmp_path / "copy")
    assert staging.stage(tmp_path / "copy", local).fetched == 0
    assert staging.stage(tmp_path / "copy", tmp_path / "else").manifest.fingerprint == found.manifest.fingerprint
    assert not list((local / "datasets").glob(".partial-*"))
    assert sorted(path.name for path in found.data.parent.iterdir()) == ["data", "manifest.json"]


def test_what_changed_at_the_source_is_all_that_is_fetched(stage, put, s3_server, bucket, prefix):
    """Case BC-119: one process stages twice, and has the present set each time."""
    put(SMALL)
    first = stage()
    put({"d/03": b"new", "d/99": b"more"})
    s3_server.client().delete_object(Bucket=bucket, Key=f"{prefix}/d/05")
    second = stage()
    assert (second.fetched, second.bytes) == (2, 7)
    assert second.data != first.data
    wanted = SMALL | {"d/03": b"new", "d/99": b"more"}
    del wanted["d/05"]
    assert content(second.data) == wanted
    assert content(first.data) == SMALL


def test_damage_of_the_local_copy_is_mended(stage, put):
    put(SMALL)
    first = stage()
    (first.data / "d/00").write_bytes(b"x" * 3000)
    (first.data / "d/01").unlink()
    second = stage()
    assert (second.fetched, second.bytes, content(second.data)) == (2, 6000, SMALL)
    assert sorted(path.name for path in second.data.parent.iterdir()) == ["data", "manifest.json"]


@pytest.mark.parametrize("do", ["cut", "short", "reset", "internal", "zeros"])
@pytest.mark.parametrize("at", [0, 1, 100, 20_000, 39_999])
def test_a_broken_body_is_fetched_again(stage, put, s3_proxy, prefix, do, at):
    """Case BC-114: cut after k bytes, holed, or refused: the digest is right in the end."""
    body = os.urandom(40_000)
    put({"a": body, "b": body[::-1]})
    s3_proxy.plan(Fault(do, "GET", path=f"/{prefix}/a", at=at, count=1))
    found = stage()
    assert content(found.data) == {"a": body, "b": body[::-1]}


@pytest.mark.parametrize("size", [100_000, 9 << 20])
@pytest.mark.parametrize("proof", ["md5", "crc32", "manifest", "nothing"])
def test_a_holed_body_is_never_taken(stage, put, s3_server, s3_proxy, bucket, prefix, local, size, proof):
    body = os.urandom(size)
    if proof == "manifest":
        entry = FileEntry(path="a", size=size, blake3=digest.of_bytes(body))
        put({"manifest.json": DatasetManifest(source="x", files=(entry,)).to_json().encode()})
    key = f"{prefix}/a"
    if proof in ("manifest", "nothing"):
        _put_in_parts(s3_server, bucket, key, body)
    else:
        checked = "when_supported" if proof == "crc32" else "when_required"
        _client(s3_server, checked).put_object(Bucket=bucket, Key=key, Body=body)
    at, count = (50_000, 8192) if proof == "nothing" else (size - 5, 3)
    s3_proxy.plan(Fault("zeros", "GET", path=f"/{prefix}/a", at=at % (4 << 20), count=count))
    assert content(stage().data)["a"] == body
    if proof == "nothing":
        return
    shutil.rmtree(local)
    s3_proxy.plan(Fault("zeros", "GET", path=f"/{prefix}/a", at=at % (4 << 20), count=count, times=-1))
    with pytest.raises(ValueError, match="'a' came twice with other bytes than its source promises; put it there anew"):
        stage()


def _client(server, checked="when_supported"):
    import boto3
    from botocore.config import Config

    key, secret = server.keys["admin"]
    config = Config(s3={"addressing_style": "path"}, request_checksum_calculation=checked)
    return boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name=server.region,
        config=config,
    )


def _put_in_parts(server, bucket, key, body):
    client = _client(server, "when_required")
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    parts = []
    for number, begin in enumerate(range(0, len(body), 5 << 20), 1):
        part = client.upload_part(
            Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=body[begin : begin + (5 << 20)]
        )
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    client.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
    client.close()


def test_some_that_fail_are_named_and_only_they_are_fetched_afterwards(stage, put, s3_proxy, prefix, local):
    """Case BC-117: all or nothing; the failures are listed; a retry fetches only these."""
    put(SMALL)
    s3_proxy.plan(
        Fault("denied", path=f"/{prefix}/d/11", times=-1),
        Fault("internal", path=f"/{prefix}/d/15", times=-1),
        Fault("slow_down", path=f"/{prefix}/d/07", times=-1),
    )
    with pytest.raises(ValueError, match="no right to read") as error:
        stage()
    assert re.findall(r"/d/(\d\d):", str(error.value)) == ["07", "11", "15"]
    assert not list((local / "datasets").glob("[0-9a-f]*"))
    s3_proxy.clear()
    found = stage()
    assert (found.fetched, content(found.data)) == (3, SMALL)
    assert {one.target.rsplit("/", 1)[1] for one in gets(s3_proxy, prefix)} == {"07", "11", "15"}


def test_what_may_pass_is_said_to_pass(stage, put, s3_proxy, prefix):
    put(SMALL)
    s3_proxy.plan(Fault("slow_down", path=f"/{prefix}/d/07", times=-1))
    with pytest.raises(StoreUnavailable, match=r"/d/07: .* SlowDown, after 4 attempts"):
        stage()


def test_a_store_that_is_down_is_not_asked_for_every_file(stage, put, s3_proxy, prefix):
    put(SMALL)
    s3_proxy.plan(Fault("slow_down", path=f"/{prefix}/d/", times=-1))
    with pytest.raises(StoreUnavailable, match=r"(SlowDown, after 4 attempts.*){4}"):
        stage()
    assert len(gets(s3_proxy, prefix)) < 4 * 12


def test_an_object_that_changes_once_while_it_is_copied_is_fetched_as_it_is_then(stage, put, s3_proxy, prefix):
    """Case BC-121: the retry starts with fresh metadata."""
    old, new = os.urandom(9 << 20), os.urandom(5 << 20)
    put({"a": old, "b": b"1"})
    s3_proxy.plan(Fault("call", "GET", path=f"/{prefix}/a", skip=1, hook=lambda: put({"a": new})))
    assert content(stage().data) == {"a": new, "b": b"1"}
    assert content(stage().data) == {"a": new, "b": b"1"}


def test_an_object_that_keeps_changing_is_refused_by_name(stage, put, s3_proxy, prefix, local):
    put({"a": os.urandom(5000), "b": b"1"})
    change = lambda: put({"a": os.urandom(5000)})  # noqa: E731
    s3_proxy.plan(Fault("call", "GET", path=f"/{prefix}/a", hook=change, times=-1))
    with pytest.raises(ValueError, match="'a' changed while it was being copied; start again when nothing writes"):
        stage()
    assert not list((local / "datasets").glob("[0-9a-f]*"))
    s3_proxy.clear()
    assert stage().fetched == 1


@pytest.mark.parametrize("what", ["a new object", "another content", "one object fewer"])
def test_a_stale_listing_is_caught_by_the_second_one(stage, put, s3_proxy, s3_server, bucket, prefix, what):
    put({"a": b"1" * 100, "b": b"2" * 100})
    store_listing = stage()
    shutil.rmtree(store_listing.data.parent.parent)
    if what == "one object fewer":
        s3_server.client().delete_object(Bucket=bucket, Key=f"{prefix}/b")
        wanted = {"a": b"1" * 100}
    else:
        changes = {"c": b"3"} if what == "a new object" else {"a": b"3" * 100}
        put(changes)
        wanted = {"a": b"1" * 100, "b": b"2" * 100} | changes
    s3_proxy.plan(Fault("stale", "GET", path=r"list-type=2"))
    if what == "one object fewer":
        with pytest.raises(ValueError, match="'b' is listed, but it is not there"):
            stage()
    assert content(stage().data) == wanted


def test_a_source_that_grows_for_ever_is_refused(stage, put, s3_proxy, prefix):
    put({"a": b"1"})
    numbers = iter(range(100))
    s3_proxy.plan(Fault("call", "GET", path=r"list-type=2", hook=lambda: put({f"n{next(numbers)}": b"1"}), times=-1))
    with pytest.raises(ValueError, match="was another data set after each of 3 copies; start again when"):
        stage()


def test_an_object_that_only_the_manifest_names_is_looked_for(stage, put, s3_proxy, s3_server, bucket, prefix, local):
    """A listing that lacks an object for good, as an eventually consistent store gives it."""
    put({"a": b"1"})
    stage()
    shutil.rmtree(local)
    files = tuple(
        FileEntry(path=name, size=1, blake3=digest.of_bytes(body)) for name, body in (("a", b"1"), ("b", b"2"))
    )
    s3_proxy.listings.clear()
    put({"manifest.json": DatasetManifest(source="x", files=files).to_json().encode()})
    stage_error = pytest.raises(ValueError, match=r"'b' is named in manifest\.json but is not there; put it back")
    with stage_error:
        stage()
    s3_proxy.plan(Fault("stale", "GET", path=r"list-type=2", times=-1))
    put({"b": b"2"})
    found = stage()
    assert sorted(content(found.data)) == ["a", "b", "manifest.json"]
    put({"b": b"22"})
    s3_proxy.clear()
    with pytest.raises(ValueError, match=r"'b' has 2 bytes and manifest\.json beside it says 1; put the file or"):
        stage()


BAD = {
    "nothing there": ({}, "holds no objects; put the data there"),
    "a name that leaves": ({"../x": b"1"}, "is a name that cannot be staged"),
    "backslash": ({"a\\b": b"1"}, "is a name that cannot be staged"),
    "an object and a folder": ({"a": b"1", "a/b/c": b"1"}, "'a' is an object and has others below it"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_source_that_the_user_must_mend_is_a_sentence(stage, s3_proxy, monkeypatch, case, bucket, prefix):
    objects, words = BAD[case]
    stats = [
        s3.ObjectStat(key=f"{prefix}/{name}", size=len(body), modified=0, etag="x") for name, body in objects.items()
    ]
    monkeypatch.setattr(s3.Bucket, "list", lambda self, asked: iter(stats))
    with pytest.raises(ValueError, match=rf"data\.source: .*{re.escape(words)}"):
        stage()


def test_a_missing_bucket_and_no_credentials_are_sentences(stage, s3_server, local):
    with pytest.raises(ValueError, match="s3://no-such-bucket: there is no such bucket"):
        stage("s3://no-such-bucket/data")
    key, secret = s3_server.keys["stranger"]
    stranger = s3.access(S3Settings(), keys=s3.Keys(key, SecretStr(secret)), env=s3_server.env())
    with pytest.raises(ValueError, match="gives these credentials no right to list"):
        stage("s3://no-such-bucket/x", access=stranger)
    assert not list(local.rglob("*.json"))


POINTS = ["stage.listed", "stage.part", "stage.recorded", "stage.whole", "stage.renamed", "stage.before_commit",
          "stage.committed", "stage.named"]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("point", POINTS)
def test_a_stager_killed_at_any_step_goes_on(put, s3_server, bucket, prefix, local, tmp_path, point):
    wanted = {"big": os.urandom((9 << 20) + 5)} | {name: SMALL[name] for name in list(SMALL)[:4]}
    put(wanted)
    hit = {"stage.part": 4, "stage.recorded": 3, "stage.whole": 2, "stage.renamed": 2}.get(point, 1)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"point": point, "hit": hit}]))
    env = dict(os.environ) | s3_server.env()
    command = [sys.executable, "-c", CODE, f"s3://{bucket}/{prefix}", str(local)]
    killed = subprocess.run(
        command, env=env | {"EVERSTEP_FAULTS": str(plan)}, capture_output=True, timeout=60, check=False
    )
    assert killed.returncode == -9, killed.stderr
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (local / "datasets").glob("[0-9a-f]*")
    assert content(folder / "data") == wanted
    assert sorted(path.name for path in folder.iterdir()) == ["data", "manifest.json"]
    fetched = int(done.stdout.split()[0])
    least = {"stage.listed": 5, "stage.part": 5, "stage.recorded": 5, "stage.whole": 4, "stage.renamed": 4}
    assert fetched <= least.get(point, 0)
    assert not list((local / "datasets").glob(".partial-*"))


def test_leftovers_of_killed_stagers_do_not_grow(put, s3_server, bucket, prefix, local, tmp_path):
    """Case BC-126: killed three times on one machine, and no start trips over what the others left."""
    put({f"{number:03}.txt": f"{number}\n".encode() * 500 for number in range(150)})
    left = []
    env = dict(os.environ) | s3_server.env()
    command = [sys.executable, "-c", CODE, f"s3://{bucket}/{prefix}", str(local)]
    for hit in (2, 5, 8):
        plan = tmp_path / f"plan-{hit}.json"  # its own: who outlives the killed one for a moment fires no other's
        plan.write_text(json.dumps([{"point": "stage.whole", "hit": hit}]))
        faulty = env | {"EVERSTEP_FAULTS": str(plan)}
        killed = subprocess.run(command, env=faulty, capture_output=True, timeout=60, check=False)
        assert killed.returncode == -9, killed.stderr
        left.append({path.name for path in (local / "datasets").rglob("*") if "data" not in path.parts})
    assert [len([name for name in names if len(name) == 16]) <= 8 for names in left] == [True] * 3
    assert subprocess.run(command, env=env, capture_output=True, timeout=60, check=False).returncode == 0
    kinds = sorted(path.suffix or path.name[:7] for path in (local / "datasets").iterdir() if path.name[0] == ".")
    assert kinds == [".lock", ".lock", ".use"]


def test_a_large_file_is_resumed_where_its_proven_bytes_end(stage, put, s3_proxy, prefix, local, monkeypatch):
    monkeypatch.setattr(fetching, "PART", 1 << 20)
    monkeypatch.setattr(arrival, "STRETCH", 2 << 20)
    body = os.urandom((9 << 20) + 5)
    put({"big": body})
    s3_proxy.plan(Fault("internal", "GET", path=f"/{prefix}/big", skip=7, times=-1))
    with pytest.raises(StoreUnavailable):
        stage()
    (part,) = (local / "datasets").glob(".partial-*/parts/*")
    size = part.stat().st_size
    assert size >= 4 << 20
    s3_proxy.clear()
    spoiled = part.read_bytes()
    part.write_bytes(spoiled[:3_000_000] + b"!" + spoiled[3_000_001:])  # in the second stretch of 2 MB
    assert content(stage().data) == {"big": body}
    starts = sorted(int(re.search(r"bytes=(\d+)-", one.headers["Range"])[1]) for one in gets(s3_proxy, prefix))
    assert starts[0] == 2 << 20


def test_leftovers_do_not_come_along(stage, put, local):
    put(SMALL)
    found = stage()
    home = found.data.parent
    partial = home.with_name(f".partial-s3-{'0' * 16}")
    del found
    partial.mkdir()
    (partial / "x").write_text("of another source")
    mine = next((local / "datasets").glob(".s3-*.lock")).name[1:].removesuffix(".lock")
    home.rename(home.with_name(f".partial-{mine}"))
    (home.with_name(f".partial-{mine}") / "data" / "stray").write_text("left")
    (home.with_name(f".partial-{mine}") / "data" / "d/00").write_text("torn")
    again = stage()
    assert content(again.data) == SMALL
    os.utime(partial, (0, 0))
    stage()
    assert not partial.exists()


def test_stagers_at_once_fetch_once(stage, put):
    put(SMALL)
    found = []
    threads = [threading.Thread(target=lambda: found.append(stage())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.fetched for one in found) == [0, 0, 20]


def test_too_little_space_is_said_before_the_first_byte(stage, put, s3_proxy, prefix, monkeypatch):
    put(SMALL)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(StoreUnavailable, match=r"has 1\.\d kB free and the data needs 60\.0 kB; free some space"):
        stage()
    assert gets(s3_proxy, prefix) == []


def test_a_disk_that_fills_meanwhile_is_a_sentence(put, s3_server, bucket, prefix, local):
    put({"big": os.urandom(9 << 20)})
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))\n"
    env = dict(os.environ) | s3_server.env()
    command = [sys.executable, "-c", limit + CODE, f"s3://{bucket}/{prefix}", str(local)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "StoreUnavailable: The data cannot be staged now" in done.stderr
    command[2] = CODE
    assert (
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout.split()[0]
        == "1"
    )


def test_an_interrupt_leaves_quickly(stage, put, s3_proxy, prefix):
    put(SMALL)
    s3_proxy.plan(Fault("stall", "GET", path=f"/{prefix}/d/03", times=-1))

    def interrupt(done, total):
        if s3_proxy.seen("GET", f"/{prefix}/d/03"):
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stage(progress=interrupt)
    assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("everstep-fetch")]


def test_the_budget_evicts_the_least_recently_used_and_never_one_in_use(stage, put, s3_server, bucket, prefix, local):
    """Case BC-128: one accounting over all runs; the data of a living run is pinned."""

    def source(name, size):
        s3_server.put(bucket, {f"{prefix}-{name}/x": os.urandom(size)})
        return f"s3://{bucket}/{prefix}-{name}"

    a, b, c = source("a", 15_000), source("b", 4_000), source("c", 15_000)
    running = stage(a, budget_gb=20e-6)
    stage(b, budget_gb=20e-6)
    with pytest.raises(
        StoreUnavailable, match=r"15.0 kB of data do not fit into 20.0 kB beside the 15.0 kB that living runs"
    ):
        stage(c, budget_gb=20e-6)
    assert len(content(running.data)) == 1
    where = running.data
    running.hold.close()
    found = stage(c, budget_gb=20e-6)
    assert not where.exists()
    assert len(content(found.data)) == 1
    with pytest.raises(
        ValueError, match=r"tiers\.budget_gb: the data has 15\.0 kB and the budget is 10\.0 kB; raise it"
    ):
        stage(a, budget_gb=10e-6)
    assert not list((local / "datasets").glob(".evicted-*"))


def test_a_half_done_data_set_goes_before_a_whole_one(stage, put, s3_server, bucket, prefix, local):
    s3_server.put(bucket, {f"{prefix}-a/x": os.urandom(15_000)})
    stage(f"s3://{bucket}/{prefix}-a", budget_gb=20e-6).hold.close()
    half = local / "datasets" / ".partial-s3-dead"
    half.mkdir()
    (half / "x").write_bytes(bytes(4000))
    put({"b": os.urandom(4_000)})
    stage(budget_gb=20e-6)
    assert not half.exists()
    assert len(list((local / "datasets").glob("[0-9a-f]*"))) == 2


def test_no_secret_is_left_behind(stage, put, s3_server, local):
    put(SMALL)
    stage()
    for path in local.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(secret.encode() in data for _, secret in s3_server.keys.values())


def test_an_encrypted_object_whose_etag_is_no_md5_is_taken(stage, put, monkeypatch):
    put({"a": os.urandom(5000)})
    describe = s3.Bucket.describe
    monkeypatch.setattr(
        s3.Bucket,
        "describe",
        lambda self, key: dict(describe(self, key)) | {"x-amz-server-side-encryption": "aws:kms"},
    )
    monkeypatch.setattr(arrival.Arriving, "take", _with_another_md5(arrival.Arriving.take))
    assert stage().fetched == 1


def _with_another_md5(take):
    def other(self, view, crc32):
        take(self, view, "")
        if self._md5 is not None:
            self._md5.update(b"another")

    return other
