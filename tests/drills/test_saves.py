"""Saves that fail or are killed: nothing is called saved or durable that is not, and nothing good is deleted early."""

import json

from plans import Shape


def events(drill, *kinds):
    rows = [json.loads(line) for line in (drill.run_dir / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] in kinds]


def test_with_one_kept_checkpoint_the_old_one_stays_until_the_new_one_is_verified(make_drill, untouched):
    """BC-010: SIGKILL in the middle of the save of step 30; step 20 is still there with keep: 1."""
    drill = make_drill(checkpoint={"every_steps": 10, "keep": 1})
    ended = drill.run({"point": "save.mid_file", "hit": 3})
    assert ended.code == 0, ended.err
    resumed = [event["data"]["resumed_from"] for event in events(drill, "attempt.claimed")]
    assert resumed == [0, 20]
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
    kept = sorted(path.name for path in (drill.run_dir / "checkpoints").iterdir())
    assert kept == ["step-00000060.a2"]


def test_a_save_that_fails_is_told_and_never_called_saved(make_drill, untouched):
    """BC-013: training goes on, one event tells of the failure, and `durable` never comes before the bytes."""
    drill = make_drill(config={"pause": 0.02})
    ended = drill.run({"point": "save.begin", "hit": 1, "do": "errno:5"})
    assert ended.code == 0, ended.err
    assert ended.final["restarts"] == 0
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
    failed = events(drill, "checkpoint.failed")
    assert [event["step"] for event in failed] == [10]
    assert "Input/output error" in failed[0]["text"]
    told = events(drill, "checkpoint.saved", "checkpoint.verified", "checkpoint.durable")
    assert 10 not in {event["step"] for event in told}
    for event in events(drill, "checkpoint.durable"):
        manifest = drill.run_dir / "checkpoints" / event["data"]["checkpoint"] / "manifest.json"
        if manifest.exists():
            assert event["time"] >= manifest.stat().st_mtime
    assert {event["step"] for event in events(drill, "checkpoint.durable")} >= {60}


def test_a_long_segment_with_many_saves_keeps_the_newest_three(make_drill, untouched):
    drill = make_drill(config={"pause": 0.1}, segment_steps=60, checkpoint={"every_steps": 4})
    flow = drill.start()
    drill.await_step(57, flow)
    held = [len(list((folder / "checkpoints").glob("step-*"))) for folder in (drill.run_dir, drill.local_dir)]
    ended = drill.wait(flow)
    assert ended.code == 0, ended.err
    assert max(held) <= 8, held
    assert ended.final["weights"] == untouched(Shape()).final["weights"]
    for folder in (drill.run_dir, drill.local_dir):
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
            f"step-{step:08d}.a1" for step in (52, 56, 60)
        ]
