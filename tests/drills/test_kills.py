"""Kills at every named point and at seeded random moments: the end has the same bits, and nothing is left behind."""

import os
import random
import signal

import plans
import pytest
from plans import Shape

from everstep.host import process

SAMPLE = (Shape(1, 0, 1), Shape(2, 2, 3), Shape(4, 0, 1), Shape(1, 0, 1, ballast=True))
ALL = "EVERSTEP_ALL" in os.environ


def finish(drill, *faults, most_runs: int = 6):
    """Run the job until it completes, as often as its flow is killed; the kills of a plan happen once."""
    flow = drill.start(*faults)
    for _ in range(most_runs):
        ended = drill.wait(flow)
        if ended.code != -signal.SIGKILL:
            return ended
        drill.await_gone()
        flow = drill.start(plan=drill.last_plan)
    raise AssertionError(f"still not done after {most_runs} flow runs")


def check(drill, ended, reference, shape) -> None:
    assert ended.code == 0, ended.err
    assert ended.final["status"] == "completed"
    assert ended.final["weights"] == reference.final["weights"]
    assert ended.final["quarantined"] == []
    plans.check_journal(drill, shape, reference.drill)
    assert sum(ended.final["buckets"].values()) == pytest.approx(drill.wall(), abs=1.0)
    drill.await_gone()


@pytest.mark.parametrize("shape", plans.SHAPES if ALL else SAMPLE, ids=str)
def test_a_kill_at_every_named_point_of_a_rank(make_drill, untouched, shape):
    drill = make_drill(**shape.job(), retries={"per_cause": 10})
    ended = finish(drill, *plans.every_rank_point(shape))
    assert drill.fired() == len(plans.RANK_POINTS)
    assert ended.final["restarts"] == len(plans.RANK_POINTS), ended.err
    check(drill, ended, untouched(shape), shape)


@pytest.mark.parametrize("shape", [Shape(1, 0, 1), Shape(2, 0, 1), Shape(1, 0, 1, ballast=True)], ids=str)
def test_a_kill_at_every_named_point_of_a_writer(make_drill, untouched, shape):
    drill = make_drill(**shape.job(pause=0.02))
    plan = [
        {"point": point, "hit": 1, "rank": 0 if index > 2 else shape.ranks - 1}
        for index, point in enumerate(plans.WRITER_POINTS)
    ]
    ended = finish(drill, *plan)
    assert drill.fired() == len(plan)
    assert ended.final["restarts"] == 0, "the writer's death is nothing to the ranks"
    check(drill, ended, untouched(shape), shape)


def test_a_kill_at_every_named_point_of_the_copier(make_drill, untouched):
    drill = make_drill(config={"pause": 0.03})
    ended = finish(drill, *({"point": point, "hit": 1} for point in plans.COPIER_POINTS))
    assert ended.code == 0, ended.err
    assert ended.final["restarts"] == 0, "the copier's death is nothing to the ranks"
    assert drill.fired() == len(plans.COPIER_POINTS)
    check(drill, ended, untouched(Shape()), Shape())


@pytest.mark.parametrize("point", plans.FLOW_POINTS)
def test_a_kill_at_every_named_point_of_the_flow(make_drill, untouched, point):
    drill = make_drill()
    ended = finish(drill, {"point": point, "hit": 1}, {"point": "train.mid_step", "hit": 31})
    check(drill, ended, untouched(Shape()), Shape())


@pytest.mark.parametrize("seed", range(200 if ALL else 2))
def test_seeded_kills_at_random_moments(make_drill, untouched, seed):
    """A rank, its writer, the copier, the flow, or all of them; up to three times in a run."""
    dice = random.Random(seed)
    shape = dice.choice(plans.SHAPES)
    drill = make_drill(**shape.job(pause=0.02), retries={"per_cause": 10})
    flow = drill.start(*plans.rank_plan(dice, shape, dice.randint(0, 2)))
    for _ in range(dice.randint(1, 3)):
        drill.await_step(dice.randint(0, 55), flow, give_up=False)
        victim = dice.choice(["rank", "writer", "copier", "flow", "all"])
        kill(drill, flow, victim, dice)
        if victim in ("flow", "all"):
            drill.wait(flow)
            drill.await_gone()
            flow = drill.start(plan=drill.last_plan)
    ended = drill.wait(flow)
    check(drill, ended, untouched(shape), shape)


def kill(drill, flow, victim: str, dice) -> None:
    """SIGKILL to whoever the dice choose; a victim that is gone already is no victim."""
    marked = process.marked(drill.token()) if drill.home.exists() and list(drill.home.glob("r*/run.json")) else []
    writers = [pid for pid in marked if "everstep.trainer.writer" in drill.command(pid)]
    ranks = [pid for pid in marked if "everstep.trainer" in drill.command(pid) and pid not in writers]
    copiers = [pid for pid in marked if "everstep.host.copier" in drill.command(pid)]
    victims = {
        "rank": ranks and [dice.choice(ranks)],
        "writer": writers and [dice.choice(writers)],
        "copier": copiers,
        "flow": [flow.pid],
        "all": [flow.pid, *marked],
    }[victim]
    for pid in victims or []:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
