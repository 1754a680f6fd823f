"""checkpoint.every: auto, through the whole flow: the lease carries the choice, the event and the report its reasons."""

import json

import pytest


@pytest.mark.sampled
def test_a_run_chooses_its_own_rhythm_and_says_why(make_desk):
    desk = make_desk(checkpoint={"every": "auto"}, steps=60, segment_steps=20, config={"pause": 0.1})
    one = desk.start()
    desk.await_step(25, one)
    lease = json.loads((desk.run_dir / "lease.json").read_bytes())
    ended = desk.wait(one)
    assert ended.code == 0, ended.err
    events = [json.loads(line) for line in (desk.run_dir / "events.jsonl").read_text().splitlines()]
    chosen = [event for event in events if event["kind"] == "cadence.chosen"]
    assert chosen
    assert lease["save_every_seconds"] in [event["data"]["seconds"] for event in chosen]
    assert chosen[0]["data"]["bound"] == "first"
    stall = chosen[-1]["data"]["inputs"]["stall"]
    assert stall["source"].startswith("measured, the median of ")
    costs = [json.loads(line) for line in (desk.run_dir / "saves.jsonl").read_text().splitlines()]
    assert (
        0 <= stall["seconds"] <= max(row["copy_seconds"] + row["wait_seconds"] + row["fence_seconds"] for row in costs)
    )
    report = json.loads((desk.run_dir / "report.json").read_bytes())
    assert report["cadence"]["chosen"]["seconds"] == chosen[-1]["data"]["seconds"]
    assert "How often it saves" in (desk.run_dir / "report.html").read_text()
    assert "How often it saves" in (desk.run_dir / "report.txt").read_text()
