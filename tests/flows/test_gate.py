"""The data gate in a run: what it refuses is not trained on, and what a flow that dies in it leaves is nothing."""

import json
import os
import shutil
import signal
import time

import pytest

from everstep.host import process


def events(desk) -> list[dict]:
    return [json.loads(line) for line in (desk.run_dir / "events.jsonl").read_text().splitlines()]


@pytest.mark.sampled
def test_data_that_is_refused_is_not_trained_on_and_mended_data_is(make_desk, ask):
    desk = make_desk("gated", steps=10)
    (desk.folder / "data" / "hollow.csv").touch()
    refused = desk.run()
    assert refused.code == 2, refused.err
    words = refused.err.splitlines()[-1]
    assert words.startswith("data.gate: 'hollow.csv': expect_column_values_to_be_between of 'size' (min_value=1)")
    assert ": 0; fill or remove the empty file" in words
    assert (refused.final["status"], refused.final["attempts"], refused.final["checkpoint"]) == ("failed", 0, None)
    check_what_it_left(desk, words, refused.final)
    tasks = ask(
        "task_runs/filter", {"task_runs": {"name": {"like_": "check-data"}}, "sort": "EXPECTED_START_TIME_DESC"}
    )
    assert [one["state"]["type"] for one in tasks[:1]] == ["FAILED"]

    (desk.folder / "data" / "hollow.csv").write_text("id,price\n1,0.5\n")
    mended = desk.run()
    assert mended.code == 0, mended.err
    assert mended.final["status"] == "completed"
    assert mended.final["run"] != refused.final["run"], "other data is another run"
    assert mended.final["buckets"]["gate"] > 0
    told = [event for event in events(desk) if event["kind"] == "gate.data"]
    assert [event["data"]["ok"] for event in told] == [True]
    assert (desk.run_dir / "data-docs" / "index.html").is_file()
    desk.await_gone()


def check_what_it_left(desk, words, final):
    (told,) = [event for event in events(desk) if event["kind"] == "gate.data"]
    assert told["text"] == words
    assert told["severity"] == "high"
    assert told["data"]["findings"][0]["files"] == ["hollow.csv"]
    assert json.loads((desk.run_dir / "gate.json").read_bytes())["findings"]
    assert (desk.run_dir / "data-docs" / "index.html").is_file()
    assert list((desk.run_dir / "attempts").iterdir()) == []
    assert list((desk.run_dir / "checkpoints").iterdir()) == []
    assert final["buckets"]["gate"] > 0
    assert final["buckets"]["productive"] == 0
    desk.await_gone()


@pytest.mark.sampled
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM])
def test_a_flow_that_ends_in_the_gate_leaves_nothing_running(make_desk, way):
    desk = make_desk("midgate")
    shutil.rmtree(desk.folder / "nvme" / "gates")
    flow = desk.start(**desk.plan({"point": "gate.judge", "do": "sleep:60"}))
    until = time.monotonic() + 90
    while not (gates := [pid for pid in desk.left() if "/gate" in mark(pid)]) and time.monotonic() < until:
        assert flow.poll() is None, flow.communicate()
        time.sleep(0.05)
    assert gates
    while not list(desk.folder.glob("faults-*.fired")) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(flow.pid, way)
    ended = desk.wait(flow, timeout=40)
    assert ended.code in (1, -9)
    desk.await_gone(30)
    assert list((desk.run_dir / "attempts").iterdir()) == []


def mark(pid: int) -> str:
    return process._mark(f"/proc/{pid}")


@pytest.mark.parametrize("text", ["{", '{"expectations": []}'])
def test_a_suite_that_is_none_is_answered_before_prefect_is_imported(make_desk, text):
    desk = make_desk("suited", server="none", data={"source": "data", "gate": {"suite": "mine.json"}})
    (desk.folder / "mine.json").write_text(text)
    ended = desk.run()
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("data.gate.suite: ")
    assert "mine.json" in ended.err
    assert not (desk.folder / "persistent").exists()
