"""What people ask of retention, by the command and by open_run; and the handed cases that need hands."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric

from everstep import open_run
from everstep.core.checkpoint import Key, State, Verification
from everstep.core.errors import AlreadyOwned
from everstep.core.job import CheckpointPolicy
from everstep.core.ledger import Event
from everstep.host import pruning, retention
from everstep.host.courier import CopierSpec
from everstep.store import checkpoint, jsonl, marks, transfer

ONE = {1: 0}


@pytest.fixture
def places(tmp_path):
    """A run with four checkpoints on both tiers, of which its policy keeps two."""
    found = fabric.places(tmp_path)
    found.structure.write_text(fabric.structure().to_json())
    fabric.claim(found, 1)
    record = {"name": fabric.JOB, "run": fabric.RUN, "fingerprint": "f" * 64, "dataset_fingerprint": "d" * 64}
    more = {"created": 1.0, "program": "a:b", "seed": 0, "config": {}, "threads": 1}
    found.run_record.write_text(json.dumps({"schema_version": 1} | record | more))
    tell(found, keep=2)
    for step in (10, 20, 30, 40):
        save(found, step)
    tiers = {name: str(folder) for name, folder in found.tiers.items()}
    (found.persistent / "owner.json").write_text(json.dumps({"tiers": tiers}))
    return found


def tell(places, **policy):
    asked = {"schema_version": 1, "job": {"checkpoint": CheckpointPolicy(**policy).model_dump(mode="json")}}
    (places.persistent / "job.json").write_text(json.dumps(asked))


def save(places, step, *, attempt=1, copy=True, **how):
    key = Key(step, attempt)
    folder = fabric.checkpoint(places.checkpoint("local", key), **how)
    mark(places, key, "local")
    if copy:
        transfer.copy(folder, places.checkpoint("persistent", key))
        mark(places, key, "persistent")
    return key


def mark(places, key, tier):
    digest = checkpoint.manifest_digest(places.checkpoint(tier, key))
    marks.verified(places, key.folder, tier, Verification(ok=True, manifest_digest=digest))
    if tier == "persistent":
        marks.durable(places, key.folder, tier, digest)


def held(places, tier):
    return [key.step for key in checkpoint.find(places.checkpoints(tier))[0]]


def command(places, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "everstep.host.pruning", str(places.persistent), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


def events(places, kind):
    return [event for line in jsonl.read(places.events) if (event := Event.model_validate(line)).kind == kind]


def test_the_command_shows_what_goes_and_why_and_changes_nothing(places):
    done = command(places)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["tier", "checkpoint", "size", "why"]
    assert [line.split()[:2] for line in lines[1:9]] == [
        [tier, f"step-000000{step}.a1"] for tier in ("local", "persistent") for step in (10, 20, 30, 40)
    ]
    assert "goes   newer ones stand for it" in lines[1]
    assert "stays  one of the newest 2" in lines[3]
    assert "stays  the newest verified" in lines[4]
    assert lines[-1].startswith("4 of 8 may go, which frees ")
    assert held(places, "local") == held(places, "persistent") == [10, 20, 30, 40]


def test_apply_removes_it_and_tells_the_journal(places):
    done = command(places, "--apply")
    assert done.returncode == 0, done.stderr
    assert "4 removed, " in done.stdout.splitlines()[-1]
    assert held(places, "local") == held(places, "persistent") == [30, 40]
    told = events(places, "checkpoint.removed")
    assert sum(event.data["bytes"] for event in told) > 4000
    assert {(event.step, event.data["tier"]) for event in told} == {
        (step, tier) for step in (10, 20) for tier in ("local", "persistent")
    }


def test_a_run_that_is_being_trained_is_left_to_itself(places):
    with (places.persistent / "owner.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = command(places, "--apply")
        assert done.returncode == 1
        assert "is being trained" in done.stderr
        with pytest.raises(AlreadyOwned):
            pruning.apply(places)
    assert held(places, "local") == [10, 20, 30, 40]


def test_without_its_policy_a_run_loses_nothing(places):
    (places.persistent / "job.json").write_text("{")
    done = command(places, "--apply")
    assert done.returncode == 2
    assert "job.json cannot be read" in done.stderr
    assert "the default would do" in command(places).stderr
    assert held(places, "local") == [10, 20, 30, 40]


def test_a_pinned_one_stays_until_it_is_let_go(places):
    run = open_run(places.persistent)
    assert run.pin(10) == "step-00000010.a1"
    assert command(places, "--apply").returncode == 0
    assert held(places, "local") == held(places, "persistent") == [10, 30, 40]
    table = run.retention()
    assert list(table.columns) == ["tier", "bytes", "stays", "why"]
    assert table.loc["step-00000010.a1"]["why"].tolist() == ["pinned", "pinned"]
    assert command(places, "--unpin", "10", "--apply").returncode == 0
    assert held(places, "local") == [30, 40]
    assert [event.step for event in events(places, "checkpoint.pinned") + events(places, "checkpoint.unpinned")] == [
        10,
        10,
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pin", "11"), "step: there is no checkpoint of step 11 to keep; there are: 10, 20, 30, 40."),
        (("--unpin", "10"), "step: no checkpoint of step 10 is pinned; pinned are: none."),
    ],
)
def test_what_cannot_be_pinned_is_said_in_a_sentence(places, arguments, said):
    done = command(places, *arguments)
    assert (done.returncode, done.stderr.strip()) == (2, said)


def test_two_who_pin_at_once_both_get_their_way(places):
    code = "import sys; from pathlib import Path; from everstep import open_run; open_run(sys.argv[1]).pin(int(sys.argv[2]))"
    both = [subprocess.Popen([sys.executable, "-c", code, str(places.persistent), str(step)]) for step in (10, 20, 30)]
    assert [one.wait(60) for one in both] == [0, 0, 0]
    assert marks.pinned(places) == {f"step-000000{step}.a1" for step in (10, 20, 30)}


@pytest.mark.parametrize("steps", [(8, 9, 10, 11), (98, 99, 100, 101)])
@pytest.mark.parametrize("reverse", [False, True])
def test_neither_names_nor_times_of_the_disk_say_which_is_newest(tmp_path, steps, reverse):
    """BC-015: all times of modification equal, then reversed."""
    places = fabric.places(tmp_path)
    for step in steps:
        save(places, step)
        keys = checkpoint.find(places.checkpoints("local"))[0]
        for age, key in enumerate(keys):
            for tier in ("local", "persistent"):
                os.utime(places.checkpoint(tier, key), (0, 1000 - age if reverse else 1000))
        retention.apply(places, CheckpointPolicy(keep=2), ONE, set())
    assert held(places, "local") == held(places, "persistent") == list(steps[-2:])


def test_the_best_stands_beside_the_newest_which_is_whole(tmp_path):
    """BC-017: the best is the very first; after each save both are there, the newest with its optimizer."""
    places = fabric.places(tmp_path)
    for step in (10, 20, 30, 40, 50):
        key = save(places, step, metrics={"loss": float(step)})
        retention.apply(places, CheckpointPolicy(keep=2, best={"metric": "loss"}), ONE, set())
        assert {10, step} <= set(held(places, "local"))
        newest = places.checkpoint("local", key)
        assert checkpoint.verify(newest, fabric.structure()).ok
        assert b"optimizer/state/0/exp_avg" in (newest / "rank-0.json").read_bytes()


def test_only_exact_names_take_part(tmp_path):
    """BC-019: 'step-50.bak', 'foo-step-60', 'step-0070' and a file 'step-80' are neither taken nor removed."""
    places = fabric.places(tmp_path)
    strange = ["step-50.bak", "foo-step-60", "step-0070", "step-00000005.a1.bak"]
    for tier in ("local", "persistent"):
        for name in strange:
            fabric.checkpoint(places.checkpoints(tier) / "step-00000001.a1").rename(places.checkpoints(tier) / name)
        (places.checkpoints(tier) / "step-80").write_text("a file")
    for step in (10, 20, 30, 40, 50, 60):
        save(places, step)
        retention.apply(places, CheckpointPolicy(keep=2), ONE, set())
    for tier in ("local", "persistent"):
        names = sorted(entry.name for entry in places.checkpoints(tier).iterdir())
        assert names == sorted([*strange, "step-80", "step-00000050.a1", "step-00000060.a1"])
    left = [line for line in pruning.explain(places, CheckpointPolicy(keep=2)) if "left alone" in line.why]
    assert len(left) == 10


@contextlib.contextmanager
def copier(places, plan, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    spec = CopierSpec(
        name=fabric.JOB,
        run=fabric.RUN,
        run_dir=str(places.persistent),
        local_dir=str(places.local),
        policy=CheckpointPolicy(keep=1),
        parent_pid=os.getpid(),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep.host.copier"],
        env=dict(os.environ) | {"EVERSTEP_FAULTS": str(tmp_path / "plan.json")},
        stdin=subprocess.PIPE,
    )
    try:
        process.stdin.write(spec.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_what_is_queued_or_under_way_to_another_tier_is_not_removed_before_it_is_there(tmp_path):
    """BC-020: a slow copier, saves that come faster, keep: 1. What arrives is whole, what is left out is named."""
    places = fabric.places(tmp_path)
    places.structure.write_text(fabric.structure(200).to_json())
    fabric.claim(places, 1)
    slow = [{"point": "copy.mid_file", "hit": hit, "do": "sleep:0.6"} for hit in range(1, 40)]
    removed, standing, had_to_arrive = [], set(), set()
    places.checkpoints("local").mkdir()
    with copier(places, slow, tmp_path) as process:
        for step in range(10, 90, 10):
            beside = fabric.checkpoint(tmp_path / "saving" / Key(step, 1).folder, scale=200)
            beside.rename(places.checkpoint("local", Key(step, 1)))
            mark(places, Key(step, 1), "local")
            until = time.monotonic() + 0.4
            while time.monotonic() < until:
                under_way = marks.copying(places)
                swept = retention.apply(places, CheckpointPolicy(keep=1), ONE, set())
                gone = {one.folder for one in swept.removed if one.tier == "local"}
                had_to_arrive |= gone & {key.folder for key in under_way}
                removed += swept.removed
                standing = set(held(places, "local"))
                assert step in standing
                assert len(standing) <= 3, "the queue is bounded"
                time.sleep(0.02)
        process.stdin.close()
        process.stdin = None
        assert process.wait(60) == 0
    arrived = checkpoint.find(places.checkpoints("persistent"))[0]
    assert arrived[-1] == Key(80, 1)
    assert all(checkpoint.verify(places.checkpoint("persistent", key), fabric.structure(200)).ok for key in arrived)
    told = [
        row["checkpoint"]
        for row in jsonl.read(places.persistent / "copier.jsonl")
        if row["kind"] == "checkpoint.durable"
    ]
    skipped = {one.folder for one in removed if "never copied" in one.why}
    assert skipped
    assert had_to_arrive <= set(told)
    assert skipped | set(told) == {Key(step, 1).folder for step in range(10, 90, 10)}
    assert not skipped & set(told)
    assert marks.states(places)[Key(80, 1).folder, "persistent"] >= {State.durable}
