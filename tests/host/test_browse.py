"""The table of a run's checkpoints, made from real folders: for a terminal, a notebook, Prefect, and as a data frame."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric

from everstep import open_run
from everstep.core.checkpoint import Key, Verification
from everstep.store import checkpoint, jsonl, marks


@pytest.fixture
def run(tmp_path):
    """Checkpoints at steps 10, 20 and 30 on two tiers; the one at 20 is quarantined locally, that at 10 is pinned."""
    places = fabric.places(tmp_path)
    places.structure.write_text(fabric.structure().to_json())
    fabric.claim(places, 1)
    places.run_record.write_text("{}")
    (places.persistent / "owner.json").write_text(json.dumps({"tiers": {"local": str(places.local), "object": None}}))
    best = {"checkpoint": {"best": {"metric": "accuracy", "mode": "max"}}}
    (places.persistent / "job.json").write_text(json.dumps({"schema_version": 1, "job": best}))
    for step in (10, 20, 30):
        folder = fabric.checkpoint(places.checkpoint("local", Key(step, 1)), metrics={"accuracy": 1 - step / 100})
        shutil.copytree(folder, places.checkpoint("persistent", Key(step, 1)))
        for tier in ("local", "persistent"):
            found = Verification(ok=True, manifest_digest=checkpoint.manifest_digest(folder))
            marks.verified(places, folder.name, tier, found)
        marks.durable(places, folder.name, "persistent", checkpoint.manifest_digest(folder))
    marks.quarantine(places, "step-00000020.a1", "local", "rank-0.json <is> gone")
    return places.persistent


def test_newest_first_with_all_that_is_known(run):
    open_run(run).pin(10)
    newest, bad, pinned = open_run(run).checkpoints()
    assert (newest.step, newest.attempt, newest.tiers) == (30, 1, {"local": "verified", "persistent": "durable"})
    assert (newest.metric_name, newest.metric, newest.saved) == ("accuracy", 0.7, 1030.0)
    assert newest.bytes > 1000
    assert newest.kept["persistent"] == "the newest verified"
    assert (bad.tiers["local"], bad.why) == ("quarantined", "rank-0.json <is> gone")
    assert (pinned.pinned, "pinned" in pinned.why) == (True, True)


def test_it_prints_in_columns(run):
    table = open_run(run).checkpoints()
    title, head, *lines = str(table).splitlines()
    assert title.startswith(f"{fabric.JOB} / {fabric.RUN}: running")
    assert head.split() == ["checkpoint", "local", "persistent", "size", "age", "accuracy", "why"]
    assert [line.split()[0] for line in lines] == [f"step-000000{step}.a1" for step in (30, 20, 10)]
    assert len({line.index(word) for line, word in zip(lines, ("durable",) * 3, strict=True)}) == 1, "aligned"
    assert repr(table) == str(table)


def test_a_notebook_shows_it_and_nothing_in_it_is_markup(run):
    shown = open_run(run).checkpoints()._repr_html_()
    assert shown.count("<tr>") == 4
    assert "rank-0.json &lt;is&gt; gone" in shown
    assert "<is>" not in shown


def test_the_frame_the_rows_and_a_part(run):
    table = open_run(run).checkpoints()
    assert list(table.frame["accuracy"]) == [0.7, 0.8, 0.9]
    assert table.frame.loc["step-00000020.a1"]["local"] == "quarantined"
    assert json.dumps(table.rows()), "plain values, as Prefect takes them"
    assert table.rows()[0]["persistent"] == "durable"
    assert [row.step for row in table[1:]] == [20, 10]


def test_a_run_without_checkpoints(run):
    shutil.rmtree(run / "checkpoints")
    (run / "owner.json").unlink()
    shutil.rmtree(run / "marks")
    table = open_run(run).checkpoints()
    assert (len(table), len(table.frame)) == (0, 0)
    assert "no checkpoint yet" in str(table)


def test_what_scrubs_found_stands_among_the_events(run):
    rows = [
        {"id": str(at), "time": at, "kind": kind, "job": "j", "run": "r"}
        for at, kind in ((1.0, "flow.started"), (3.0, "flow.ended"))
    ]
    jsonl.append(run / "events.jsonl", map(json.dumps, rows))
    jsonl.append(run / "scrub.jsonl", [json.dumps({"id": "s", "time": 2.0, "kind": "scrub.rot"})])
    assert [event.kind for event in open_run(run).events] == ["flow.started", "scrub.rot", "flow.ended"]
    assert open_run(run).chronicle.last_sign == 3.0, "a scrub is no sign of life of the training"
