"""Damaged checkpoints: refused by name, set aside, the one before is taken, and the end has the same bits."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from drill import Drill, new_drill
from plans import Shape

ALL = "EVERSTEP_ALL" in os.environ
LAST, BEFORE = "step-00000040.a1", "step-00000030.a1"


def folders(drill, name):
    return [drill.folder / tier / "tiny" / drill.run_dir.name / "checkpoints" / name for tier in ("nvme", "persistent")]


def flip(folder):
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[random.Random(1).randrange(len(data))] ^= 0x10
    file.write_bytes(data)


def truncate(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def zeros(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(bytes(file.stat().st_size))


def missing_file(folder):
    next(folder.glob("*.safetensors")).unlink()


def missing_manifest(folder):
    (folder / "manifest.json").unlink()


def edited_manifest(folder):
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"step": 40', '"step": 50'))


def outside_path(folder):
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"][0]["path"] = "../../run.json"
    file.write_text(json.dumps(manifest))


def position_is_a_brace(folder):
    next(folder.glob("rank-0.json")).write_text("{")


def position_is_gone(folder):
    next(folder.glob("rank-0.json")).unlink()


def negative_epoch(folder):
    file = folder / "rank-0.json"
    state = json.loads(file.read_text())
    state["progress"]["epoch"] = -1
    file.write_text(json.dumps(state))


DAMAGES = (
    flip,
    truncate,
    zeros,
    missing_file,
    missing_manifest,
    edited_manifest,
    outside_path,
    position_is_a_brace,
    position_is_gone,
    negative_epoch,
)

SAMPLE = (flip, missing_manifest, negative_epoch)
"""What is run by default; every kind of damage to every file is refused in tests/store."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, prefect_api, mlflow_template):
    """One run stopped at step 40, to be copied for each damage."""
    folder = tmp_path_factory.mktemp("stopped")
    drill = new_drill(folder / "run", prefect_api, mlflow_template, "tiny", steps=40)
    ended = drill.run()
    drill.close()
    assert ended.code == 0, ended.err
    return drill


@pytest.fixture
def at_40(stopped, tmp_path, mlflow_template):
    folder = tmp_path / "run"
    shutil.copytree(stopped.folder, folder)
    shutil.copy(mlflow_template, folder / "mlflow.db")  # it names the checkpoints of the run that was copied
    drill = Drill(folder, stopped.api, stopped.job | {"steps": 60})
    yield drill
    drill.close()


def test_every_kind_of_damage_on_both_tiers_is_named_and_walked_back_from(at_40, untouched):
    """Damage on both tiers, one kind after the other in one run: BC-003 (a), (b) and BC-005 (by kinds in one run)."""
    for folder in folders(at_40, LAST):
        flip(folder)
    for folder in folders(at_40, BEFORE):
        truncate(folder)
    ended = at_40.run()
    assert ended.code == 0, ended.err
    assert ended.final["resumed_from"] == 20
    assert sorted(ended.final["quarantined"]) == sorted(
        folder.as_uri() for name in (LAST, BEFORE) for folder in folders(at_40, name)
    )
    assert all(folder.exists() for name in (LAST, BEFORE) for folder in folders(at_40, name)), "evidence is kept"
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
    events = [json.loads(line) for line in (at_40.run_dir / "events.jsonl").read_text().splitlines()]
    reasons = [event["text"] for event in events if event["kind"] == "checkpoint.quarantined"]
    assert len(reasons) == 4
    assert all("rank-0" in reason for reason in reasons), "each names the file"


@pytest.mark.parametrize("damage", DAMAGES if ALL else SAMPLE, ids=lambda damage: damage.__name__)
def test_damage_on_the_near_tier_is_repaired_by_the_far_one(at_40, untouched, damage):
    """The copy on the persistent tier serves, so not one step is lost."""
    damage(folders(at_40, LAST)[0])
    ended = at_40.run()
    assert ended.code == 0, ended.err
    assert ended.final["resumed_from"] == 40
    assert ended.final["quarantined"] == [folders(at_40, LAST)[0].as_uri()]
    assert ended.final["weights"] == untouched(Shape()).final["weights"]


def test_nothing_starts_at_step_0_when_every_checkpoint_is_damaged(at_40):
    """BC-003 (c): the run ends failed, trains nothing and deletes nothing."""
    kept = [folder for name in ("step-00000020.a1", BEFORE, LAST) for folder in folders(at_40, name)]
    for folder in kept:
        flip(folder)
    ended = at_40.run()
    assert ended.code == 1
    assert "none verifies" in ended.err
    assert "Traceback" not in ended.err
    assert all(folder.exists() for folder in kept)
    assert len(list((at_40.run_dir / "attempts").glob("*.json"))) == 1


def test_a_hand_made_folder_and_another_runs_checkpoint_are_never_chosen(at_40, untouched):
    """BC-001: a higher number without a manifest is ignored and named; a foreign checkpoint is refused."""
    torn = folders(at_40, "step-00000050.a1")[0]
    torn.mkdir()
    shutil.copy(next(folders(at_40, LAST)[0].glob("*.safetensors")), torn)
    foreign = folders(at_40, "step-00000055.a1")[0]
    shutil.copytree(folders(at_40, LAST)[0], foreign)
    ended = at_40.run()
    assert ended.code == 0, ended.err
    assert ended.final["resumed_from"] == 40
    assert ended.final["quarantined"] == [foreign.as_uri()]
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
    events = [json.loads(line) for line in (at_40.run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["data"]["checkpoint"] for event in events if event["kind"] == "checkpoint.torn"][:1] == [torn.name]


def test_the_near_tier_may_be_lost_whole(at_40, untouched):
    shutil.rmtree(at_40.folder / "nvme")
    ended = at_40.run()
    assert ended.code == 0, ended.err
    assert ended.final["resumed_from"] == 40
    assert ended.final["weights"] == untouched(Shape()).final["weights"]


def test_a_late_copy_of_an_older_attempt_is_never_chosen(at_40, untouched):
    """Fencing: attempt 2 went back to 30, so attempt 1's step 40 belongs to a history that was left."""
    late = folders(at_40, LAST)
    away = [at_40.folder / f"late-{index}" for index in range(2)]
    for folder, place in zip(late, away, strict=True):
        folder.rename(place)
    (at_40.run_dir / "result.json").unlink()  # as if its flow had been killed before the end
    at_40.job["steps"] = 35
    went_back = at_40.run()
    assert (went_back.final["resumed_from"], went_back.final["step"]) == (30, 35), went_back.err
    for folder, place in zip(late, away, strict=True):
        place.rename(folder)
    at_40.job["steps"] = 60
    ended = at_40.run()
    assert ended.code == 0, ended.err
    assert ended.final["resumed_from"] == 35
    assert ended.final["weights"] == untouched(Shape()).final["weights"]


def test_weights_that_turn_nan_are_never_kept_and_end_in_a_sentence(make_drill):
    """Verified beside the next segment: set aside, walked back from twice, then given up; the good one is kept."""
    drill = make_drill(
        program=str(Path(__file__).with_name("nan.py")) + ":build", config={"at": 23}, limits={"train_floor": 60}
    )
    ended = drill.run()
    assert ended.code == 1
    assert ended.final["status"] == "failed"
    assert ended.final["checkpoint"].endswith("step-00000020.a1")
    assert (ended.final["attempts"], ended.final["restarts"]) == (3, 2)
    assert "mend the program" in ended.err
    assert "again and again" in ended.err
    assert "Traceback" not in ended.err
    steps = {uri.rpartition("/step-")[2].partition(".")[0] for uri in ended.final["quarantined"]}
    assert "00000030" in steps
    assert "00000020" not in steps
    drill.await_gone()


def test_a_checkpoint_that_only_mlflow_knows_is_used(stopped, tmp_path, untouched):
    """MLflow is asked first: both tiers lost their newest, and a copy stands where MLflow says."""
    folder = tmp_path / "run"
    shutil.copytree(stopped.folder, folder)
    drill = Drill(folder, stopped.api, stopped.job | {"steps": 60})
    try:
        for place in folders(drill, LAST):
            shutil.rmtree(place)
        ended = drill.run()
    finally:
        drill.close()
    assert ended.code == 0, ended.err
    assert ended.final["resumed_from"] == 40
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
