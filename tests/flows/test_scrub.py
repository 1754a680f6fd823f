"""`python -m flows.scrub` as a user and a schedule meet it: its last line, exit code, table in Prefect, and the ledger."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric

from everstep.core.checkpoint import Key, Verification
from everstep.host import ledger
from everstep.store import checkpoint, marks

FILE = "rank-0-1.safetensors"
SCRUB = "flows.scrub"


@pytest.fixture
def stored(make_desk):
    """A desk with a run of two proven checkpoints on two tiers."""
    desk = make_desk(server="shared")
    places = fabric.places(desk.folder / "made")
    places.structure.write_text(fabric.structure().to_json())
    fabric.claim(places, 1)
    places.run_record.write_text("{}")
    (places.persistent / "owner.json").write_text(json.dumps({"tiers": {"local": str(places.local), "object": None}}))
    for step in (10, 20):
        folder = fabric.checkpoint(places.checkpoint("local", Key(step, 1)))
        shutil.copytree(folder, places.checkpoint("persistent", Key(step, 1)))
        for tier in ("local", "persistent"):
            found = Verification(ok=True, manifest_digest=checkpoint.manifest_digest(folder))
            marks.verified(places, folder.name, tier, found)
    return desk, places


def spoil(folder):
    data = bytearray((folder / FILE).read_bytes())
    data[-5] ^= 4
    (folder / FILE).write_bytes(data)


@pytest.mark.sampled
def test_rot_is_mended_shown_and_told_and_what_is_left_is_a_failure(stored, ask):
    desk, places = stored
    spoil(places.checkpoint("persistent", Key(10, 1)))
    home = places.persistent.parent.parent
    ended = desk.run([str(home)], module=SCRUB)
    assert ended.code == 0, ended.err
    assert (ended.final["status"], ended.final["repaired"], ended.final["sound"]) == ("completed", 1, 3)
    (shown,) = ask("artifacts/filter", {"artifacts": {"key": {"any_": ["scrub"]}}})
    (row,) = json.loads(shown["data"])
    assert (row["outcome"], row["tier"], row["file"], row["repaired_from"]) == ("repaired", "persistent", FILE, "local")
    assert "1 run, 4 copies" in shown["description"]
    kinds = [event.kind for event in ledger.events(f"sqlite:///{home}/ledger.db")]
    assert kinds == ["scrub.started", "scrub.rot", "scrub.repaired", "scrub.finished"]
    for tier in ("local", "persistent"):
        spoil(places.checkpoint(tier, Key(20, 1)))
    ended = desk.run([str(places.persistent)], module=SCRUB)
    assert ended.code == 1
    assert "step-00000020.a1 of job/r001-0123abcd is rotten on the" in ended.err
    assert ended.final["rotten"] == 2
    (run,) = ask("flow_runs/filter", {"flow_runs": {"id": {"any_": [shown["flow_run_id"]]}}})
    assert run["state_type"] == "COMPLETED"


def test_what_a_user_can_mend_is_one_sentence(stored):
    desk, _ = stored
    ended = desk.run([str(desk.folder / "data")], module=SCRUB)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "holds no run" in ended.err


def test_the_deployment_scrubs_every_day():
    file = yaml.safe_load((Path(__file__).parents[2] / "deployments" / "prefect.yaml").read_text())
    (one,) = [one for one in file["deployments"] if one["name"] == "scrub"]
    assert one["entrypoint"] == "flows/scrub.py:scrub"
    assert [schedule["cron"].split()[2:] for schedule in one["schedules"]] == [["*", "*", "*"]]
    assert one["concurrency_limit"]["limit"] == 1
