"""A run's directory read back: torn lines and missing files cost only themselves."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from everstep.core.checkpoint import AttemptClaim, Key, Manifest, Mark, RunRecord, State
from everstep.core.dataset import FileEntry
from everstep.core.ledger import Event
from everstep.core.segment import Heartbeat, Outcome, Phase, PhaseMark, SegmentResult
from everstep.core.timeline import Bucket
from everstep.host import history
from everstep.store import checkpoint, jsonl, marks
from everstep.store.layout import RunPlaces


@pytest.fixture
def places(tmp_path: Path) -> RunPlaces:
    places = RunPlaces.of(str(tmp_path / "local"), str(tmp_path / "persistent"), None, "job", "run")
    for folder in (places.persistent / "attempts", places.local):
        folder.mkdir(parents=True)
    return places


def event(
    places: RunPlaces, time: float, kind: str, attempt: int = 0, step: int | None = None, text: str = "", **data: Any
) -> None:
    made = Event(id=f"{time}-{kind}", time=time, kind=kind, attempt=attempt, step=step, text=text, data=data)
    jsonl.append(places.events, [made.model_dump_json()])


def phase(places: RunPlaces, time: float, attempt: int, phase: Phase, step: int) -> None:
    mark = PhaseMark(attempt=attempt, time=time, phase=phase, step=step)
    jsonl.append(places.phases, [mark.model_dump_json()])


def row(places: RunPlaces, attempt: int, step: int, **more: Any) -> None:
    made = {"attempt": attempt, "step": step, "time": 100.0 + step, "loss": attempt + step / 100, "samples": 4 * step}
    jsonl.append(places.metrics, [json.dumps(made | more)])


def claim(places: RunPlaces, attempt: int, resumed_from: int) -> None:
    made = AttemptClaim(attempt=attempt, resumed_from=resumed_from, host="node", pid=1, boot="b", time=100.0 * attempt)
    places.claim(attempt).write_text(made.to_json())


def save(places: RunPlaces, key: Key, tier: str, *, commit: bool = True, **states: str) -> None:
    folder = places.checkpoint(tier, key)
    folder.mkdir(parents=True)
    (folder / "rank-0.json").write_bytes(b"{}")
    if commit:
        entry = FileEntry(path="rank-0.json", size=2, blake3="0" * 64)
        manifest = Manifest(
            job="job",
            run="run",
            attempt=key.attempt,
            step=key.step,
            world_size=1,
            parent_step=0,
            samples=1,
            time=1.0,
            files=(entry,),
        )
        (folder / "manifest.json").write_text(manifest.to_json())
    for state, reason in states.items():
        digest = checkpoint.manifest_digest(folder) or ""
        marks.write(
            places,
            Mark(checkpoint=key.folder, tier=tier, state=State(state), time=1.0, reason=reason, manifest_digest=digest),
        )


def test_an_empty_directory_is_an_empty_chronicle(places: RunPlaces) -> None:
    found = history.read(places)
    assert (found.events, found.claims, found.checkpoints, found.newest, found.last_metrics) == ((), {}, (), None, {})
    assert found.account().wall == 0.0
    assert found.status == "running"


def test_a_directory_that_is_not_there_is_empty_too(tmp_path: Path) -> None:
    found = history.read(RunPlaces.of(str(tmp_path / "l"), str(tmp_path / "p"), None, "job", "run"))
    assert found.record is None


def test_accepted_rows_are_those_of_the_last_attempt_that_got_past_the_step(places: RunPlaces) -> None:
    for attempt, resumed_from, last in ((1, 0, 17), (2, 10, 14), (3, 10, 30)):
        claim(places, attempt, resumed_from)
        for step in range(resumed_from + 1, last + 1):
            row(places, attempt, step)
    found = history.rows(places)
    assert [one.step for one in found] == list(range(1, 31))
    assert {one.attempt for one in found if one.step <= 10} == {1}
    assert {one.attempt for one in found if one.step > 10} == {3}


def test_rows_of_a_history_that_was_left_do_not_count_even_if_nobody_came_so_far_again(places: RunPlaces) -> None:
    claim(places, 1, 0)
    claim(places, 2, 10)
    for step in range(1, 18):
        row(places, 1, step)
    row(places, 2, 11)
    assert [one.step for one in history.rows(places)] == list(range(1, 12))


def test_torn_and_foreign_lines_cost_only_themselves(places: RunPlaces) -> None:
    event(places, 1.0, "run.created")
    with places.events.open("ab") as file:
        file.write(b'{"id": "torn\n\xff\xfe\n{"id": "x", "time": 1, "kind": "UPPER"}\n[]\n')
    event(places, 2.0, "flow.started")
    row(places, 1, 1)
    with places.metrics.open("ab") as file:
        file.write(
            b'{"attempt": 1\n{"attempt": 1, "step": "x", "time": 1}\n[]\nnull\n{"attempt": 1, "step": 1e999, "time": 1}\n'
        )
    row(places, 1, 2, loss="nan", eval={"accuracy": 0.5, "name": "x"})
    with places.phases.open("ab") as file:
        file.write(b'{"attempt": 1}\n')
    places.claim(9).write_text("{torn")
    found = history.read(places)
    assert [one.kind for one in found.events] == ["run.created", "flow.started"]
    assert found.newest is not None
    assert found.newest.step == 2
    assert found.newest.figures["loss"] != found.newest.figures["loss"]
    assert found.last_metrics == {"accuracy": 0.5}
    assert found.claims == {}


def test_of_very_long_metrics_only_the_newest_part_is_read(places: RunPlaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "RECENT_BYTES", 1000)
    for step in range(1, 101):
        row(places, 1, step)
    assert history.read(places).newest.step == 100  # type: ignore[union-attr]
    assert len(history.rows(places)) == 100


def test_checkpoints_are_listed_with_their_state_on_each_tier(places: RunPlaces) -> None:
    claim(places, 1, 0)
    claim(places, 2, 10)
    save(places, Key(10, 1), "local", verified="")
    save(places, Key(10, 1), "persistent", verified="", durable="")
    save(places, Key(20, 1), "local", quarantined="rank-0.json differs", verified="")
    save(places, Key(20, 2), "local")
    save(places, Key(30, 2), "local", commit=False)
    gone = Mark(checkpoint="step-00000040.a2", tier="local", state=State.quarantined, time=1.0, reason="was zeros")
    marks.write(places, gone)
    found = [
        (one.key.folder, one.tier, one.state, one.torn, one.gone, one.abandoned, one.reason)
        for one in history.read(places).checkpoints
    ]
    assert found == [
        ("step-00000010.a1", "local", State.verified, False, False, False, ""),
        ("step-00000010.a1", "persistent", State.durable, False, False, False, ""),
        ("step-00000020.a1", "local", State.quarantined, False, False, True, "rank-0.json differs"),
        ("step-00000020.a2", "local", State.saved, False, False, False, ""),
        ("step-00000030.a2", "local", State.saved, True, False, False, ""),
        ("step-00000040.a2", "local", State.quarantined, False, True, False, "was zeros"),
    ]


def told(places: RunPlaces) -> None:
    """Attempt 1 trains 10 s, saves, trains 5 s and is killed; attempt 2 repeats them and finishes."""
    event(places, 100.0, "run.created")
    event(places, 101.0, "flow.started")
    event(places, 102.0, "attempt.claimed", 1, resumed_from=0)
    claim(places, 1, 0)
    phase(places, 103.0, 1, Phase.train, 0)
    phase(places, 113.0, 1, Phase.save, 10)
    phase(places, 114.0, 1, Phase.train, 10)
    event(places, 120.0, "attempt.noticed", 1)
    event(
        places,
        121.0,
        "attempt.ended",
        1,
        15,
        "rank 0 was killed by signal 9",
        outcome="failed",
        last_seen=119.0,
        committed_step=10,
    )
    event(places, 121.0, "decision.made", 1, next="restart")
    event(places, 122.0, "attempt.claimed", 2, resumed_from=10)
    claim(places, 2, 10)
    phase(places, 123.0, 2, Phase.restore, 10)
    phase(places, 125.0, 2, Phase.train, 10)
    for step in range(1, 16):
        row(places, 1, step, time=103.0 + step + (step > 10))
    for step in range(11, 21):
        row(places, 2, step, time=115.0 + step)


def test_the_account_of_a_run(places: RunPlaces) -> None:
    told(places)
    event(places, 135.0, "flow.finalizing", 2)
    event(places, 136.0, "flow.ended", 2, status="completed")
    found = history.read(places)
    spent = found.account()
    assert {bucket: seconds for bucket, seconds in spent.buckets.items() if seconds} == {
        Bucket.queued: 1.0,
        Bucket.startup: 2.0,
        Bucket.productive: 20.0,
        Bucket.save_stall: 1.0,
        Bucket.lost_work: 5.0,
        Bucket.detect: 1.0,
        Bucket.recover: 3.0,
        Bucket.restore: 2.0,
        Bucket.finalize: 1.0,
    }
    assert (spent.wall, spent.ettr) == (36.0, pytest.approx(20 / 35))
    assert found.status == "completed"
    assert found.samples_per_second == pytest.approx(80 / 20)
    first, second = found.attempts
    assert (first.outcome, first.cause, first.step, first.decision) == (
        "failed",
        "rank 0 was killed by signal 9",
        15,
        "restart",
    )
    assert first.cost == pytest.approx(5 + 1 + 3 + 2)
    assert (second.resumed_from, second.outcome, second.cost) == (10, "running", 0.0)


def test_a_heartbeat_is_a_sign_of_life(places: RunPlaces) -> None:
    told(places)
    assert history.read(places).last_sign == 135.0
    beat = Heartbeat(attempt=2, rank=0, pid=1, time=137.0, phase=Phase.train, step=20, progress=1)
    places.heartbeat(0).write_text(beat.to_json())
    found = history.read(places)
    assert found.last_sign == 137.0
    assert found.account().buckets[Bucket.productive] == 22.0


def test_the_newest_evaluation_that_counts(places: RunPlaces) -> None:
    told(places)
    for number, attempt, step, accuracy in ((1, 1, 10, 0.5), (2, 1, 15, 0.9), (3, 2, 14, 0.7)):
        made = SegmentResult(
            attempt=attempt,
            segment=number,
            step=step,
            outcome=Outcome.done,
            checkpoint="c",
            time=1.0,
            metrics={"accuracy": accuracy},
        )
        places.result(number).parent.mkdir(parents=True)
        places.result(number).write_text(made.to_json())
    assert history.read(places).last_metrics == {"accuracy": 0.7}
    row(places, 2, 20, eval={"accuracy": 0.8})
    assert history.read(places).last_metrics == {"accuracy": 0.8}


def test_the_runs_record_is_read(places: RunPlaces) -> None:
    made = RunRecord(
        name="job",
        run="run",
        fingerprint="f",
        dataset_fingerprint="d",
        created=1.0,
        program="a:b",
        seed=0,
        config={},
        threads=1,
    )
    places.run_record.write_text(made.to_json())
    assert history.read(places).record == made


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_passed_over(places: RunPlaces) -> None:
    claim(places, 1, 0)
    places.claim(1).chmod(0)
    assert history.claims(places) == {}
