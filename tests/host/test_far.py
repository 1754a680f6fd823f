"""What a flow run asks of the object tier when it begins."""

import shutil
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric
from rigs.proxy import Fault

from everstep.core.checkpoint import AttemptClaim, Key, State
from everstep.core.dataset import DatasetManifest, FileEntry
from everstep.core.errors import Fenced, NoValidCheckpoint, StoreUnavailable
from everstep.core.job import TrainJob
from everstep.host import resume, runs
from everstep.host.far import Far, elsewhere
from everstep.store import checkpoint, marks, object_tier
from everstep.store.s3_access import Access, Keys

DATA = DatasetManifest(source="d", files=(FileEntry(path="a", size=1, blake3="0" * 64),))


@pytest.fixture
def told():
    return []


@pytest.fixture
def far(tmp_path, told):
    places = fabric.places(tmp_path, with_object=True)
    return Far(places, None, lambda kind, **data: told.append((kind, data)))


def put(far, step, attempt=1):
    key = Key(step, attempt)
    made = fabric.checkpoint(far._places.persistent / "made" / key.folder)
    object_tier.open_run(far._places.object).upload(made, lambda: None)
    shutil.rmtree(made)
    return key


def choose(far, hinted=None, **how):
    structure = far._places.structure
    structure.write_text(fabric.structure().to_json())
    resumed = {number: claim.resumed_from for number, claim in runs.claims(far._places).items()}
    return resume.choose(far._places, resumed, far._record, hinted, trust_marks=False, bring=far.bring, **how)


def job(tmp_path, machine, **more):
    tiers = {"local": str(tmp_path / machine / "n"), "persistent": str(tmp_path / machine / "p")}
    return TrainJob(
        name="job", program="p:b", data={"source": "d"}, steps=1, tiers=tiers | {"object": str(tmp_path / "o")}, **more
    )


def own(job):
    with runs.own(job, DATA, "", "", elsewhere=elsewhere(job, None)) as run:
        return run


def test_a_run_is_found_there_and_a_fresh_one_takes_no_name_that_is_taken(tmp_path):
    first = own(job(tmp_path, "a"))
    tier = object_tier.open_run(first.places.object)
    tier.write("run.json", first.places.run_record.read_bytes())
    tier.claim(AttemptClaim(attempt=3, resumed_from=40, host="h", pid=1, boot="b", time=1.0))
    tier.write("history/metrics.jsonl", b"{}\n")
    found = own(job(tmp_path, "b"))
    assert (found.record, found.created, found.adopted) == (first.record, False, True)
    assert list(runs.claims(found.places)) == [3]
    assert found.places.metrics.read_bytes() == b"{}\n"
    assert not own(job(tmp_path, "b")).adopted
    fresh = own(job(tmp_path, "c", fresh=True))
    assert (fresh.created, fresh.record.run[:4]) == (True, "r002")


def test_the_newest_is_brought_near_and_proven(far, told):
    put(far, 10)
    key = put(far, 20)
    assert far.look()
    start = choose(far)
    assert (start.step, start.tier, start.folder) == (20, "object", far._places.checkpoint("local", key))
    assert State.verified in marks.states(far._places)[key.folder, "local"]
    assert [kind for kind, _ in told] == ["checkpoint.fetched"]


def test_a_damaged_copy_near_by_stays_as_evidence_and_the_far_one_serves(far):
    key = put(far, 20)
    bad = fabric.checkpoint(far._places.checkpoint("local", key))
    (bad / "rank-0.json").write_text("{")
    far.look()
    start = choose(far)
    assert start.folder == far._places.local / "restored" / key.folder
    assert checkpoint.verify(start.folder, fabric.structure()).ok
    assert (bad / "rank-0.json").read_text() == "{"


def test_abandoned_ones_stay_abandoned(far):
    put(far, 30)
    put(far, 10)
    tier = object_tier.open_run(far._places.object)
    tier.claim(AttemptClaim(attempt=2, resumed_from=10, host="h", pid=1, boot="b", time=1.0))
    far.look()
    assert choose(far).step == 10


def test_what_mlflow_names_elsewhere_is_used_and_what_is_lost_is_no_silent_beginning(far, told, tmp_path):
    key = put(far, 20)
    shutil.move(tmp_path / "object", tmp_path / "moved")
    uri = (tmp_path / "moved" / fabric.JOB / fabric.RUN / "checkpoints" / key.folder).as_uri()
    far.look()
    assert choose(far, resume.Hinted(uri)).step == 20
    shutil.rmtree(far._places.checkpoints("local"))
    with pytest.raises(NoValidCheckpoint):
        choose(far, resume.Hinted(uri.replace("moved", "lost")))
    assert told[-1] == (
        "checkpoint.unreadable",
        {"checkpoint": key.folder, "tier": "mlflow", "text": told[-1][1]["text"]},
    )
    assert "no longer" in told[-1][1]["text"]


def test_a_tier_that_did_not_answer_is_no_reason_to_begin_anew(far):
    with pytest.raises(StoreUnavailable, match="does not begin anew"):
        choose(far, told_all=False)
    assert choose(far).step == 0


def test_an_attempt_that_somebody_else_has_is_fenced(far):
    mine = AttemptClaim(attempt=1, resumed_from=0, host="me", pid=1, boot="b", time=1.0)
    far.claim(mine)
    far.claim(mine)
    with pytest.raises(Fenced):
        far.claim(mine.model_copy(update={"pid": 2}))


def test_a_store_that_ignores_conditions_is_said(far, told, s3_server, s3_proxy):
    s3_proxy.ignored, s3_proxy.sign = "if-none-match", s3_server.sign
    keys = Keys(s3_server.access_key, SecretStr(s3_server.secret_key))
    access = Access(s3_proxy.endpoint, s3_server.region, "path", None, keys)
    places = runs.RunPlaces(far._places.persistent, far._places.local, f"s3://{s3_server.bucket()}/runs/job/run")
    mine = AttemptClaim(attempt=1, resumed_from=0, host="me", pid=1, boot="b", time=1.0)
    unguarded = Far(places, access, far._record)
    unguarded.claim(mine)
    (said,) = told
    assert said[0] == "object.unguarded"
    assert "cannot keep two machines from owning this run" in said[1]["text"]
    with pytest.raises(Fenced):
        unguarded.claim(mine.model_copy(update={"pid": 2}))


def test_a_store_that_is_away_or_silent_is_said_and_holds_nothing_up(far, told, s3_server, s3_proxy, monkeypatch):
    from everstep.host import far as module

    monkeypatch.setattr(module, "CLAIM_SECONDS", 1.0)
    monkeypatch.setattr(module, "LOOK_SECONDS", 1.0)
    keys = Keys(s3_server.access_key, SecretStr(s3_server.secret_key))
    access = Access(s3_proxy.endpoint, s3_server.region, "path", None, keys)
    places = runs.RunPlaces(far._places.persistent, far._places.local, "s3://bucket/runs/job/run")
    away = Far(places, access, far._record)
    s3_proxy.plan(Fault("internal", times=-1))
    assert away.look() is False
    s3_proxy.plan(Fault("stall", times=-1))
    away.claim(AttemptClaim(attempt=1, resumed_from=0, host="me", pid=1, boot="b", time=1.0))
    assert [kind for kind, _ in told] == ["object.away", "object.unclaimed"]
