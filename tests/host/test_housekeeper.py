"""Housekeeping beside training: what goes, what is said before a save finds no room, and that no disk stops a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric

from everstep.core.checkpoint import AttemptClaim, Key, Verification
from everstep.core.job import CheckpointPolicy
from everstep.host import retention
from everstep.host.backlog import pending
from everstep.host.housekeeper import Housekeeper
from everstep.store import checkpoint, marks, room, transfer

SCALE = 2000  # makes checkpoints of 2 MB


class Stage:
    """A run on two tiers, its housekeeper, and what it said."""

    def __init__(self, places, **policy):
        self.places = places
        self.policy = CheckpointPolicy(**policy)
        self.events = []
        self.now = 0.0
        claim = AttemptClaim(attempt=1, resumed_from=0, host="h", pid=1, boot="b", time=1.0)
        places.claim(1).parent.mkdir(parents=True, exist_ok=True)
        places.claim(1).write_text(claim.to_json())
        self.keeper = Housekeeper(places, self.policy, self._record, set, lambda: self.now)

    def _record(self, kind, **data):
        self.events.append({"kind": kind} | data)

    def save(self, step, *, copy=True):
        key = Key(step, 1)
        folder = fabric.checkpoint(self.places.checkpoint("local", key), scale=SCALE)
        self._mark(key, "local", durable=False)
        if copy:
            transfer.copy(folder, self.places.checkpoint("persistent", key))
            self._mark(key, "persistent", durable=True)
        return key

    def _mark(self, key, tier, *, durable):
        digest = checkpoint.manifest_digest(self.places.checkpoint(tier, key))
        marks.verified(self.places, key.folder, tier, Verification(ok=True, manifest_digest=digest))
        if durable:
            marks.durable(self.places, key.folder, tier, digest)

    def look(self):
        self.now += 10
        self.keeper.make_room()

    def held(self, tier):
        return [key.step for key in checkpoint.find(self.places.checkpoints(tier))[0]]

    def kinds(self):
        return [event["kind"] for event in self.events]


@pytest.fixture
def small(tmp_path):
    """Mount a small file system; skips where that is not allowed."""
    mounted = []

    def mount(name, size):
        folder = tmp_path / name
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
        if (
            os.geteuid()
            or subprocess.run(["mount", *options, str(folder)], check=False, capture_output=True).returncode
        ):
            pytest.skip("mounting is not allowed here")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, leave):
    """Leave so many bytes free."""
    with (folder / "ballast").open("wb") as file:
        while (more := room.free(folder) - leave) > 0:
            file.write(b"x" * min(more, 1 << 16))
            file.flush()


def test_a_save_that_will_find_no_room_is_told_before_it_is_tried(tmp_path, small):
    """BC-025: half of the last checkpoint's size is free; path, bytes needed and bytes free are said, once."""
    small("nvme", "16m")
    stage = Stage(fabric.places(tmp_path))
    key = stage.save(10)
    size = checkpoint.read_manifest(stage.places.checkpoint("local", key)).bytes
    fill(tmp_path / "nvme", size // 2)
    for _ in range(3):
        stage.look()
    assert stage.kinds() == ["space.low"]
    told = stage.events[0]
    assert told["needed"] == 2 * size
    assert told["free"] <= size // 2
    assert told["severity"] == "high"
    place = stage.places.local
    assert f"{place} has {told['free']:,} bytes free, {told['needed']:,} are needed" in told["text"]
    assert stage.held("local") == [10]
    (tmp_path / "nvme" / "ballast").unlink()
    stage.look()
    fill(tmp_path / "nvme", size // 2)
    stage.look()
    assert stage.kinds() == ["space.low", "space.low"]


def test_room_is_made_from_what_is_not_protected(tmp_path, small):
    small("nvme", "16m")
    stage = Stage(fabric.places(tmp_path), keep=4)
    for step in (10, 20, 30, 40):
        stage.save(step)
    marks.pin(stage.places, "step-00000020.a1")
    size = checkpoint.read_manifest(stage.places.checkpoint("local", Key(40, 1))).bytes
    fill(tmp_path / "nvme", int(1.5 * size))
    stage.look()
    assert stage.kinds() == ["checkpoint.removed", "space.made"]
    assert stage.held("local") == [20, 30, 40]
    assert stage.held("persistent") == [10, 20, 30, 40]
    removed, made = stage.events
    assert removed["bytes"] == made["bytes"] > size
    assert removed["text"] == "room is made for the next save; it was one of the newest 4"
    fill(tmp_path / "nvme", 0)
    stage.look()
    assert stage.held("local") == [20, 40]
    assert stage.kinds()[2:] == ["checkpoint.removed", "space.low"]


def test_what_made_room_on_the_persistent_tier_is_not_copied_there_again(tmp_path, small):
    small("persistent", "16m")
    stage = Stage(fabric.places(tmp_path), keep=3)
    for step in (10, 20, 30):
        stage.save(step)
    size = checkpoint.read_manifest(stage.places.checkpoint("local", Key(30, 1))).bytes
    fill(tmp_path / "persistent", int(0.5 * size))
    stage.look()
    assert stage.held("persistent") == [30]
    assert stage.held("local") == [10, 20, 30]
    assert pending(stage.places, {1: 0}, stage.policy) == []
    marks.pin(stage.places, "step-00000010.a1")
    assert pending(stage.places, {1: 0}, stage.policy) == [Key(10, 1)]
    stage.save(40, copy=False)
    assert pending(stage.places, {1: 0}, stage.policy) == [Key(10, 1), Key(40, 1)]


def test_tiers_that_share_a_device_need_room_for_both(tmp_path):
    stage = Stage(fabric.places(tmp_path))
    assert list(stage.keeper._devices()) == [["local", "persistent"]]


def test_before_the_first_save_nothing_is_expected(tmp_path, small):
    small("nvme", "1m")
    stage = Stage(fabric.places(tmp_path))
    fill(tmp_path / "nvme", 0)
    stage.look()
    assert stage.events == []


def test_it_looks_only_once_in_a_while(tmp_path, monkeypatch):
    stage = Stage(fabric.places(tmp_path))
    stage.save(10)
    asked = []
    monkeypatch.setattr(room, "free", lambda path: asked.append(path) or 10**12)
    for _ in range(10):
        stage.now += 0.25
        stage.keeper.make_room()
    assert len(asked) == 2


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), PermissionError(13, "no"), OSError(116, "stale")])
def test_no_answer_of_a_disk_gets_out_and_each_is_one_warning(tmp_path, monkeypatch, error):
    """BC-022, the hands: the flow's own test plays it through training."""
    stage = Stage(fabric.places(tmp_path), keep=1)
    for step in (10, 20):
        stage.save(step)
    with monkeypatch.context() as broken:
        broken.setattr(retention, "plan", lambda *_: (_ for _ in ()).throw(error))
        for _ in range(3):
            stage.keeper.keep()
    assert stage.kinds() == ["retention.failed"]
    assert stage.events[0]["severity"] == "medium"
    stage.keeper.keep()
    assert stage.held("local") == [20]
    with monkeypatch.context() as broken:
        broken.setattr(room, "free", lambda path: (_ for _ in ()).throw(error))
        for _ in range(3):
            stage.look()
    assert stage.kinds().count("retention.failed") == 2


def test_one_that_cannot_be_removed_holds_up_no_other(tmp_path, monkeypatch):
    stage = Stage(fabric.places(tmp_path), keep=1)
    for step in (10, 20, 30):
        stage.save(step)
    real = Path.rename

    def rename(self, target):
        if self.name == "step-00000010.a1":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    stage.keeper.keep()
    assert stage.held("local") == stage.held("persistent") == [10, 30]
    assert stage.kinds() == ["checkpoint.removed", "checkpoint.removed", "retention.failed"]
    assert "Permission denied" in stage.events[-1]["text"]
