"""One run on the object tier: in a directory, on a real S3 server, and behind a proxy that does harm."""

import json
import os
import subprocess
import sys

import fabric
import pytest
from pydantic import SecretStr
from rigs.proxy import Fault

from everstep.core.checkpoint import MANIFEST, AttemptClaim, Key
from everstep.core.errors import Damaged, Fenced, StoreUnavailable
from everstep.store import checkpoint, marks, mirror, object_tier
from everstep.store.objects import Exists, NotThere
from everstep.store.s3_access import Access, Keys

KEY = Key(40, 2)
FOLDER = KEY.folder
HOME = f"checkpoints/{FOLDER}"

UPLOAD = """
import json, sys
from pathlib import Path
from everstep.store import object_tier
from everstep.store.s3_access import Access

line = json.loads(sys.stdin.readline())
access = Access.from_dict(line["access"]) if line["access"] else None
tier = object_tier.open_run(line["uri"], access, seconds=10)
print(tier.upload(Path(line["source"]), lambda: None))
"""


@pytest.fixture(scope="session")
def shared_bucket(s3_server):
    return s3_server.bucket()


def access_to(server, endpoint=None):
    keys = Keys(server.access_key, SecretStr(server.secret_key))
    return Access(endpoint or server.endpoint, server.region, "path", None, keys)


@pytest.fixture
def on_s3(request, s3_server, shared_bucket, tmp_path):
    """`make(endpoint)` gives the same run on the S3 server, perhaps through a proxy."""
    uri = f"s3://{shared_bucket}/{tmp_path.name}/{request.node.name[:20].strip('_')}/{fabric.JOB}/{fabric.RUN}"

    def make(endpoint=None, seconds=10):
        return object_tier.open_run(uri.replace("[", "-"), access_to(s3_server, endpoint), seconds=seconds)

    return make


@pytest.fixture(params=["folder", "s3"])
def tier(request, tmp_path):
    if request.param == "folder":
        return object_tier.open_run(str(tmp_path / "object" / fabric.JOB / fabric.RUN))
    return request.getfixturevalue("on_s3")()


@pytest.fixture
def source(tmp_path):
    return fabric.checkpoint(tmp_path / "near" / FOLDER)


def fetched(tier, tmp_path, name="fetched"):
    target = tmp_path / name / FOLDER
    target.parent.mkdir(exist_ok=True)
    tier.fetch(KEY, target)
    return checkpoint.verify(target, fabric.structure(), run=fabric.RUN, job=fabric.JOB)


def test_there_and_back_and_a_second_time_nothing_moves(tier, source, tmp_path):
    assert tier.look().committed == []
    assert tier.upload(source, lambda: None) == checkpoint.read_manifest(source).bytes
    assert tier.look().committed == [KEY]
    assert tier.manifest(KEY) == (source / MANIFEST).read_bytes()
    assert tier.upload(source, lambda: None) == 0
    assert fetched(tier, tmp_path).ok
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == [FOLDER]


def test_large_files_go_in_parts(tier, tmp_path):
    source = fabric.checkpoint(tmp_path / "near" / FOLDER, scale=40_000)  # two files of 20 MB, in parts of 16
    tier.upload(source, lambda: None)
    target = tmp_path / FOLDER
    tier.fetch(KEY, target)
    assert checkpoint.verify(target, fabric.structure(40_000)).ok


def test_removal_uncommits_first(tier, source):
    tier.upload(source, lambda: None)
    assert tier.remove(KEY) > checkpoint.read_manifest(source).bytes
    assert tier.look().sizes == {}
    with pytest.raises(NotThere):
        tier.manifest(KEY)


def claim(attempt=1, resumed_from=0, pid=1):
    return AttemptClaim(attempt=attempt, resumed_from=resumed_from, host="here", pid=pid, boot="b", time=1.0)


def test_an_attempt_is_claimed_once(tier):
    assert tier.claim(claim())
    assert tier.claim(claim()), "our own claim, after a reply that was lost, is ours"
    assert not tier.claim(claim(pid=2))
    assert tier.is_guarded(claim())
    assert tier.claim(claim(2, 40))
    assert {number: json.loads(data)["resumed_from"] for number, data in tier.claims().items()} == {1: 0, 2: 40}


def test_a_store_that_ignores_conditions_is_known_as_such(on_s3, s3_server, s3_proxy):
    """Conditional PUT is what keeps two machines apart; without it a claim that stands is still not replaced."""
    s3_proxy.ignored, s3_proxy.sign = "if-none-match", s3_server.sign
    tier = on_s3(s3_proxy.endpoint)
    assert tier.claim(claim())
    assert not tier.is_guarded(claim())
    assert not tier.claim(claim(pid=2))
    assert tier.claim(claim()), "what it was asked in vain has changed nothing"
    assert json.loads(tier.claims()[1])["pid"] == 1
    s3_proxy.ignored = ""
    assert tier.is_guarded(claim())


def test_a_run_that_is_no_longer_ours_is_not_committed(tier, source):
    def fenced():
        raise Fenced("no longer")

    with pytest.raises(Fenced):
        tier.upload(source, fenced)
    assert tier.look().committed == []
    assert tier.look().torn == [KEY]


def test_a_damaged_source_is_never_committed(tier, source):
    path = source / "rank-0.json"
    path.write_bytes(path.read_bytes().replace(b'"epoch": 0', b'"epoch": 1'))
    with pytest.raises(Damaged, match=r"rank-0\.json"):
        tier.upload(source, lambda: None)
    assert tier.look().committed == []


def test_another_checkpoint_of_that_name_is_never_overwritten(tier, source, tmp_path):
    tier.upload(source, lambda: None)
    other = fabric.checkpoint(tmp_path / "other" / FOLDER, run="r002-ffffffff")
    with pytest.raises(Damaged, match="another checkpoint"):
        tier.upload(other, lambda: None)
    assert tier.manifest(KEY) == (source / MANIFEST).read_bytes()


def test_one_that_is_being_removed_has_gone_and_is_not_damaged(tier, source, tmp_path):
    """What is damaged there is refused by name in `test_mutations.py`."""
    tier.upload(source, lambda: None)
    tier.delete(f"{HOME}/{MANIFEST}")
    with pytest.raises(NotThere):
        fetched(tier, tmp_path)
    assert not (tmp_path / "fetched" / FOLDER).exists()


def test_an_object_too_many_holds_up_the_commit(tier, source, tmp_path):
    """It would be refused at every resume; whoever put it there must take it away."""
    tier.write(f"{HOME}/notes.txt", b"x")
    with pytest.raises(Damaged, match=r"notes\.txt is not part of the checkpoint"):
        tier.upload(source, lambda: None)
    assert tier.look().committed == []
    tier.delete(f"{HOME}/notes.txt")
    tier.upload(source, lambda: None)
    assert fetched(tier, tmp_path).ok


def test_a_listing_that_is_old_makes_no_damage(on_s3, s3_proxy, source, tmp_path):
    """It shows an object that has gone, and does not show those that came after it."""
    direct, tier = on_s3(), on_s3(s3_proxy.endpoint)
    direct.write(f"{HOME}/notes.txt", b"x")
    assert len(tier.look(HOME).sizes) == 1
    direct.delete(f"{HOME}/notes.txt")
    direct.upload(source, lambda: None)
    s3_proxy.plan(Fault("stale", "GET", "list-type", times=-1))
    assert fetched(tier, tmp_path).ok
    assert any(one.fault == "stale" for one in s3_proxy.requests)


POINTS = ["upload.begin", "upload.mid_file", "upload.verify", "upload.before_manifest", "upload.after_manifest"]


@pytest.mark.sampled
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("where", ["folder", "s3"])
def test_one_killed_anywhere_commits_nothing_half_and_the_next_goes_on(
    request, s3_server, source, tmp_path, point, where
):
    """artifact-transfer-incomplete, with SIGKILL at every step of an upload."""
    tier = request.getfixturevalue("on_s3")() if where == "s3" else object_tier.open_run(str(tmp_path / "object"))
    line = {"uri": tier.uri, "source": str(source), "access": access_to(s3_server).to_dict() if where == "s3" else None}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"point": point}]))
    killed = upload(line, {"EVERSTEP_FAULTS": str(plan)})
    assert killed.returncode == -9, killed.stderr
    assert tier.look().committed == ([KEY] if point == "upload.after_manifest" else [])
    again = upload(line, {})
    whole = checkpoint.read_manifest(source).bytes
    assert (int(again.stdout) == whole) == (point in ("upload.begin", "upload.mid_file")), again.stderr
    assert fetched(tier, tmp_path).ok


def upload(line, environment):
    command = [sys.executable, "-c", UPLOAD]
    env = {**os.environ, **environment}
    return subprocess.run(command, input=json.dumps(line), env=env, capture_output=True, text=True, check=False)


def test_unfinished_parts_are_given_up(on_s3, s3_server, shared_bucket):
    tier = on_s3()
    prefix = tier.uri.removeprefix(f"s3://{shared_bucket}/")
    client = s3_server.client()
    begun = client.create_multipart_upload(Bucket=shared_bucket, Key=f"{prefix}/{HOME}/x")
    client.upload_part(
        Bucket=shared_bucket, Key=f"{prefix}/{HOME}/x", UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * 100
    )
    assert tier.abort_uploads() == 1
    assert tier.abort_uploads() == 0


@pytest.mark.parametrize(
    "fault",
    [
        Fault("internal", "PUT", times=2),
        Fault("slow_down", "PUT", times=2),
        Fault("reset", "PUT", at=500),
        Fault("lose_reply", "PUT", MANIFEST),
        Fault("lose_reply", "PUT", "safetensors"),
        Fault("cut", "GET", "safetensors", at=100),
        Fault("short", "GET", "safetensors", at=100),
        Fault("zeros", "GET", "safetensors", at=100, count=64),
        Fault("changed", "GET", "safetensors"),
        Fault("stale", "GET", "list-type"),
    ],
    ids=lambda fault: f"{fault.do}-{fault.method}-{fault.path}",
)
def test_what_a_network_does_to_an_upload_ends_in_a_whole_checkpoint(on_s3, s3_proxy, source, tmp_path, fault):
    direct, tier = on_s3(), on_s3(s3_proxy.endpoint)
    tier.look()
    s3_proxy.plan(fault)
    for _ in range(3):
        try:
            tier.upload(source, lambda: None)
        except (StoreUnavailable, Damaged):
            assert direct.look().committed == []
            continue
        break
    assert fault.done
    assert fetched(direct, tmp_path).ok


@pytest.mark.parametrize(
    "fault",
    [
        Fault("internal", "GET", "safetensors", times=2),
        Fault("cut", "GET", "safetensors", at=100),
        Fault("short", "GET", "safetensors", at=100),
        Fault("reset", "GET", "safetensors"),
    ],
    ids=lambda fault: fault.do,
)
def test_what_a_network_does_to_a_resume_is_mended_by_asking_again(on_s3, s3_proxy, source, tmp_path, fault):
    on_s3().upload(source, lambda: None)
    s3_proxy.plan(fault)
    assert fetched(on_s3(s3_proxy.endpoint), tmp_path).ok
    assert fault.done


@pytest.mark.parametrize("do", ["zeros", "changed"])
def test_a_holed_or_changed_body_never_becomes_a_checkpoint(on_s3, s3_proxy, source, tmp_path, do):
    on_s3().upload(source, lambda: None)
    s3_proxy.plan(Fault(do, "GET", "rank-0-0", times=-1, at=200, count=64))
    with pytest.raises(Exception, match="rank-0-0"):
        fetched(on_s3(s3_proxy.endpoint, 2), tmp_path)
    assert not (tmp_path / "fetched" / FOLDER).exists()
    s3_proxy.clear()
    assert fetched(on_s3(s3_proxy.endpoint), tmp_path).ok


def test_keys_that_have_run_out_are_said_in_a_sentence_without_them(on_s3, s3_proxy, s3_server, source):
    s3_proxy.plan(Fault("expired", times=-1))
    with pytest.raises(ValueError, match="run out") as refused:
        on_s3(s3_proxy.endpoint).upload(source, lambda: None)
    assert s3_server.secret_key not in str(refused.value)


def test_connections_that_are_refused_are_tried_again_within_a_limit(on_s3, source):
    """BC-124: connect errors are retried within a total deadline, and then it is said who did not answer."""
    with pytest.raises(StoreUnavailable, match="does not answer"):
        on_s3("http://127.0.0.1:9", 1).upload(source, lambda: None)


def test_a_claim_whose_reply_was_lost_is_ours(on_s3, s3_proxy):
    s3_proxy.plan(Fault("lose_reply", "PUT", "attempts"))
    assert on_s3(s3_proxy.endpoint).claim(claim())
    assert not on_s3().claim(claim(pid=2))


def test_the_mirror_follows_what_is_there(tmp_path, source):
    """BC-010 and BC-013 for this tier: nothing is called durable that is not committed there."""
    places = fabric.places(tmp_path, with_object=True)
    tier = object_tier.open_run(places.object)
    tier.claim(claim(7, 30))
    mirror.refresh(places, tier)
    assert checkpoint.find(places.checkpoints("object")) == ([], [])
    assert places.claim(7).exists()
    tier.upload(source, lambda: None)
    other = fabric.checkpoint(tmp_path / "near" / Key(50, 2).folder)
    tier.upload(other, lambda: None)
    mirror.refresh(places, tier)
    assert {folder for folder, tier_ in marks.states(places) if tier_ == "object"} == {FOLDER, Key(50, 2).folder}
    (tmp_path / "object" / fabric.JOB / fabric.RUN / "checkpoints" / Key(50, 2).folder / "rank-0.json").unlink()
    tier.remove(KEY)
    mirror.refresh(places, tier)
    assert checkpoint.find(places.checkpoints("object"))[0] == [Key(50, 2)]
    assert "rank-0.json is missing" in marks.read(places)[-1].reason + "".join(one.reason for one in marks.read(places))


def test_a_folder_tells_what_is_there_only_to_those_who_may_create(tmp_path):
    store, _ = object_tier.connect(str(tmp_path / "object"))
    store.put("a/b", b"1", create=True)
    with pytest.raises(Exists):
        store.put("a/b", b"2", create=True)
    assert store.read("a/b", 0, 1) == b"1"
    store.delete("a/b")
    store.delete("a/b")
    assert store.head("a/b") is None
    assert not (tmp_path / "object" / "a").exists()


def test_a_checkpoint_on_s3_may_be_verified_by_its_uri(on_s3, s3_server, source, monkeypatch):
    import everstep

    tier = on_s3()
    tier.upload(source, lambda: None)
    tier.write("structure.json", fabric.structure().to_json().encode())
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    uri = f"{tier.uri}/{HOME}"
    assert everstep.verify_checkpoint(uri).ok
    assert "is not there" in everstep.verify_checkpoint(uri.replace("40.a2", "50.a2")).why
    with pytest.raises(ValueError, match="names no checkpoint"):
        everstep.verify_checkpoint("s3://bucket/elsewhere")
