"""The first error is what is told, whatever the other ranks are waiting in."""

import json
import time

import pytest

RAISES = "import os\nif os.environ['RANK'] == '1' and calls == 12:\n    raise ValueError('row 412')"


@pytest.mark.sampled
def test_an_exception_on_one_rank_is_told_with_its_rank_while_the_other_waits_in_a_collective(make_desk):
    """Case BC-066: no save in the failure path waits for a rank that is gone; the checkpoint before it stands."""
    desk = make_desk("first", ranks=2, segment_steps=20, retries={"per_job": 0}, config={"loss": [RAISES]})
    ended = desk.wait(desk.start(), timeout=300)
    told = time.time()
    assert ended.code == 1, ended.err
    assert "rank 1" in ended.err
    assert "ValueError: row 412" in ended.err
    assert ended.final["step"] == 10
    rows = [json.loads(line) for line in (desk.run_dir / "events.jsonl").read_text().splitlines()]
    (event,) = [row for row in rows if row["kind"] == "attempt.ended"]
    assert (event["data"]["cause"]["rank"], event["step"]) == (1, 11)
    (noticed,) = [row["time"] for row in rows if row["kind"] == "attempt.noticed"]
    assert event["time"] - noticed < 15
    assert told - event["time"] < 120
    desk.await_gone()
