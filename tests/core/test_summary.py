"""A report from facts: its numbers agree with each other, and its sentences with its numbers."""

import pytest

from everstep.core.checkpoint import AttemptClaim, Key, RunRecord, State, Structure
from everstep.core.chronicle import Chronicle, Held, Row
from everstep.core.curve import Curve
from everstep.core.job import Price
from everstep.core.ledger import Event
from everstep.core.summarise import COLUMNS, summarise, time_map
from everstep.core.summary import Curves, Facts, RunReport
from everstep.core.timeline import Bucket, Cut, Stretch, costs

BEGAN = 1_790_000_000.0
B = Bucket
TIMES = [
    (0, B.queued, 0, 0),
    (10, B.startup, 0, 0),
    (20, B.productive, 1, 0),
    (220, B.productive, 1, 200),
    (260, B.detect, 1, 0),
    (264, B.recover, 1, 0),
    (270, B.restore, 2, 200),
    (280, B.productive, 2, 200),
    (480, B.finalize, 2, 0),
]
STRUCTURE = Structure(
    batch_size=8, model={}, parameters=(), world_size=4, threads=2, torch_version="2.13.0", processor="CPU"
)


def event(time: float, kind: str, attempt: int = 0, step: int | None = None, text: str = "", **data: object) -> Event:
    return Event(id=f"{time}{kind}", time=BEGAN + time, kind=kind, attempt=attempt, step=step, text=text, data=data)


def claim(attempt: int, resumed_from: int, time: float) -> AttemptClaim:
    return AttemptClaim(attempt=attempt, resumed_from=resumed_from, host="node", pid=1, boot="b", time=BEGAN + time)


def chronicle(**fields: object) -> Chronicle:
    record = RunRecord(
        name="digits", run="r1", fingerprint="f", dataset_fingerprint="d", created=BEGAN, program="a:b", seed=0,
        config={}, threads=1,
    )  # fmt: skip
    standard = {
        "record": record,
        "events": (
            event(219, "checkpoint.saved", 1, 200, checkpoint="step-00000200.a1", tier="local"),
            event(220, "checkpoint.durable", 1, 200, checkpoint="step-00000200.a1", tier="persistent"),
            event(230, "checkpoint.saved", 1, 220, checkpoint="step-00000220.a1", tier="local"),
            event(231, "checkpoint.quarantined", 1, 220, checkpoint="step-00000220.a1", tier="local"),
            event(264, "attempt.ended", 1, 240, "rank 3 was killed by signal 9", outcome="failed"),
            event(264, "decision.made", 1, 240, next="restart"),
            event(480, "attempt.ended", 2, 400, outcome="done"),
            event(490, "flow.ended", 2, status="completed"),
        ),
        "claims": {1: claim(1, 0, 15), 2: claim(2, 200, 266)},
        "results": (),
        "checkpoints": (
            Held(Key(200, 1), "local", State.verified, bytes=1000),
            Held(Key(200, 1), "persistent", State.durable, bytes=1000),
            Held(Key(220, 1), "local", State.quarantined, reason="bad digest", bytes=1000),
        ),
        "cuts": tuple(Cut(BEGAN + time, order, *rest) for order, (time, *rest) in enumerate(TIMES)),
        "resumed": {1: 0, 2: 200},
        "newest": Row(2, 400, BEGAN + 480, {"samples": 3200.0}, {}),
        "evaluated": Row(2, 400, BEGAN + 480, {}, {"accuracy": 0.9}),
        "last_sign": BEGAN + 490,
    }
    return Chronicle(**(standard | fields))


def report(told: Chronicle | None = None, **fields: object) -> RunReport:
    standard = {
        "made": BEGAN,
        "structure": STRUCTURE,
        "gpus": True,
        "price": Price(per_gpu_hour=9.0),
        "job": {"steps": 400},
    }
    return summarise(Facts(chronicle=told or chronicle(), **(standard | fields)))


def test_a_stranger_reads_what_happened():
    assert report().headline == (
        "Completed: step 400 of 400.",
        "How good it is: accuracy 0.9.",
        "It took 8 min 10 s and 0.53 GPU-hours, which cost 4.80 USD; 83.3 % of the time trained the model.",
        "What went wrong: 1 restart cost 1 min 00 s (0.60 USD); 1 checkpoint did not prove right and is set aside.",
    )


def test_an_untroubled_run_says_so():
    told = report(
        chronicle(
            checkpoints=(), events=(event(490, "flow.ended", 1, status="completed"),), claims={1: claim(1, 0, 15)}
        )
    )
    assert told.headline[-1] == "Nothing went wrong."


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("stopped", "Stopped on request at step 400 of 400; it can go on from there."),
        ("failed", "Failed at step 400 of 400."),
        ("running", "Running: step 400 of 400."),
        ("killed", ("Killed: its flow vanished at step 400 of 400; the last sign of life was 2026-09-21 14:21:30 UTC; "
         "it can go on from its last checkpoint.")),
    ],
)  # fmt: skip
def test_other_ends(status, says):
    assert report(status=status).headline[0] == says


def test_every_second_is_in_one_bucket_and_the_columns_hold_them_all():
    told = report()
    assert sum(told.time.buckets.values()) == pytest.approx(told.time.wall)
    spent = told.time_map.seconds * sum(sum(column.values()) for column in told.time_map.columns)
    assert spent == pytest.approx(told.time.wall)
    assert all(sum(column.values()) == pytest.approx(1.0) for column in told.time_map.columns)


def test_the_numbers_of_the_json_line_are_taken_where_there_is_one():
    told = report(final={"status": "stopped", "step": 390, "buckets": {"productive": 90.0, "idle": 10.0}})
    assert (told.status, told.step, told.time.wall, told.time.ettr) == ("stopped", 390, 100.0, 0.9)
    assert told.cost.charged_seconds == 90.0


def test_a_restart_says_how_soon_it_was_noticed_what_it_lost_and_what_it_cost():
    first, second = report().attempts
    assert (first.outcome, first.cause, first.decision) == ("failed", "rank 3 was killed by signal 9", "restart")
    assert first.detect_seconds == 4.0
    assert (first.lost_work_seconds, first.lost_steps) == (40.0, 40)
    assert first.cost_seconds == sum(costs(chronicle().line()).values()) == 60.0
    assert first.money == pytest.approx(60 * 4 / 3600 * 9)
    assert (second.outcome, second.cost_seconds, second.money) == ("done", 0.0, 0.0)


def test_causes_are_counted_and_numbers_make_no_other_cause():
    ends = [
        (1, "rank 3 was killed by signal 9"),
        (2, "rank 1 was killed by signal 9"),
        (3, "no space"),
        (4, "no space"),
    ]
    told = chronicle(
        claims={number: claim(number, 0, number) for number, _ in ends},
        events=tuple(event(number, "attempt.ended", number, 1, text, outcome="failed") for number, text in ends),
    )
    assert [(one.text, one.times) for one in report(told).causes] == [
        ("rank # was killed by signal #", 2),
        ("no space", 2),
    ]


def test_checkpoints_have_their_tiers_states_and_times():
    good, bad = report().checkpoints
    assert (good.tiers, good.saved, good.bytes) == ({"local": "verified", "persistent": "durable"}, BEGAN + 219, 1000)
    assert (bad.tiers, bad.reason) == ({"local": "quarantined"}, "bad digest")
    assert report().checkpoint_counts == {
        "saved": 2, "verified": 0, "durable": 1, "quarantined": 1, "removed": 0, "promoted": 0, "standing": 2,
    }  # fmt: skip


def test_a_tier_that_is_no_folder_is_known_from_events():
    far = {"checkpoint": "step-00000200.a1", "tier": "object"}
    told = chronicle(events=(*chronicle().events, event(300, "checkpoint.durable", 2, 200, **far)))
    assert report(told).checkpoints[0].tiers["object"] == "durable"
    removed = chronicle(events=(*told.events, event(400, "checkpoint.removed", 2, None, **far)))
    assert "object" not in report(removed).checkpoints[0].tiers


def test_promotion_and_gates():
    promotion = {"status": "production", "version": "3", "checkpoint": "step-00000200.a1"}
    events = (
        event(5, "gate.data", ok=True, checked=12, suite="defaults"),
        event(6, "gate.data", text="a file is empty", ok=False),
        event(232, "gate.closed", 1, 230, "step-00000220.a1 is damaged"),
    )
    told = report(
        chronicle(events=(*chronicle().events, *events)),
        final={"promotion": promotion},
        links={"gate.data": "data-docs/index.html"},
    )
    assert [(one.gate, one.passed, one.link) for one in told.gates] == [
        ("data", True, "data-docs/index.html"),
        ("data", False, "data-docs/index.html"),
        ("verification", False, ""),
    ]
    assert [one.text for one in told.gates[:2]] == ["12 expectations hold, suite: defaults", "a file is empty"]
    assert [one.folder for one in told.checkpoints if one.promoted] == ["step-00000200.a1"]
    assert told.promotion["version"] == "3"
    assert "2 gates closed" in told.headline[-1]


def test_without_a_price_there_is_no_money_and_without_gpus_there_are_rank_hours():
    told = report(price=None, gpus=False)
    assert (told.cost.total, told.cost.restarts, told.attempts[0].money) == (None, None, None)
    assert "0.53 rank-hours; " in told.headline[2]


def test_a_run_of_which_nothing_is_known_has_a_report():
    nothing = Chronicle(None, (), {}, (), (), (), {}, None, None, 0.0)
    told = summarise(Facts(chronicle=nothing, made=BEGAN))
    assert told.headline == ("Running: step 0.",)
    assert told.time_map.columns == ()


def test_a_loss_that_was_no_number_is_told():
    told = report(curves=Curves(loss=Curve(rows=9, odd=(3.0,), odd_rows=2), last_loss=float("nan")))
    assert told.last_loss == "nan"
    assert "loss nan" in told.headline[1]
    assert "the loss was not a number in 2 steps" in told.headline[-1]
    assert RunReport.model_validate_json(told.to_json()) == told
    assert "NaN" not in told.to_json()


def test_a_time_line_of_very_many_pieces_keeps_its_columns():
    line = [Stretch(at / 10, (at + 1) / 10, B.productive if at % 2 else B.detect, 1, 0) for at in range(20_000)]
    told = time_map(line)
    assert len(told.columns) == COLUMNS
    assert all(column["productive"] == pytest.approx(0.5, abs=0.02) for column in told.columns)


def test_very_long_lists_are_cut_and_counted():
    claims = {number: claim(number, 0, number) for number in range(1, 1501)}
    marks = tuple(
        event(step, "checkpoint.saved", 1, step, checkpoint=Key(step, 1).folder, tier="local")
        for step in range(1, 9001)
    )
    told = report(chronicle(claims=claims, events=marks))
    assert (len(told.attempts), told.attempts_in_all, told.attempts[-1].attempt) == (1000, 1500, 1500)
    assert len(told.checkpoint_marks) <= 4000
    assert told.checkpoint_counts["saved"] == 9000


def test_the_metric_by_which_a_checkpoint_is_best_comes_first():
    job = {"steps": 400, "checkpoint": {"best": {"metric": "b", "mode": "min"}}}
    evaluated = Row(2, 400, BEGAN + 480, {}, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert list(report(chronicle(evaluated=evaluated), job=job).metrics) == ["b", "a", "c"]
