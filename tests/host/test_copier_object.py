"""The copier to the object tier: what it brings there and in which order, what it removes, and when it leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric
from pydantic import SecretStr
from rigs.proxy import Fault

from everstep.core.checkpoint import AttemptClaim, Key, RunRecord, State, Verification
from everstep.core.errors import Fenced
from everstep.core.job import CheckpointPolicy
from everstep.host import runs
from everstep.host.backlog import outbound
from everstep.host.copier import CopierSpec
from everstep.host.courier import carried
from everstep.host.uploader import Uploader
from everstep.store import checkpoint, jsonl, marks, object_tier
from everstep.store.s3_access import Access, Keys

PATIENCE = 40


@pytest.fixture
def places(tmp_path):
    found = fabric.places(tmp_path, with_object=True)
    found.structure.write_text(fabric.structure().to_json())
    record = RunRecord(
        name=fabric.JOB, run=fabric.RUN, fingerprint="f", dataset_fingerprint="d", created=1.0, program="p:b", seed=0,
        config={}, threads=1,
    )  # fmt: skip
    found.run_record.write_text(record.to_json())
    fabric.claim(found, 1)
    return found


def save(places, step, attempt=1, *, tier="local", verified=True, **how):
    key = Key(step, attempt)
    folder = fabric.checkpoint(places.checkpoint(tier, key), **how)
    if verified:
        digest = checkpoint.manifest_digest(folder)
        marks.verified(places, key.folder, tier, Verification(ok=True, manifest_digest=digest))
    return key


def spec(places, keep=3, parent=0, **more):
    return CopierSpec(
        name=fabric.JOB,
        run=fabric.RUN,
        run_dir=str(places.persistent),
        local_dir=str(places.local),
        object_uri=places.object,
        policy=CheckpointPolicy(keep=keep),
        parent_pid=parent,
        **more,
    )


@pytest.fixture
def uploader(places):
    return Uploader(spec(places), object_tier.open_run(places.object))


def finish(uploader):
    while uploader.turn(thorough=True):
        pass


def there(places):
    return object_tier.open_run(places.object).look().committed


def is_durable(places, key):
    return State.durable in marks.states(places).get((key.folder, "object"), set())


def test_the_newest_goes_first_and_only_what_is_kept_goes_at_all(places, uploader):
    keys = [save(places, step) for step in (10, 20, 30, 40, 50)]
    assert outbound(places, {1: 0}, CheckpointPolicy(keep=3)) == [keys[4], keys[3], keys[2]]
    assert uploader.turn()
    assert there(places) == [keys[4]]
    finish(uploader)
    assert there(places) == keys[2:]
    assert all(is_durable(places, key) for key in keys[2:])
    assert marks.copying(places) == set()


def test_what_nobody_has_verified_waits_until_nothing_more_comes(places, uploader):
    key = save(places, 10, verified=False)
    assert not uploader.turn()
    finish(uploader)
    assert there(places) == [key]
    assert State.verified in marks.states(places)[key.folder, "local"]


def test_what_was_asked_for_goes_too_and_stays(places, uploader):
    old = save(places, 10)
    for step in (20, 30, 40):
        save(places, step)
    marks.promote(places, [old, Key(99, 1)])
    finish(uploader)
    for step in (50, 60, 70):
        save(places, step)
    finish(uploader)
    assert there(places) == [old, Key(50, 1), Key(60, 1), Key(70, 1)]


def test_one_that_only_the_persistent_tier_has_goes_from_there(places, uploader):
    key = save(places, 10, tier="persistent")
    finish(uploader)
    assert there(places) == [key]


def test_a_machine_needs_nothing_else_to_know_the_run(places, uploader):
    (places.persistent / "metrics.jsonl").write_text('{"step": 1}\n')
    fabric.claim(places, 2, resumed_from=10)
    finish(uploader)
    sizes = object_tier.open_run(places.object).look().sizes
    assert set(sizes) == {
        "run.json",
        "structure.json",
        "attempts/000001.json",
        "attempts/000002.json",
        "history/metrics.jsonl",
    }


def test_abandoned_ones_do_not_go(places, uploader):
    for step in (10, 20, 30):
        save(places, step)
    fabric.claim(places, 2, resumed_from=10)
    finish(uploader)
    assert there(places) == [Key(10, 1)]


def test_torn_leftovers_of_older_attempts_go_and_a_foreign_object_stays(places, uploader):
    store, _ = object_tier.connect(places.object)
    for path in ("checkpoints/step-00000020.a1/rank-0.json", "checkpoints/mine/precious", "notes.txt"):
        store.put(path, b"x")
    fabric.claim(places, 2)
    finish(uploader)
    assert {stat.key for stat in store.list("checkpoints")} == {"checkpoints/mine/precious"}
    assert store.head("notes.txt")


def test_a_newer_attempt_of_another_machine_ends_its_work_and_asks_the_flow_to_leave(places, uploader):
    save(places, 10)
    other = AttemptClaim(attempt=2, resumed_from=0, host="there", pid=1, boot="b", time=1.0)
    finish(uploader)
    object_tier.open_run(places.object).claim(other)
    save(places, 20)
    with pytest.raises(Fenced, match="Attempt 2"):
        finish(uploader)
    assert runs.takeover_wish(places).exists()
    assert there(places) == [Key(10, 1)]
    assert uploader.turn(thorough=True) is False


def test_what_vanished_there_is_brought_again_by_the_next(places, uploader):
    key = save(places, 10)
    finish(uploader)
    object_tier.open_run(places.object).remove(key)
    again = Uploader(spec(places), object_tier.open_run(places.object))
    finish(again)
    assert there(places) == [key]


def test_keys_of_the_environment_travel_on_standard_input_and_in_nothing_else(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/etc/ca.pem")
    packed, names = carried(Access("http://here", "r", "path"))
    assert packed["keys"]["secret"] == "very-secret"
    assert (names["AWS_CA_BUNDLE"], [name for name in names if "SECRET_ACCESS" in name]) == ("/etc/ca.pem", [])
    assert "very-secret" not in repr(
        CopierSpec(name="a", run="r", run_dir="", local_dir="", access=packed, parent_pid=0)
    )
    own = Access("http://here", "r", "path", keys=Keys("block", SecretStr("of a block")))
    assert carried(own)[0]["keys"]["secret"] == "of a block"
    assert carried(None) == (None, {})


@contextlib.contextmanager
def process(places, server, endpoint, plan, tmp_path, bucket):
    """The copier as a process, to S3; ended with the block."""
    keys = Keys(server.access_key, SecretStr(server.secret_key))
    access = Access(endpoint, server.region, "path", None, keys).to_dict()
    one = spec(places, parent=os.getpid(), access=access).model_copy(update={"object_uri": f"s3://{bucket}/x"})
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    environment = {**os.environ, "EVERSTEP_FAULTS": str(tmp_path / "plan.json")}
    command = [sys.executable, "-m", "everstep.host.copier"]
    child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        child.stdin.write(one.model_dump_json().encode() + b"\n")
        child.stdin.flush()
        yield child
    finally:
        child.kill()
        child.communicate()


def end(child):
    child.stdin.close()
    child.stdin = None
    return child.wait(PATIENCE)


def until(condition, seconds=PATIENCE):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.02)


def test_on_s3_it_is_killed_meets_faults_and_brings_it_there(places, s3_server, s3_proxy, tmp_path):
    """Its end by SIGKILL, SIGTERM in the middle of a stalled request, refusals, and keys that had run out meanwhile."""
    bucket = s3_server.bucket()
    key = save(places, 10)
    with process(places, s3_server, s3_proxy.endpoint, [{"point": "upload.mid_file"}], tmp_path, bucket) as child:
        assert child.wait(PATIENCE) == -signal.SIGKILL
    assert marks.copying(places) == {key}
    s3_proxy.plan(Fault("stall", "PUT", "safetensors"))
    with process(places, s3_server, s3_proxy.endpoint, [], tmp_path, bucket) as child:
        until(lambda: s3_proxy.seen("PUT", "safetensors") and s3_proxy.seen("PUT", "safetensors")[-1].fault == "stall")
        began = time.monotonic()
        child.terminate()
        assert child.wait(PATIENCE) == -signal.SIGTERM
        assert time.monotonic() - began < 5
    assert not is_durable(places, key)
    s3_proxy.clear()
    s3_proxy.plan(Fault("expired", times=2), Fault("slow_down", "PUT", "rank-0.json", times=2))
    with process(places, s3_server, s3_proxy.endpoint, [], tmp_path, bucket) as child:
        assert end(child) == 0
    assert is_durable(places, key)
    told = list(jsonl.read(places.persistent / "copier.jsonl"))
    assert any("run out" in row["text"] for row in told)
    assert s3_server.secret_key not in (places.persistent / "copier.jsonl").read_text()


def test_a_store_that_says_200_and_loses_bodies_is_found_out_and_sent_to_again(places, s3_server, s3_proxy, tmp_path):
    """Case BC-035: 50 files; the store says 200, drops two bodies and stores one truncated. Success is proved by reading."""
    bucket = s3_server.bucket()
    key = save(places, 10, ranks=48)
    folder = places.checkpoint("local", key)
    assert len(list(folder.iterdir())) - 1 >= 50
    client = s3_server.client()

    def keep(target, body):
        client.put_object(Bucket=bucket, Key=target.partition("?")[0].removeprefix(f"/{bucket}/"), Body=body)

    lost = ("rank-3.safetensors", "rank-17.json", "rank-30.safetensors")
    s3_proxy.plan(
        Fault("drop", "PUT", lost[0]), Fault("drop", "PUT", lost[1]), Fault("drop", "PUT", lost[2], at=40, keep=keep)
    )
    with process(places, s3_server, s3_proxy.endpoint, [], tmp_path, bucket) as child:
        assert end(child) == 0
    assert is_durable(places, key)
    for path in folder.iterdir():
        there = client.get_object(Bucket=bucket, Key=f"x/checkpoints/{key.folder}/{path.name}")["Body"].read()
        assert there == path.read_bytes(), path.name
    manifest = s3_proxy.seen("PUT", "manifest.json")
    assert len(manifest) == 1
    for name in lost:
        sent = s3_proxy.seen("PUT", name)
        assert len(sent) >= 2
        assert sent[-1].time < manifest[0].time, "only then the tier is complete"
    assert any(row["kind"] == "copier.error" for row in jsonl.read(places.persistent / "copier.jsonl"))
