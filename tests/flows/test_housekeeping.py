"""Housekeeping never stops training, and never changes what is trained."""

import errno
import json

import pytest


@pytest.mark.sampled
def test_no_failure_of_housekeeping_stops_training(make_desk, completed):
    """BC-022: the removal of old checkpoints fails at the first save, in three ways; each is one warning."""
    desk = make_desk(steps=60, segment_steps=30)
    kinds = (errno.ENOENT, errno.EACCES, errno.ESTALE)
    plan = desk.plan(
        *({"point": "retention.apply", "hit": turn, "do": f"errno:{number}"} for turn, number in enumerate(kinds, 1))
    )
    ended = desk.run(**plan)
    assert ended.code == 0, ended.err
    assert (ended.final["restarts"], ended.final["step"]) == (0, 60)
    assert ended.final["weights"] == completed[1].final["weights"]
    events = [json.loads(line) for line in (desk.run_dir / "events.jsonl").read_text().splitlines()]
    warned = [event for event in events if event["kind"] == "retention.failed"]
    assert [event["severity"] for event in warned] == ["medium"] * 3
    assert [f"Errno {number}" in event["text"] for number, event in zip(kinds, warned, strict=True)] == [True] * 3
    standing = sorted(path.name for path in (desk.run_dir / "checkpoints").iterdir())
    assert standing == ["step-00000050.a1", "step-00000055.a1", "step-00000060.a1"]
