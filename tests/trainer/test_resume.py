"""A run that is killed and resumed ends with the same bits as one that was never touched."""

import itertools
import json

import pytest

from everstep.store import checkpoint as committed
from everstep.trainer.reading import Reading

SHAPES = {
    "one rank": {},
    "workers": {"workers": 2, "noisy": True},
    "accumulation": {"accumulation": 3, "noisy": True, "clip": 1.0},
    "two ranks": {"ranks": 2, "noisy": True},
    "two ranks, workers, accumulation": {"ranks": 2, "workers": 2, "accumulation": 2, "noisy": True, "batch_size": 9},
    "four ranks": {"ranks": 4, "norm": True, "batch_size": 16, "drop_last": True},
}


def killed(make_run, plans, ranks=1, **config):
    """A run whose attempts are hurt by `plans` in turn; the last one ends it. Returns it and where attempts began.

    A plan with `committed` holds the rank at its point until that step is committed; then all ranks are killed.
    """
    run = make_run("killed", **config)
    began = []
    for attempt, plan in enumerate([*plans, None], start=1):
        last = run.committed()[-1] if run.committed() else None
        began.append(int(last[5:13]) if last else 0)
        committed = (plan or {}).pop("committed", None)
        if committed is not None:
            plan["do"] = "sleep:60"
        gang = run.start(attempt, last, ranks, faults=[plan] if plan else None)
        if plan:
            run.until(gang.dead) if committed is None else run.held(attempt, committed)
            gang.kill()
            gang.wait()
        else:
            assert gang.wait() == [0] * ranks, gang.logs()
    return run, began


def exact(same, reference, run, began, ranks=1):
    rows, journals, weights = reference
    attempts = list(enumerate(began, start=1))
    assert run.rows(attempts) == rows
    for rank in range(ranks):
        assert run.journal(rank, began) == journals[rank]
    assert same(run.weights(run.committed()[-1]), weights)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_killed_in_mid_epoch_and_again_after_the_resume(untouched, same, make_run, shape):
    """BC-036, BC-042: order of samples and random numbers go on where they were, also after a second resume."""
    config = dict(SHAPES[shape])
    ranks = config.pop("ranks", 1)
    last = ranks - 1
    plans = [
        {"point": "train.step_end", "hit": 33, "rank": last, "committed": 30},
        {"point": "train.mid_step", "hit": 17, "committed": 40},
    ]
    run, began = killed(make_run, plans, ranks, **config)
    assert began == [0, 30, 40]
    exact(same, untouched(ranks, **config), run, began, ranks)


@pytest.mark.parametrize(
    ("point", "hit", "resumes"),
    [
        ("train.first_step", 1, 0),
        ("train.mid_step", 1, 0),
        ("save.begin", 3, 20),
        ("save.mid_file", 3, 20),
        ("save.before_manifest", 3, 20),
        ("save.rename", 3, 20),
        ("save.after_commit", 3, 30),
        ("segment.end", 1, 20),
        ("run.end", 1, 60),
    ],
)
def test_killed_at_each_point(untouched, same, make_run, point, hit, resumes):
    """BC-006: whatever has a final name is whole; the checkpoint before is untouched; the end is the same."""
    run, began = killed(make_run, [{"point": point, "hit": hit}])
    assert began == [0, resumes]
    for folder in run.committed():
        run.weights(folder)  # checks every byte against the manifest
    exact(same, untouched(), run, began)


@pytest.mark.parametrize("step", [5, 20, 25, 59])
def test_learning_rate_after_a_resume(untouched, same, make_run, step):
    """BC-045: the learning rate is the same at every step (`exact` compares the rows)."""
    before = (step - 1) // 10 * 10
    run, began = killed(make_run, [{"point": "train.step_end", "hit": step, "committed": before}])
    assert began == [0, before]
    exact(same, untouched(), run, began)


def test_resumed_before_any_step(untouched, same, make_run):
    """BC-045: a checkpoint of step 0 is a checkpoint."""
    run = make_run()
    run.lease(1, stop=True)
    gang = run.run(1, lease=())
    assert (gang.end().outcome, gang.end().saved_step) == ("stopped", 0)
    assert run.run(2, "step-00000000.a1").wait() == [0]
    exact(same, untouched(), run, [0, 0])


def test_saved_at_the_end_of_an_epoch(untouched, same, make_run):
    """BC-038: an epoch-end checkpoint goes on with the first batch of the next epoch; each sample once an epoch."""
    run = make_run()
    hold(run, 1, 27, 25, save_every_steps=25)
    run.lease(2, stop=True)
    second = run.start(2, "step-00000025.a1", lease=())
    assert second.wait() == [0]
    assert (second.end().outcome, second.end().saved_step) == ("stopped", 25)
    assert run.run(3, "step-00000025.a1").wait() == [0]
    exact(same, untouched(), run, [0, 25, 25])
    ids = list(itertools.chain.from_iterable(row["ids"] for row in run.journal(0, [0, 25, 25])))
    assert sorted(ids[:97]) == sorted(ids[97:194]) == list(range(97))


def test_accumulated_micro_batches(untouched, same, make_run):
    """BC-048: four micro-batches of one sample a step; none is seen twice or left out."""
    config = {"accumulation": 4, "batch_size": 4}
    run, began = killed(make_run, [{"point": "train.mid_step", "hit": 12, "committed": 10}], **config)
    assert began == [0, 10]
    exact(same, untouched(**config), run, began)
    micro = run.journal(0, began)
    assert all(len(row["ids"]) == 1 for row in micro)
    assert sorted(row["ids"][0] for row in micro[:97]) == list(range(97))


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_another_number_of_workers(untouched, same, make_run, before, after):
    """The position is samples consumed, and random numbers are keyed on the sample: workers do not matter."""
    run = make_run("changed", workers=before, noisy=True)
    hold(run, 1, 33, 30)
    run.config["workers"] = after
    assert run.run(2, "step-00000030.a1").wait() == [0]
    exact(same, untouched(noisy=True), run, [0, 30])


def test_another_number_of_ranks(untouched, same, make_run):
    """Samples, schedule and counters are kept in mid-epoch; bits are not (sums differ)."""
    rows, (journal,), _ = untouched()
    run = make_run("changed")
    hold(run, 1, 33, 30, ranks=2)
    assert run.run(2, "step-00000030.a1").wait() == [0], run.gangs[-1].logs()
    mine = run.rows([(1, 0), (2, 30)])
    for key in ("step", "samples", "epoch", "lr"):
        assert [row[key] for row in mine.values()] == [row[key] for row in rows.values()]
    ids = {step: [] for step in rows}
    for row in [*run.parts(0)[0], *run.parts(1)[0]]:
        ids[row["step"]] += row["ids"] if row["step"] <= 30 else []
    for row in run.parts(0)[1]:
        ids[row["step"]] += row["ids"]
    assert list(ids.values()) == [row["ids"] for row in journal]


def test_evaluation_after_a_resume(untouched, same, make_run):
    """BC-041: it always covers the full set, gives the same values, and disturbs nothing."""
    config = {"draws": True, "noisy": True}
    reference = make_run("untouched", **config)
    assert reference.run(evaluate_every_steps=15).wait() == [0]
    run = make_run("killed", **config)
    hold(run, 1, 17, 10, evaluate_every_steps=15)
    assert run.run(2, "step-00000010.a1", evaluate_every_steps=15).wait() == [0]
    rows, kept = reference.rows([(1, 0)]), run.rows([(1, 0), (2, 10)])
    assert kept == rows
    assert [step for step, row in rows.items() if "eval" in row] == [15, 30, 45, 60]
    assert all(row["eval"]["rows"] == 97 for row in rows.values() if "eval" in row)
    plain = make_run("plain", noisy=True)
    plain.run(evaluate_every_steps=15)
    assert same(plain.weights("step-00000060.a1"), run.weights("step-00000060.a2"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_patience_survives_restarts(make_run, ranks):
    """BC-050: a flat metric, patience 3, evaluated every 5 steps: over after the third bad one in total (the fourth)."""
    run = make_run(flat=True, patience=3)
    hold(run, 1, 13, 10, ranks, evaluate_every_steps=5)
    gang = run.run(2, "step-00000010.a1", ranks, evaluate_every_steps=5)
    assert gang.wait() == [0] * ranks
    end = gang.end()
    assert (end.outcome, end.step, end.saved_step, end.finished_early) == ("done", 20, 20, True)
    again = run.run(3, "step-00000020.a2", ranks, evaluate_every_steps=5)
    assert (again.end().outcome, again.end().step, again.end().finished_early) == ("done", 20, True)


def test_helpers_are_as_saved_just_before_the_first_step(make_run):
    """BC-053: set-up wipes no restored helper: what is captured before the first step equals the checkpoint."""
    run = make_run(noisy=True)
    hold(run, 1, 13, 10, evaluate_every_steps=5)
    run.config["dump"] = str(run.folder / "dump.json")
    run.run(2, "step-00000010.a1")
    folder = run.places.checkpoints("local") / "step-00000010.a1"
    kept = Reading(folder, committed.read_manifest(folder)).part(0).state
    dumped = json.loads((run.folder / "dump.json").read_text())
    assert dumped["patience"] == kept["state"]["patience"]
    assert len(dumped["patience"]["seen"]) == 2
    assert dumped["scheduler"] == repr(kept["scheduler"])
    assert dumped["exp_avg"] == kept["optimizer"]["state"][0]["exp_avg"].tolist()


def hold(run, attempt, step, committed, ranks=1, **more):
    """Train until `step` is done, wait until `committed` is committed, and kill."""
    last = ranks - 1
    faults = [{"point": "train.step_end", "hit": step, "rank": last, "do": "sleep:60"}]
    gang = run.start(attempt, ranks=ranks, faults=faults, **more)
    run.held(attempt, committed)
    gang.kill()
    gang.wait()
