"""A scrub on real folders and a real store: what is rotten is found, kept, and mended from another tier; what is well is
left alone, whatever else happens beside it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric
from pydantic import SecretStr
from rigs.proxy import Fault

from everstep.core.checkpoint import Key, State, Verification
from everstep.core.errors import Damaged, EverstepError, StoreUnavailable
from everstep.core.job import CheckpointPolicy
from everstep.core.scrub import Outcome, ScrubJob
from everstep.host import gentle, retention, scrubbing, stored
from everstep.host.gentle import Pace
from everstep.store import checkpoint, jsonl, marks, mirror, object_tier
from everstep.store.s3_access import Access, Keys

FAST = 1e6
FILE = "rank-0-1.safetensors"
ALL = ("local", "persistent", "object")


class Shop:
    """One run on three tiers, with checkpoints at steps 10, 20 and 30 that everybody has proven."""

    def __init__(self, tmp, *, uri=None, access=None, scale=1):
        self.places = fabric.places(tmp, with_object=True)
        if uri:
            self.places = type(self.places)(self.places.persistent, self.places.local, uri)
        self.access = access
        self.scale = scale
        self.processes = []
        places = self.places
        places.structure.write_text(fabric.structure(scale).to_json())
        places.run_record.write_text("{}")
        fabric.claim(places, 1)
        tiers = {"local": str(places.local), "persistent": str(places.persistent), "object": places.object}
        (places.persistent / "owner.json").write_text(json.dumps({"tiers": tiers}))
        self.tier.write("run.json", b"{}")
        self.keys = [self.save(step) for step in (10, 20, 30)]

    @property
    def tier(self):
        return object_tier.open_run(self.places.object, self.access, seconds=20)

    def save(self, step):
        places, key = self.places, Key(step, 1)
        folder = fabric.checkpoint(places.checkpoint("local", key), scale=self.scale)
        digest = checkpoint.manifest_digest(folder)
        shutil.copytree(folder, places.checkpoint("persistent", key))
        for tier in ("local", "persistent"):
            marks.verified(places, key.folder, tier, Verification(ok=True, manifest_digest=digest))
        marks.durable(places, key.folder, "persistent", digest)
        self.tier.upload(folder, lambda: None)
        mirror.note(places, key, (folder / "manifest.json").read_bytes(), proven=True)
        return key

    def scrub(self, **how):
        job = ScrubJob(where=str(self.places.persistent), mb_per_second=how.pop("mb_per_second", FAST), **how)
        scrubber = scrubbing.begin(job, self.access)
        return scrubbing.scrub_run(scrubber, scrubber.runs[0])

    def file(self, tier, key, name=FILE):
        if tier == "object":
            return Path(self.places.object) / "checkpoints" / key.folder / name
        return self.places.checkpoint(tier, key) / name

    def is_whole(self, tier, key):
        if tier == "object":
            there = self.tier.look(f"checkpoints/{key.folder}").files(key)
            if "manifest.json" not in there:
                return False
            target = self.places.persistent.parent / f"probe-{time.monotonic_ns()}" / key.folder
            target.parent.mkdir()
            try:
                self.tier.fetch(key, target)
            except Damaged:
                return False
            return checkpoint.verify(target, fabric.structure(self.scale), run=fabric.RUN, job=fabric.JOB).ok
        folder = self.places.checkpoint(tier, key)
        return checkpoint.verify(folder, fabric.structure(self.scale), run=fabric.RUN, job=fabric.JOB).ok

    def states(self, tier, key):
        return marks.states(self.places).get((key.folder, tier), set())

    def events(self, kind=""):
        return [row for row in jsonl.read(self.places.persistent / "scrub.jsonl") if row["kind"].startswith(kind)]

    def evidence(self, tier):
        home = Path(self.places.object, "aside") if tier == "object" else self.places.checkpoints(tier)
        return sorted(home.glob("*" if tier == "object" else ".rotten-*")) if home.is_dir() else []


@pytest.fixture
def shop(tmp_path):
    shop = Shop(tmp_path)
    yield shop
    for one in shop.processes:
        with one:  # where a test failed, it may still be there, or stopped
            one.kill()


def flip(path, at=-5):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


HARM = {
    "bit flip": (flip, FILE),
    "truncation": (cut, FILE),
    "missing file": (lambda path: path.unlink(), FILE),
    "missing manifest": (lambda path: path.unlink(), "manifest.json"),
    "altered manifest": (lambda path: flip(path, 30), "manifest.json"),
    "bit flip in the state": (lambda path: flip(path, 20), "rank-0.json"),
}


def test_what_is_well_is_read_whole_on_every_tier_and_left_alone(shop):
    before = {
        path: path.read_bytes() for path in shop.places.persistent.rglob("*") if path.parent.name.startswith("step")
    }
    found = shop.scrub()
    assert (len(found.lines), found.count(Outcome.sound), found.finished) == (9, 9, True)
    size = sum(entry.size for entry in checkpoint.read_manifest(shop.places.checkpoint("local", Key(10, 1))).files)
    assert found.bytes == pytest.approx(9 * size, rel=0.05)
    assert {path: path.read_bytes() for path in before} == before
    (finished,) = shop.events("scrub.finished")
    assert finished["data"] | {"seconds": 0} == {"bytes": found.bytes, "seconds": 0, **found.counts}
    assert [row["kind"] for row in shop.events()] == ["scrub.started", "scrub.finished"]


@pytest.mark.parametrize("tier", ALL)
@pytest.mark.parametrize("harm", HARM)
def test_rot_on_any_tier_is_set_aside_and_mended_from_another(shop, tier, harm):
    do, name = HARM[harm]
    bad, *others = shop.keys
    do(shop.file(tier, bad, name))
    harmed = shop.file(tier, bad, name).read_bytes() if shop.file(tier, bad, name).exists() else None
    found = shop.scrub()
    (line,) = [one for one in found.lines if one.outcome is not Outcome.sound]
    assert (line.outcome, line.checkpoint, line.tier) == (Outcome.repaired, bad.folder, tier)
    assert line.file == name
    assert line.repaired_from == {"local": "persistent"}.get(tier, "local")
    for where in ALL:
        assert shop.is_whole(where, bad), where
        assert State.verified in shop.states(where, bad)
        assert State.quarantined not in shop.states(where, bad)
    assert (State.durable in shop.states(tier, bad)) == (tier != "local")
    if harmed is not None:
        (kept,) = shop.evidence(tier)
        assert (kept / name).read_bytes() == harmed, "the rotten bytes are kept as they were"
        assert kept.name in line.evidence
    (rot,) = shop.events("scrub.rot")
    assert (rot["severity"], rot["step"], rot["data"]["tier"], rot["data"]["file"]) == ("high", 10, tier, name)
    (mended,) = shop.events("scrub.repaired")
    assert mended["data"]["source"] == line.repaired_from
    assert shop.scrub().counts["sound"] == 9
    assert all(shop.is_whole(tier, key) for key in others)


def test_a_checkpoint_that_a_tier_has_lost_whole_is_brought_back_where_it_is_kept(shop):
    lost = shop.keys[-1]
    shutil.rmtree(shop.places.checkpoint("persistent", lost))
    found = shop.scrub()
    assert found.counts["repaired"] == 1
    assert shop.is_whole("persistent", lost)


def test_marks_that_outlived_a_removal_are_no_loss(shop):
    shop.save(40), shop.save(50)
    old = shop.keys[0]
    shutil.rmtree(shop.places.checkpoint("persistent", old))  # as a removal that was killed before it forgot
    found = shop.scrub()
    assert found.counts["sound"] == len(found.lines)
    assert not shop.places.checkpoint("persistent", old).exists()


def test_an_empty_local_tier_is_no_loss(shop):
    shutil.rmtree(shop.places.local)
    assert shop.scrub().counts["sound"] == 6


def test_rot_that_nothing_can_mend_is_kept_in_its_place_and_said_once(shop, capsys):
    bad = shop.keys[0]
    shutil.rmtree(shop.places.local)
    shutil.rmtree(Path(shop.places.object))
    shop.tier.write("run.json", b"{}")
    for key in shop.keys:
        mirror.forget(shop.places, key)
    flip(shop.file("persistent", bad))
    data = shop.file("persistent", bad).read_bytes()
    job = ScrubJob(where=str(shop.places.persistent), mb_per_second=FAST)
    scrubber = scrubbing.begin(job)
    scrubbing.scrub_run(scrubber, scrubber.runs[0])
    final = scrubbing.finish(scrubber)
    assert (final["status"], final["rotten"], final["found"][0]["file"]) == ("failed", 1, FILE)
    with pytest.raises(EverstepError, match=r"step-00000010\.a1 of job/r001-0123abcd is rotten on the persistent tier"):
        scrubbing.refuse(scrubber)
    assert shop.file("persistent", bad).read_bytes() == data
    assert shop.states("persistent", bad) == {State.quarantined, State.verified, State.durable}
    assert FILE in marks.reason(shop.places, bad.folder, "persistent", State.quarantined)
    assert shop.scrub().counts["aside"] == 1, "what is known and kept is no news the next day"
    shutil.copytree(shop.places.checkpoint("persistent", shop.keys[1]), shop.places.checkpoint("local", Key(20, 1)))
    assert len(shop.events("scrub.rot")) == 1


def test_a_copy_that_is_rotten_itself_mends_nothing(shop):
    bad = shop.keys[0]
    flip(shop.file("persistent", bad))
    flip(shop.file("local", bad))
    found = shop.scrub()
    assert found.counts["repaired"] == 2
    assert {line.repaired_from for line in found.lines if line.outcome is Outcome.repaired} == {"object", "local"}
    assert all(shop.is_whole(tier, bad) for tier in ALL)


def test_another_checkpoint_of_the_same_name_never_takes_its_place(shop):
    bad = shop.keys[0]
    flip(shop.file("persistent", bad))
    for tier in ("local", "object"):
        shutil.rmtree(shop.file(tier, bad).parent)
    fabric.checkpoint(shop.places.checkpoint("local", bad), tensors=fabric.weights(7), scale=1)
    digest = checkpoint.manifest_digest(shop.places.checkpoint("local", bad))
    marks.verified(shop.places, bad.folder, "local", Verification(ok=True, manifest_digest=digest))
    found = shop.scrub()
    assert [
        (one.tier, one.outcome) for one in found.lines if one.checkpoint == bad.folder and one.tier == "persistent"
    ] == [("persistent", Outcome.rotten)]
    assert not shop.is_whole("persistent", bad)


def test_one_that_is_set_aside_for_another_reason_stays_so(shop):
    """A probe that did not match: the bytes are right, and the checkpoint is not to be chosen all the same."""
    key = shop.keys[0]
    for tier in ALL:
        marks.quarantine(shop.places, key.folder, tier, "the probe loss differs")
    found = shop.scrub()
    assert found.counts["aside"] == 3
    assert all(State.quarantined in shop.states(tier, key) for tier in ALL)


def test_one_that_a_save_has_spoilt_is_mended_too(shop):
    """Whoever finds damage sets it aside; the scrub mends it where another tier has it whole."""
    key = shop.keys[0]
    flip(shop.file("local", key))
    marks.quarantine(shop.places, key.folder, "local", "does not match its digest")
    assert shop.scrub().counts["repaired"] == 1
    assert shop.is_whole("local", key)


def test_the_one_proven_longest_ago_comes_first_and_a_short_scrub_is_gone_on_with(shop, monkeypatch):
    places = shop.places
    for number, (key, tier) in enumerate([(shop.keys[1], "persistent"), (shop.keys[2], "local")]):
        path = places.mark(key.folder, tier, "verified")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"time": 5.0 + number}))
        durable = places.mark(key.folder, tier, "durable")
        if durable.exists():
            durable.write_text(json.dumps(json.loads(durable.read_text()) | {"time": 5.0}))
    looks = iter([False, False, True])
    monkeypatch.setattr(time, "monotonic", time.monotonic)
    job = ScrubJob(where=str(places.persistent), mb_per_second=FAST)
    scrubber = scrubbing.begin(job)
    scrubber.until = Until(looks)
    first = scrubbing.scrub_run(scrubber, scrubber.runs[0])
    assert [(one.checkpoint, one.tier) for one in first.lines] == [
        (shop.keys[1].folder, "persistent"),
        (shop.keys[2].folder, "local"),
    ]
    assert not first.finished
    assert shop.events("scrub.paused")
    second = shop.scrub()
    assert len(second.lines) == 7
    assert second.finished


class Until(float):
    """A moment that has come when the list says so."""

    def __new__(cls, looks):
        made = super().__new__(cls)
        made.looks = looks
        return made

    def __lt__(self, other):
        return next(self.looks)


SCRUB = """
import sys
from everstep.core.scrub import ScrubJob
from everstep.host import scrubbing
scrubber = scrubbing.begin(ScrubJob(where=sys.argv[1], mb_per_second=float(sys.argv[2])))
for run in scrubber.runs:
    scrubbing.scrub_run(scrubber, run)
print(scrubbing.finish(scrubber)["status"])
"""


def process(shop, tmp_path, *plan, rate=FAST, **how):
    """A scrub as a process of its own."""
    environment = dict(os.environ)
    if plan:
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        for path in tmp_path.glob("plan.json.*.fired"):
            path.unlink()
        environment["EVERSTEP_FAULTS"] = str(tmp_path / "plan.json")
    command = [sys.executable, "-c", SCRUB, str(shop.places.persistent), str(rate)]
    started = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    )
    shop.processes.append(started)
    return started


POINTS = {
    "local": ["copy.begin", "copy.mid_file", "copy.verify", "copy.before_manifest", "scrub.copied", "scrub.aside", "scrub.swapped"],
    "persistent": ["scrub.begin", "scrub.reading", "scrub.found", "scrub.quarantined", "scrub.copied", "scrub.aside",
                   "scrub.swapped", "scrub.marked", "scrub.lifted"],
    "object": ["scrub.quarantined", "scrub.aside", "upload.begin", "upload.mid_file", "upload.verify",
               "upload.before_manifest", "upload.after_manifest", "scrub.swapped", "scrub.marked", "scrub.lifted"],
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("tier", "point"), [(tier, point) for tier, points in POINTS.items() for point in points])
def test_killed_anywhere_it_loses_nothing_and_the_next_one_ends_it(shop, tmp_path, tier, point):
    bad = shop.keys[1]
    flip(shop.file(tier, bad))
    rotten = shop.file(tier, bad).read_bytes()
    killed = process(shop, tmp_path, {"point": point})
    assert killed.wait(60) == -signal.SIGKILL, killed.communicate()
    killed.communicate()
    for where in ALL:
        for key in shop.keys:
            assert (where, key) == (tier, bad) or shop.is_whole(where, key), "what was whole still is"
    assert shop.is_whole(tier, bad) or State.quarantined in shop.states(tier, bad) or not shop.events("scrub.rot")
    again = process(shop, tmp_path)
    out, err = again.communicate(timeout=60)
    assert (again.returncode, out) == (0, "completed\n"), err
    assert all(shop.is_whole(where, key) for where in ALL for key in shop.keys)
    assert all(State.quarantined not in states for states in marks.states(shop.places).values())
    assert any((kept / FILE).read_bytes() == rotten for kept in shop.evidence(tier)), "the evidence survived, too"
    assert shop.events("scrub.repaired")
    home = shop.places.checkpoints(tier) if tier != "object" else Path(shop.places.object, "checkpoints")
    assert not list(home.glob(".repair-*"))
    assert shop.scrub().counts["sound"] == 9


def test_a_killed_scrub_goes_on_where_it_was(shop, tmp_path):
    killed = process(shop, tmp_path, {"point": "scrub.reading", "hit": 20})
    assert killed.wait(60) == -signal.SIGKILL
    killed.communicate()
    done = json.loads((shop.places.persistent / "scrub.json").read_text())["checked"]
    assert 0 < len(done) < 9
    assert len(shop.scrub().lines) == 9 - len(done)


def test_two_at_once_do_no_harm(shop, tmp_path):
    flip(shop.file("persistent", shop.keys[0]))
    slow = process(shop, tmp_path, {"point": "scrub.quarantined", "do": "stop"})
    until(lambda: State.quarantined in shop.states("persistent", shop.keys[0]))
    other = shop.scrub()
    assert (other.finished, other.note, other.lines) == (False, "another scrub is at work here", ())
    slow.send_signal(signal.SIGCONT)
    assert slow.communicate(timeout=60)[0] == "completed\n"
    assert shop.is_whole("persistent", shop.keys[0])


def test_two_at_once_do_no_harm_where_locks_do_not_reach(shop, tmp_path, monkeypatch):
    """As on two machines with a mount that knows no locks."""
    flip(shop.file("persistent", shop.keys[0]))
    slow = process(shop, tmp_path, {"point": "scrub.copied", "do": "stop"})
    until(lambda: "T" in Path(f"/proc/{slow.pid}/stat").read_text().split(")")[1].split()[0])
    assert list(shop.places.checkpoints("persistent").glob(".repair-*/manifest.json"))
    (shop.places.persistent / "scrub.lock").unlink()
    found = shop.scrub()
    assert found.counts["repaired"] == 1
    slow.send_signal(signal.SIGCONT)
    slow.communicate(timeout=60)
    assert all(shop.is_whole(tier, key) for tier in ALL for key in shop.keys)
    assert shop.scrub().counts["sound"] == 9


def test_what_retention_removed_for_its_budget_is_not_brought_back(shop):
    """And what the newest three are not, but the job keeps for its step or its metric, is missed when it is gone."""
    for step in (40, 50):
        shop.save(step)
    size = checkpoint.read_manifest(shop.places.checkpoint("local", shop.keys[0])).bytes
    policy = {"keep": 3, "keep_every_steps": 20, "budget_gb": {"persistent": 2.5 * size / 1e9}}
    (shop.places.persistent / "job.json").write_text(json.dumps({"job": {"checkpoint": policy}}))
    gone = retention.apply(shop.places, CheckpointPolicy.model_validate(policy), {1: 0}, set()).removed
    assert [one.folder for one in gone if one.tier == "persistent"] == [f"step-{step:08d}.a1" for step in (10, 20, 30)]
    found = shop.scrub()
    assert found.counts["repaired"] == 0, found.lines
    policy.pop("budget_gb")
    (shop.places.persistent / "job.json").write_text(json.dumps({"job": {"checkpoint": policy}}))
    shutil.rmtree(shop.places.checkpoint("persistent", Key(50, 1)))
    shop.scrub()
    assert shop.is_whole("persistent", Key(50, 1))


def until(condition, seconds=120):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.01)


@pytest.mark.parametrize("tier", ["local", "persistent"])
def test_what_retention_removes_in_the_middle_is_no_rot(shop, tmp_path, tier):
    shop.save(40)
    old = shop.keys[0]
    for where in ("local", "persistent"):
        path = shop.places.mark(old.folder, where, "verified")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"time": 1.0 if where == tier else 2.0}))
        shop.places.mark(old.folder, where, "durable").unlink(missing_ok=True)
    slow = process(shop, tmp_path, {"point": "scrub.reading", "hit": 2, "do": "stop"})
    until(lambda: "T" in Path(f"/proc/{slow.pid}/stat").read_text().split(")")[1].split()[0])
    gone = retention.apply(shop.places, CheckpointPolicy(keep=3), {1: 0}, set()).removed
    assert (tier, old.folder) in [(one.tier, one.folder) for one in gone]
    slow.send_signal(signal.SIGCONT)
    out, err = slow.communicate(timeout=60)
    assert out == "completed\n", err
    assert not shop.events("scrub.rot")
    assert shop.events("scrub.finished")[0]["data"]["gone"] >= 1
    assert not shop.places.checkpoint(tier, old).exists()


def test_what_retention_removes_from_the_object_tier_in_the_middle_is_no_rot(shop, monkeypatch):
    going = shop.keys[0]
    (Path(shop.places.object) / "checkpoints" / going.folder / "manifest.json").unlink()  # a removal begins with it

    def remove():
        time.sleep(0.5)
        shop.tier.remove(going)
        mirror.forget(shop.places, going)

    thread = threading.Thread(target=remove)
    seen = shop.tier.look()
    monkeypatch.setattr(object_tier.ObjectTier, "look", once(seen, going, object_tier.ObjectTier.look))
    thread.start()
    found = shop.scrub()
    thread.join()
    assert found.counts["rotten"] + found.counts["repaired"] == 0, found.lines
    assert going not in shop.tier.look().committed


def once(seen, key, real):
    """The first look shows the checkpoint as it was, like a listing that was made before the removal began."""
    looks = []

    def look(self, below=""):
        looks.append(below)
        if len(looks) == 1:
            return object_tier.Seen({**seen.sizes, f"checkpoints/{key.folder}/manifest.json": 1})
        return real(self, below)

    return look


def test_a_torn_one_that_is_being_copied_is_no_rot(shop):
    key = shop.keys[0]
    shop.file("persistent", key, "manifest.json").unlink()
    marks.advertise(shop.places, [key])
    found = shop.scrub()
    assert found.counts["sound"] == len(found.lines) == 8


def test_an_object_tier_that_shows_nothing_is_not_there_and_nothing_is_put_there(shop):
    shutil.rmtree(shop.places.object)
    Path(shop.places.object).mkdir()
    found = shop.scrub()
    (line,) = [one for one in found.lines if one.outcome is not Outcome.sound]
    assert (line.tier, line.outcome) == ("object", Outcome.unknown)
    assert "is it mounted" in line.why
    assert not list(Path(shop.places.object).iterdir())


def test_a_repair_leaves_room_for_the_next_save(shop, monkeypatch):
    bad = shop.keys[0]
    flip(shop.file("persistent", bad))
    from everstep.store import room

    monkeypatch.setattr(room, "free", lambda path: 100)
    (line,) = [one for one in shop.scrub().lines if one.outcome is Outcome.rotten]
    assert "has 100 bytes free" in line.why
    monkeypatch.undo()
    assert shop.scrub().counts["repaired"] == 1, "it is tried again"


@pytest.fixture
def far_shop(tmp_path, s3_server, s3_proxy):
    keys = Keys(s3_server.access_key, SecretStr(s3_server.secret_key))
    access = Access(s3_proxy.endpoint, s3_server.region, "path", None, keys)
    return Shop(tmp_path, uri=f"s3://{s3_server.bucket()}/x/{fabric.JOB}/{fabric.RUN}", access=access)


def harm_object(shop, s3_server, key, do):
    bucket, _, prefix = shop.places.object.removeprefix("s3://").partition("/")
    client, name = s3_server.client(), f"{prefix}/checkpoints/{key.folder}/{FILE}"
    data = bytearray(client.get_object(Bucket=bucket, Key=name)["Body"].read())
    if do == "flip":
        data[-5] ^= 4
        client.put_object(Bucket=bucket, Key=name, Body=bytes(data))
    elif do == "cut":
        client.put_object(Bucket=bucket, Key=name, Body=bytes(data[:-7]))
    else:
        client.delete_object(Bucket=bucket, Key=name)
    return bytes(data)


@pytest.mark.parametrize("do", ["flip", "cut", "lose"])
def test_rot_on_s3_is_mended_and_kept(far_shop, s3_server, do):
    bad = far_shop.keys[1]
    rotten = harm_object(far_shop, s3_server, bad, do)
    found = far_shop.scrub()
    (line,) = [one for one in found.lines if one.outcome is not Outcome.sound]
    assert (line.outcome, line.tier, line.file) == (Outcome.repaired, "object", FILE)
    assert far_shop.is_whole("object", bad)
    kept = [path for path in far_shop.tier.look("aside").sizes if path.endswith(FILE)]
    if do == "flip":
        assert far_shop.tier.read(kept[0]) == rotten
    assert far_shop.scrub().counts["sound"] == 9


def test_a_local_copy_is_mended_from_s3(far_shop):
    bad = far_shop.keys[1]
    for tier in ("local", "persistent"):
        flip(far_shop.file(tier, bad))
    found = far_shop.scrub()
    assert found.counts["repaired"] == 2
    assert "object" in {line.repaired_from for line in found.lines}
    assert far_shop.is_whole("local", bad)


def test_a_store_that_does_not_answer_is_unknown_and_costs_the_others_nothing(far_shop, s3_proxy, monkeypatch):
    monkeypatch.setattr(scrubbing, "ASK_SECONDS", 1.0)
    s3_proxy.plan(Fault("internal", times=-1))
    found = far_shop.scrub()
    assert (found.counts["sound"], found.counts["unknown"]) == (6, 1)
    assert not far_shop.events("scrub.rot")
    s3_proxy.clear()
    assert far_shop.scrub().counts["sound"] == 9


def test_the_rate_is_kept(tmp_path):
    shop = Shop(tmp_path, scale=2000)
    began = time.monotonic()
    found = shop.scrub(mb_per_second=9)
    spent = time.monotonic() - began
    assert found.counts["sound"] == 9
    assert spent >= found.bytes / 9e6 * 0.9
    assert found.bytes > 9e6


def test_a_rate_is_kept_over_all_threads_and_idle_time_is_not_made_up_for():
    now = [0.0]
    pace = Pace(100.0, clock=lambda: now[0])
    pace._halted.wait = lambda seconds: now.__setitem__(0, now[0] + seconds)
    pace.take(1000)
    assert now[0] == pytest.approx(10.0)
    now[0] = 100.0
    pace.take(100)
    assert now[0] == pytest.approx(101.0)


def test_reading_leaves_nothing_in_the_page_cache(tmp_path):
    shop = Shop(tmp_path, scale=4000)
    shop.scrub()
    for tier in ("local", "persistent"):
        assert resident(shop.file(tier, shop.keys[0], "rank-0-0.safetensors")) < 0.2


def resident(path):
    """The part of a file that is in the page cache."""
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    held = (ctypes.c_ubyte * pages)()
    handle = os.open(path, os.O_RDONLY)
    try:
        where = libc.mmap(None, size, 1, 1, handle, 0)
        assert libc.mincore(ctypes.c_void_p(where), ctypes.c_size_t(size), held) == 0
        libc.munmap(ctypes.c_void_p(where), ctypes.c_size_t(size))
    finally:
        os.close(handle)
    return sum(one & 1 for one in held) / pages


def test_it_steps_back_behind_everybody_and_is_left_to_itself_where_a_tier_hangs():
    seen = []
    pace = Pace(1e9)
    gentle.aside(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())), pace, "x")
    assert seen == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19
    over = threading.Event()
    with pytest.raises(StoreUnavailable, match="/mnt/x does not answer"):
        gentle.aside(over.wait, pace, "/mnt/x", still_seconds=0.2)
    over.set()


@pytest.mark.parametrize("where", ["run", "job", "tier"])
def test_one_run_those_of_a_job_or_all_of_a_tier(shop, where):
    folder = shop.places.persistent
    folder = {"run": folder, "job": folder.parent, "tier": folder.parent.parent}[where]
    assert [one.persistent for one in scrubbing.begin(ScrubJob(where=str(folder))).runs] == [shop.places.persistent]
    with pytest.raises(ValueError, match="holds no run"):
        scrubbing.begin(ScrubJob(where=str(folder / "nothing")))


def test_the_command_line_is_answered_in_a_sentence(shop):
    asked = scrubbing.asked([str(shop.places.persistent), "--mb-per-second", "5", "--minutes", "2"])
    assert (asked.mb_per_second, asked.minutes) == (5, 2)
    for wrong in (
        [],
        [str(shop.places.persistent), "--fast"],
        [str(shop.places.persistent), "--minutes", "-1"],
        ["/nowhere"],
    ):
        with pytest.raises(ValueError):
            scrubbing.asked(wrong)


def test_what_is_listed_is_what_there_is(shop):
    listed = stored.copies(shop.places, shop.tier.look(), {}, {1: 0}, CheckpointPolicy())
    assert {(one.key, one.tier) for one in listed} == {(key, tier) for key in shop.keys for tier in ALL}
