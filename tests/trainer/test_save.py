"""Saving: one publisher, nothing half under a final name, and a disk that refuses does not end the training."""

import errno

from everstep.store import jsonl
from everstep.trainer.reading import load_checkpoint


def left_over(run):
    return [str(path) for path in run.places.local.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]


def test_one_publisher(make_run):
    """BC-008: four ranks, twenty saves, delays before the publish point: twenty checkpoints, nothing left over."""
    run = make_run(batch_size=8)
    delays = [
        {"point": "save.before_manifest", "hit": hit, "do": f"sleep:{hit * 7 % 5 / 100}"} for hit in range(1, 21)
    ] + [
        {"point": "save.begin", "hit": hit, "rank": rank, "do": f"sleep:{(hit * rank) % 4 / 100}"}
        for hit in range(1, 21, 3)
        for rank in range(4)
    ]
    gang = run.start(ranks=4, lease=(20,), steps=20, save_every_steps=1, faults=delays)
    assert gang.wait() == [0] * 4, gang.logs()
    assert run.committed() == [f"step-{step:08d}.a1" for step in range(1, 21)]
    assert left_over(run) == []
    assert {end.saved_step for end in map(gang.end, range(4))} == {20}


def test_no_space_for_one_save(make_run):
    """A save in the middle of a segment fails: it is told, training goes on, the next one succeeds."""
    run = make_run()
    gang = run.start(faults=[{"point": "save.mid_file", "hit": 1, "do": f"errno:{errno.ENOSPC}"}])
    assert gang.wait() == [0], gang.logs()
    assert run.committed() == [f"step-{step:08d}.a1" for step in range(20, 70, 10)]
    (row,) = jsonl.read(run.places.persistent / "save-errors.jsonl")
    assert (row["step"], "No space" in row["error"]) == (10, True)
    assert left_over(run) == []
    assert not run.places.checkpoints("local").joinpath("step-00000010.a1").exists()


def test_one_rank_cannot_write(make_run):
    """No rank's part is published without the others'."""
    run = make_run()
    gang = run.start(ranks=2, faults=[{"point": "save.begin", "hit": 1, "rank": 1, "do": f"errno:{errno.EIO}"}])
    assert gang.wait() == [0, 0], gang.logs()
    assert run.committed()[0] == "step-00000020.a1"
    assert not run.places.checkpoints("local").joinpath("step-00000010.a1").exists()


def test_a_segment_end_is_tried_again(make_run):
    run = make_run()
    faults = [{"point": "save.rename", "hit": hit, "do": f"errno:{errno.EIO}"} for hit in (2, 3)]
    assert run.run(faults=faults).wait() == [0]
    assert run.has(20)
    assert [row["step"] for row in jsonl.read(run.places.persistent / "save-errors.jsonl")] == [20, 20]
    assert run.result(1).checkpoint == "step-00000020.a1"


def test_no_space_at_a_segment_end_ends_the_attempt(make_run):
    run = make_run()
    faults = [{"point": "save.begin", "hit": hit, "do": f"errno:{errno.ENOSPC}"} for hit in range(2, 12)]
    gang = run.run(faults=faults, lease=(20,))
    assert gang.wait() == [1]
    end = gang.end()
    assert (end.cause.kind, end.cause.key, end.saved_step) == ("space", "ENOSPC", 10)
    load_checkpoint(run.places.checkpoints("local") / "step-00000010.a1")


def test_a_slow_disk_holds_back_the_training_not_more(make_run):
    """At most one snapshot waits; the stall is phase `save`."""
    run = make_run()
    faults = [{"point": "save.begin", "hit": hit, "do": "sleep:0.05"} for hit in range(1, 7)]
    assert run.run(faults=faults, save_every_steps=2, steps=12, lease=(12,)).wait() == [0]
    assert run.committed() == [f"step-{step:08d}.a1" for step in range(2, 14, 2)]


def test_metrics_are_on_disk_before_the_checkpoint_is(make_run):
    run = make_run()
    gang = run.start(faults=[{"point": "save.after_commit", "hit": 3}])
    assert gang.wait() == [-9]
    assert set(run.rows([(1, 0)])) >= set(range(1, 31))
