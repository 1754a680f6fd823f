"""The page for the engineer on call."""

from everstep.core.checkpoint import AttemptClaim, Key, RunRecord, State
from everstep.core.chronicle import Chronicle, Held, Row
from everstep.core.ledger import Event
from everstep.core.segment import SegmentResult
from everstep.core.timeline import Bucket, Cut
from everstep.report.text import WIDTH, render

B = Bucket
TIMES = [
    (0, B.queued, 0, 0),
    (4, B.startup, 0, 0),
    (12, B.productive, 1, 0),
    (212, B.save_stall, 1, 200),
    (212.4, B.productive, 1, 200),
    (260, B.detect, 1, 0),
    (260.6, B.recover, 1, 0),
    (262, B.restore, 2, 200),
    (263, B.productive, 2, 200),
    (463, B.save_stall, 2, 400),
    (463.5, B.finalize, 2, 0),
]


def event(attempt: int, kind: str, step: int | None = None, text: str = "", **data: object) -> Event:
    return Event(id="x", time=1.0, kind=kind, attempt=attempt, step=step, text=text, data=data)


def claim(attempt: int, resumed_from: int) -> AttemptClaim:
    return AttemptClaim(attempt=attempt, resumed_from=resumed_from, host="node", pid=1, boot="b", time=1.0)


def chronicle(**fields: object) -> Chronicle:
    record = RunRecord(
        name="digits",
        run="3f2a90c1",
        fingerprint="f",
        dataset_fingerprint="d",
        created=1_790_000_000.0,
        program="everstep.programs.digits:build",
        seed=0,
        config={},
        threads=1,
    )
    result = SegmentResult(
        attempt=2, segment=2, step=400, outcome="done", checkpoint="c", time=1.0, metrics={"accuracy": 0.97431}
    )
    events = (
        event(1, "attempt.ended", 247, "rank 0 was killed by signal 9", outcome="failed"),
        event(1, "decision.made", 247, next="restart"),
        event(2, "attempt.ended", 400, outcome="done"),
        event(2, "flow.ended", status="completed"),
    )
    standard = {
        "record": record,
        "events": events,
        "claims": {1: claim(1, 0), 2: claim(2, 200)},
        "results": (result,),
        "checkpoints": (
            Held(Key(200, 1), "local", State.verified, bytes=1_234_567),
            Held(Key(200, 1), "persistent", State.durable, bytes=1_234_567),
            Held(
                Key(240, 1),
                "local",
                State.quarantined,
                reason="rank-0.safetensors: digest differs",
                abandoned=True,
                bytes=1_234_567,
            ),
            Held(Key(400, 2), "local", State.saved, bytes=1_234_567),
            Held(Key(420, 2), "local", State.saved, torn=True),
        ),
        "cuts": tuple(
            Cut(1_790_000_000.0 + time, order, bucket, attempt, step)
            for order, (time, bucket, attempt, step) in enumerate(TIMES)
        ),
        "resumed": {1: 0, 2: 200},
        "newest": Row(2, 400, 1.0, {"samples": 25_600.0, "loss": 0.1}, {}),
        "evaluated": None,
        "last_sign": 1_790_000_465.0,
    }
    return Chronicle(**(standard | fields))


PAGE = """\
Everstep run digits / 3f2a90c1
==============================
status       completed at step 400
program      everstep.programs.digits:build
began        2026-09-21 14:13:20 UTC
lasted       7 min 45 s
restarts     1, which cost 51 s
speed        64.0 samples/s while training
evaluation   accuracy 0.9743

Where the time went
-------------------
  queued              4.0 s   0.9 %  #                             asked for, not begun
  startup             8.0 s   1.7 %  #                             starting processes, first compile
  restore             1.0 s   0.2 %  #                             loading a checkpoint
  productive        400.0 s  86.0 %  ############################  training that counts
  save_stall          0.9 s   0.2 %  #                             training held up by a save
  detect              0.6 s   0.1 %  #                             dead, not yet noticed
  recover             1.4 s   0.3 %  #                             noticed, not yet training again
  lost_work          47.6 s  10.2 %  ###                           training that was thrown away
  finalize            1.5 s   0.3 %  #                             last copies and proofs
  wall              465.0 s 100.0 %

  ETTR = productive / (wall - queued) = 400.0 / (465.0 - 4.0) = 0.8677

Attempts
--------
  no  from step  to step  ended   cost    why, and what followed
  1   0          247      failed  50.6 s  rank 0 was killed by signal 9 -> restart
  2   200        400      done    -

  Cost = work thrown away, then the time until training went on; 51 s in all.

Checkpoints
-----------
  checkpoint        local          persistent  size
  step-00000200.a1  verified       durable     1.2 MB
  step-00000240.a1  quarantined    -           1.2 MB  left behind by a later attempt
  step-00000400.a2  saved          -           1.2 MB
  step-00000420.a2  not committed  -

Set aside, never to be chosen
-----------------------------
  step-00000240.a1 on local: rank-0.safetensors: digest differs
"""


def test_the_page() -> None:
    assert render(chronicle()) == PAGE
    assert all(len(line) <= WIDTH for line in PAGE.splitlines())


def test_the_json_line_and_the_page_say_the_same_numbers() -> None:
    final = {"status": "stopped", "step": 390, "buckets": {"productive": 90.0, "idle": 10.0}, "checkpoint": "file:///c"}
    page = render(chronicle(), final)
    assert "stopped at step 390" in page
    assert "90.0 / (100.0 - 0.0) = 0.9000" in page
    assert "file:///c" in page


def test_a_failed_run_says_first_why() -> None:
    ended = event(2, "attempt.ended", 300, "loss is nan at step 300", outcome="failed")
    page = render(chronicle(events=(ended, event(2, "flow.ended", status="failed"))))
    assert "failed at step 400: loss is nan at step 300" in page.splitlines()[2]


def test_a_run_of_which_nothing_is_known_has_a_page() -> None:
    nothing = Chronicle(None, (), {}, (), (), (), {}, None, None, 0.0)
    assert render(nothing) == "Everstep run unknown run\n========================\nstatus       running at step 0\n"


def test_long_lists_show_the_newest_and_count_the_rest() -> None:
    held = tuple(Held(Key(step, 1), "local", State.verified) for step in range(1, 31))
    page = render(chronicle(checkpoints=held, claims={number: claim(number, 0) for number in range(1, 101)}))
    assert "Checkpoints (the newest; 18 older ones are not listed)" in page
    assert "Attempts (the newest; 88 older ones are not listed)" in page
    assert "step-00000030.a1" in page
    assert "step-00000018.a1" not in page
