"""How often a run saves, from what its own files and the ledger tell."""

import time

import pytest
from rigs.told_run import ToldRun

from everstep.core.cadence import Bound
from everstep.core.checkpoint import SaveCost
from everstep.core.job import TrainJob
from everstep.core.ledger import Event
from everstep.core.reliability import Fleet, seen
from everstep.host import cadence, history
from everstep.host.ledger import Ledger
from everstep.store import jsonl


def job(**more):
    return TrainJob(name="digits", program="a:b", data={"source": "d"}, steps=10, ranks=8, **more)


def cost(places, *, attempt=1, step=1, copied=0.5, write=3.0):
    row = SaveCost(
        attempt=attempt,
        step=step,
        time=1.0,
        bytes=10,
        copy_seconds=copied,
        wait_seconds=0.0,
        fence_seconds=0.0,
        write_seconds=write,
    )
    jsonl.append(places.saves, [row.model_dump_json()])


@pytest.fixture
def pace(tmp_path):
    """Make a pacer for a run that is told; `events` gathers what it records."""
    made = []

    def make(ledger="", policy=None, **told):
        run = ToldRun(tmp_path / "run", **told)
        places = run.write()
        events = []
        uri = ledger or f"sqlite:///{tmp_path}/ledger.db"
        one = cadence.Pacer(
            job(checkpoint=policy or {}), places, uri, lambda kind, **data: events.append({"kind": kind} | data)
        )
        made.append(one)
        return one, places, events

    yield make
    for one in made:
        one.close()


def test_a_new_run_takes_its_first_save_early_to_measure_it(pace):
    one, _, events = pace(steps=0, standing=0, status=None)
    assert one.look().bound is Bound.first
    assert one.seconds == 60
    assert events[0]["kind"] == "cadence.chosen"
    assert "no save has been measured yet" in events[0]["text"]
    assert "assumed" in events[0]["inputs"]["recovery"]["source"]


def test_saves_that_were_never_measured_are_assumed_to_stall_for_a_second(pace):
    one, _, _ = pace()
    chosen = one.look()
    assert (chosen.bound, chosen.inputs.stall.seconds) == (Bound.longest, 1.0)
    assert "assumed" in chosen.inputs.stall.source


def test_the_stall_is_the_median_without_the_first_save_of_each_attempt(pace):
    one, places, _ = pace()
    cost(places, copied=9.0, write=30.0)
    assert one.look().inputs.stall.seconds == 9
    for attempt in (1, 2):
        for step, stall in enumerate((9.0, 0.2, 0.1, 0.4)):
            cost(places, attempt=attempt, step=step, copied=stall)
    inputs = one.look().inputs
    assert inputs.stall.seconds == pytest.approx(0.2)
    assert inputs.stall.source == "measured, the median of 7 saves"
    assert inputs.write.seconds == 3
    places.saves.write_text('torn\n{"schema_version": 9}\n[1]\n')
    assert one.look().inputs.write is None


def test_a_slow_copier_holds_the_rhythm_and_the_object_tier_does_not(pace):
    one, places, _ = pace(restarts=3)
    cost(places, copied=0.00001)
    rows = [("persistent", 8.0), ("object", 500.0)]
    jsonl.append(
        places.persistent / "copier.jsonl",
        [f'{{"kind": "checkpoint.durable", "tier": "{tier}", "seconds": {took}}}' for tier, took in rows] + ["{}", "3"],
    )
    chosen = one.look()
    assert chosen.inputs.copied.seconds == 8
    if chosen.bound is Bound.writer:
        assert chosen.seconds == 10


def test_recovery_and_detection_are_those_of_the_run(pace):
    one, places, _ = pace(restarts=3)
    one._attempt = 4
    past = one._read_past(4)
    assert past.detection.source == "measured, the mean of 3 failures of this run"
    assert past.detection.seconds == pytest.approx(0.6, abs=0.3)
    assert 1 < past.recovery.seconds < 10
    assert past.lived.node_hours == pytest.approx(history.read(places).account().buckets["productive"] / 3600, rel=0.3)


def test_a_choice_is_told_once_for_each_attempt_and_when_it_becomes_another(pace):
    one, places, events = pace()
    cost(places)
    one._attempt = 1
    for _ in range(3):
        one.look()
    one._attempt = 2
    one.look()
    cost(places, step=2, copied=0.00001)
    one.look()
    assert [event["kind"] for event in events] == ["cadence.chosen"] * 3
    assert events[2]["seconds"] < events[0]["seconds"] == events[1]["seconds"]
    assert set(events[0]["inputs"]) == {"stall", "write", "copied", "recovery", "detection", "failure", "saved"}


def attempt(number, hours, kind="attempt.ended", cause="killed", step=5, run="r", outcome="failed", since=1e9):
    begin = since
    data = {"outcome": outcome, "cause": {"kind": cause}, "last_seen": begin + 3600 * hours}
    told = {"job": "other", "run": run, "attempt": number}
    return [
        Event(id=f"{run}s{number}", time=begin, kind="attempt.started", step=0, data={"pids": [1] * 8}, **told),
        Event(id=f"{run}e{number}", time=begin + 3700 * hours, kind=kind, step=step, data=data, **told),
    ]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, (1, 10)),
        ({"cause": "hang"}, (1, 10)),
        ({"kind": "attempt.lost", "step": None}, (1, 10)),
        ({"outcome": "done", "cause": "none"}, (0, 10)),
        ({"cause": "user"}, (0, 10)),
        ({"cause": "space"}, (0, 10)),
        ({"step": 0}, (0, 0)),
        ({"hours": -1}, (0, 0)),
    ],
)
def test_what_counts_as_a_failure_of_the_fleet(how, expected):
    fleet = seen(attempt(1, **({"hours": 10} | how)))
    assert (fleet.failures, fleet.node_hours) == (expected[0], pytest.approx(expected[1]))


def test_ends_without_a_beginning_and_beginnings_without_an_end_do_not_count():
    assert seen(attempt(1, 10)[:1]) == seen(attempt(1, 10)[1:]) == Fleet()
    assert seen([*attempt(1, 10), *attempt(1, 10, run="s"), *attempt(1, 10)[1:]]).failures == 2


def test_the_fleet_is_asked_by_its_ledger(pace, tmp_path):
    uri = f"sqlite:///{tmp_path}/fleet.db"
    ledger = Ledger(uri, tmp_path / "journal.jsonl")
    for number in range(40):
        for event in attempt(number, hours=100, since=time.time() - 400_000):
            ledger.append(event)
    assert ledger.close(20)
    one, places, _ = pace(ledger=uri)
    cost(places)
    failure = one.look().inputs.failure
    assert "this ledger: 40 sudden ends in 4,000 node-hours" in failure.source
    assert failure.seconds == pytest.approx(131 * 3600, rel=0.05)


def test_a_ledger_that_does_not_answer_costs_nothing_but_what_it_knows(pace, tmp_path):
    (tmp_path / "broken.db").write_text("this is no database at all, and it is long enough to be seen as none" * 20)
    one, places, events = pace(ledger=f"sqlite:///{tmp_path}/broken.db")
    cost(places)
    assert one.look().inputs.failure.source.endswith("; the ledger does not answer now")
    assert [event["kind"] for event in events] == ["cadence.chosen"]


def test_the_thread_chooses_at_the_begin_and_when_a_save_was_measured(pace, monkeypatch):
    monkeypatch.setattr(cadence, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(cadence, "QUIET_SECONDS", 0.01)
    one, places, events = pace(steps=0, standing=0, status=None)
    one.begin(1)
    _await(lambda: one.seconds == 60)
    cost(places, copied=0.001, write=0.01)
    _await(lambda: one.chosen.bound is not Bound.first)
    assert [event["kind"] for event in events] == ["cadence.chosen", "cadence.chosen"]
    one.close()
    assert not one._thread.is_alive()


def test_a_run_directory_that_hangs_or_is_gone_is_told_once_and_the_rhythm_stays(pace, monkeypatch):
    monkeypatch.setattr(cadence, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(cadence, "QUIET_SECONDS", 0.01)
    one, places, events = pace()
    cost(places)
    one.begin(1)
    _await(lambda: one.seconds is not None)
    before = one.seconds

    def stale(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(cadence, "saves", stale)
    for _ in range(3):
        one.ask()
        time.sleep(0.05)
    _await(lambda: any(event["kind"] == "cadence.unknown" for event in events))
    assert [event["kind"] for event in events] == ["cadence.chosen", "cadence.unknown"]
    assert one.seconds == before


@pytest.mark.parametrize("policy", [{"every_steps": 5}, {"every_minutes": 5}])
def test_a_job_with_a_rhythm_of_its_own_is_left_alone(pace, policy):
    one, _, events = pace(policy=policy)
    one.begin(1)
    one.ask()
    one.close()
    assert (one.seconds, events) == (None, [])


def _await(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()
