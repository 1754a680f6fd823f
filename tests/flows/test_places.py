"""Places that are full or closed: one sentence, exit 1, nothing committed lost, and the run goes on when mended."""

import os
import re
from pathlib import Path

import pytest


def small(size: str) -> tuple[str, ...]:
    return ("-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def last_line(ended) -> str:
    return ended.err.strip().splitlines()[-1]


@pytest.mark.sampled
def test_a_full_local_tier_sends_checkpoints_to_the_persistent_one(make_desk, mount):
    """BC-023: training goes on, and it is told with path, bytes free and bytes needed."""
    desk = make_desk(config={"width": 40_000})
    mount(desk.folder / "nvme", *small("1m"))
    ended = desk.run()
    assert ended.code == 0, ended.err
    assert ended.final["status"] == "completed"
    told = (Path(ended.final["run_dir"]) / "save-errors.jsonl").read_text()
    assert "bytes free" in told
    assert "are needed" in told
    desk.await_gone()


@pytest.mark.sampled
def test_no_space_on_the_persistent_tier(make_desk, mount):
    desk = make_desk(config={"width": 40_000}, limits={"drain": 3})
    mount(desk.folder / "persistent", *small("3m"))
    ended = desk.run()
    assert ended.code == 1
    assert "persistent" in last_line(ended)
    assert ended.final is None or ended.final["status"] != "completed"
    desk.await_gone()
    mount(desk.folder / "persistent", "-o", "remount,size=100m")
    again = desk.run()
    assert again.code == 0
    assert again.final["resumed_from"] == 20, "nothing is trained twice"


@pytest.mark.sampled
def test_both_tiers_full(make_desk, mount):
    """What was committed stays whole, the training goes on to where it must save, and room is all that it takes."""
    desk = make_desk(config={"width": 40_000}, limits={"drain": 3})
    mount(desk.folder / "nvme", *small("1m"))
    mount(desk.folder / "persistent", *small("6m"))
    ended = desk.run()
    assert ended.code == 1
    assert "bytes free" in last_line(ended)
    assert ended.final is None or ended.final["status"] != "completed"
    desk.await_gone()
    held = {path.parent.name for path in desk.folder.glob("persistent/*/r*/checkpoints/step-*/manifest.json")}
    assert held, "the first one had room"
    for one in ("nvme", "persistent"):
        mount(desk.folder / one, "-o", "remount,size=100m")
    again = desk.run()
    assert again.code == 0, again.err
    assert again.final["resumed_from"] == max(int(name[5:13]) for name in held)


def test_a_read_only_persistent_tier(make_desk, mount):
    desk = make_desk()
    mount(desk.folder / "persistent", *small("3m"))
    mount(desk.folder / "persistent", "-o", "remount,ro")
    ended = desk.run()
    assert ended.code == 1
    assert "Read-only file system" in last_line(ended)
    assert "persistent" in last_line(ended)
    assert ended.final is None


@pytest.mark.sampled
def test_data_that_does_not_fit(make_desk, mount):
    """BC-026: ten files of 1 MB on a tier of 6 MB: both numbers are said, nothing is trained or left half staged."""
    desk = make_desk()
    for number in range(10):
        (desk.folder / "data" / f"{number}.bin").write_bytes(os.urandom(1_000_000))
    mount(desk.folder / "nvme", *small("6m"))
    ended = desk.run()
    assert ended.code == 1
    assert re.search(r"tiers.local: \S+ has 6\.\d MB free and the data needs 1\d\.\d MB; free", last_line(ended))
    assert not list((desk.folder / "persistent").glob("*/r*/attempts/*"))
    left = [path for path in (desk.folder / "nvme").rglob("*") if path.is_file() and path.parent.name != "index"]
    assert [path.name for path in left if path.stat().st_size] == [], (
        "digests are remembered; of the data is nothing there"
    )
