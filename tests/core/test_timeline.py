"""Time accounting: every second in one bucket, whatever was killed and in whatever order it is told."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.cutting import StepDone, cuts, resumed
from everstep.core.ledger import Event
from everstep.core.segment import Phase, PhaseMark
from everstep.core.timeline import Account, Bucket, Cut, account, costs, left_at, stretches

KINDS = [
    "run.created",
    "flow.started",
    "stage.started",
    "stage.finished",
    "attempt.lost",
    "attempt.claimed",
    "attempt.started",
    "attempt.noticed",
    "attempt.ended",
    "decision.made",
    "segment.finished",
    "checkpoint.saved",
    "lease.extended",
    "gate.closed",
    "stop.requested",
    "flow.stopping",
    "flow.finalizing",
    "flow.ended",
    "copier.restarted",
    "tracking.away",
]


@dataclass
class Story:
    """Tells a run with a clock of its own, and keeps the true account as it goes."""

    now: float = 1_000_000.0
    events: list[Event] = field(default_factory=list)
    marks: list[PhaseMark] = field(default_factory=list)
    rows: list[StepDone] = field(default_factory=list)
    truth: dict[Bucket, float] = field(default_factory=lambda: dict.fromkeys(Bucket, 0.0))
    attempt: int = 0

    def event(self, kind: str, attempt: int | None = None, **data: Any) -> "Story":
        number = self.attempt if attempt is None else attempt
        self.events.append(Event(id=str(len(self.events)), time=self.now, kind=kind, attempt=number, data=data))
        return self

    def phase(self, phase: Phase, step: int = 0) -> "Story":
        self.marks.append(PhaseMark(attempt=self.attempt, time=self.now, phase=phase, step=step))
        return self

    def spend(self, bucket: Bucket, seconds: float) -> "Story":
        self.truth[bucket] += seconds
        self.now += seconds
        return self

    def account(self, *, with_rows: bool = False) -> Account:
        line = stretches(cuts(self.events, self.marks, self.rows if with_rows else ()), self.now, resumed(self.events))
        return account(line)

    def check(self, *, with_rows: bool = False) -> None:
        found = self.account(with_rows=with_rows)
        told = {bucket: seconds for bucket, seconds in self.truth.items() if seconds}
        assert {bucket: seconds for bucket, seconds in found.buckets.items() if seconds > 1e-6} == pytest.approx(told)
        assert found.wall == pytest.approx(sum(told.values()))


def begun(story: Story | None = None) -> Story:
    """A run up to its first trained step."""
    story = story or Story()
    story.event("run.created", queued_since=story.now).spend(Bucket.queued, 5)
    story.event("flow.started").spend(Bucket.startup, 1).event("stage.started").spend(Bucket.stage, 3)
    story.event("stage.finished").spend(Bucket.startup, 2)
    return claimed(story, 0).phase(Phase.compile).spend(Bucket.startup, 1).phase(Phase.train)


def claimed(story: Story, step: int, starting: Bucket = Bucket.startup) -> Story:
    story.attempt += 1
    story.event("attempt.claimed", resumed_from=step).spend(starting, 0.5)
    story.event("attempt.started").spend(starting, 0.5)
    story.phase(Phase.start).spend(starting, 2)
    return story.phase(Phase.restore, step).spend(Bucket.restore, 1) if step else story


def killed(story: Story, committed: int, last_seen: float | None = None, **data: Any) -> Story:
    seen = story.now if last_seen is None else last_seen
    story.spend(Bucket.detect, 0.75).event("attempt.noticed").spend(Bucket.recover, 0.25)
    story.event("attempt.ended", outcome="failed", last_seen=seen, committed_step=committed, **data)
    return story.event("decision.made", next="restart").spend(Bucket.recover, 0.25)


def finished(story: Story) -> Story:
    story.phase(Phase.stop, 40).spend(Bucket.stop, 0.5).event("attempt.ended", outcome="done", committed_step=40)
    story.event("decision.made", next="finish").spend(Bucket.finalize, 1)
    story.event("flow.finalizing").spend(Bucket.finalize, 2)
    return story.event("flow.ended", status="completed")


def test_a_run_without_faults() -> None:
    story = begun().spend(Bucket.productive, 20).phase(Phase.save, 20).spend(Bucket.save_stall, 0.5)
    story.phase(Phase.eval, 20).spend(Bucket.eval, 2).phase(Phase.wait, 20).spend(Bucket.gate, 1)
    finished(story.phase(Phase.train, 20).spend(Bucket.productive, 20)).check()
    assert story.account().ettr == pytest.approx(40 / (story.now - 1_000_000 - 5))


def test_training_after_the_last_commit_is_lost_and_only_that() -> None:
    story = begun().spend(Bucket.productive, 20).phase(Phase.save, 20).spend(Bucket.save_stall, 1)
    killed(story.phase(Phase.train, 20).spend(Bucket.lost_work, 7), 20)
    finished(claimed(story, 20, Bucket.recover).phase(Phase.train, 20).spend(Bucket.productive, 25)).check()


def test_a_restart_counts_as_recovery_and_its_restore_as_restore() -> None:
    story = killed(begun().spend(Bucket.lost_work, 5), 0)
    claimed(story, 0, Bucket.recover).phase(Phase.compile).spend(Bucket.recover, 3)
    finished(story.phase(Phase.train).spend(Bucket.productive, 25)).check()


def test_a_second_death_before_the_first_step_stays_recovery() -> None:
    story = killed(begun().spend(Bucket.lost_work, 5), 0)
    killed(claimed(story, 0, Bucket.recover), 0)
    finished(claimed(story, 0, Bucket.recover).phase(Phase.train).spend(Bucket.productive, 9)).check()


def test_walking_far_back_loses_the_work_of_earlier_attempts_too() -> None:
    story = begun().spend(Bucket.productive, 10).phase(Phase.save, 10).spend(Bucket.save_stall, 1)
    killed(story.phase(Phase.train, 10).spend(Bucket.lost_work, 4), 10)
    claimed(story, 10, Bucket.recover).phase(Phase.train, 10).spend(Bucket.lost_work, 6)
    killed(
        story.phase(Phase.save, 20).spend(Bucket.save_stall, 1).phase(Phase.train, 20).spend(Bucket.lost_work, 2), 20
    )
    finished(claimed(story, 10, Bucket.recover).phase(Phase.train, 10).spend(Bucket.productive, 30)).check()


def test_a_stop_and_a_later_flow_run() -> None:
    story = begun().spend(Bucket.productive, 10).event("flow.stopping").spend(Bucket.stop, 1)
    story.phase(Phase.save, 11).spend(Bucket.save_stall, 2).phase(Phase.stop, 11).spend(Bucket.stop, 0.5)
    story.event("attempt.ended", outcome="stopped", committed_step=11).spend(Bucket.stop, 0.5)
    story.event("flow.finalizing").spend(Bucket.finalize, 1).event("flow.ended", status="stopped")
    story.spend(Bucket.idle, 3600).event("flow.started").spend(Bucket.startup, 2)
    finished(claimed(story, 11).phase(Phase.train, 11).spend(Bucket.productive, 10)).check()


def test_a_flow_that_vanished_with_all_its_children() -> None:
    story = begun().spend(Bucket.productive, 10).phase(Phase.save, 10).spend(Bucket.save_stall, 1)
    story.phase(Phase.train, 10).spend(Bucket.lost_work, 4)
    died = story.now
    story.spend(Bucket.detect, 600).event("flow.started").spend(Bucket.recover, 1)
    story.event("stage.started").spend(Bucket.stage, 1).event("stage.finished").spend(Bucket.recover, 1)
    story.event("attempt.lost", last_seen=died).spend(Bucket.recover, 1)
    finished(claimed(story, 10, Bucket.recover).phase(Phase.train, 10).spend(Bucket.productive, 20)).check()


def test_a_child_that_outlives_its_flow_counts_as_it_is() -> None:
    story = begun().spend(Bucket.productive, 10).phase(Phase.save, 12).spend(Bucket.save_stall, 2)
    story.phase(Phase.stop, 12).spend(Bucket.stop, 1)
    died = story.now
    story.spend(Bucket.detect, 60).event("flow.started").spend(Bucket.recover, 1).event("attempt.lost", last_seen=died)
    finished(claimed(story, 12, Bucket.recover).phase(Phase.train, 12).spend(Bucket.productive, 20)).check()


def test_a_flow_that_vanished_before_any_attempt() -> None:
    story = Story().event("run.created").event("flow.started").spend(Bucket.startup, 2).event("stage.started")
    story.spend(Bucket.detect, 100).event("flow.started").spend(Bucket.recover, 1)
    finished(claimed(story, 0, Bucket.recover).phase(Phase.train).spend(Bucket.productive, 5)).check()


def test_without_any_other_sign_a_row_of_metrics_says_how_long_a_vanished_attempt_lived() -> None:
    story = begun().spend(Bucket.productive, 10)
    story.rows = [StepDone(1, step, story.now - 10 + step) for step in range(1, 11)]
    story.spend(Bucket.detect, 50).event("flow.started").spend(Bucket.recover, 1)
    finished(claimed(story, 10, Bucket.recover).phase(Phase.train, 10).spend(Bucket.productive, 20)).check(
        with_rows=True
    )


def test_a_row_cuts_training_where_a_mark_was_lost_with_its_writer() -> None:
    story = begun().spend(Bucket.productive, 10)
    story.rows = [StepDone(1, 10, story.now), StepDone(1, 14, story.now + 4)]
    killed(story.spend(Bucket.lost_work, 4), 10)
    finished(claimed(story, 10, Bucket.recover).phase(Phase.train, 10).spend(Bucket.productive, 20)).check(
        with_rows=True
    )


def test_a_flow_that_waited_for_another_one_begins_when_that_one_ends() -> None:
    story = begun().spend(Bucket.productive, 10)
    asked = story.now
    story.spend(Bucket.productive, 5).phase(Phase.save, 15).spend(Bucket.save_stall, 1).phase(Phase.stop, 15)
    story.spend(Bucket.stop, 1).event("attempt.ended", outcome="stopped", committed_step=15).event("flow.ended")
    story.event("flow.started")
    story.events[-1] = story.events[-1].model_copy(update={"time": asked})
    story.spend(Bucket.startup, 1)
    finished(claimed(story, 15).phase(Phase.train, 15).spend(Bucket.productive, 3)).check()


def test_a_failed_end_has_lost_what_was_not_committed() -> None:
    story = begun().spend(Bucket.productive, 10).phase(Phase.save, 10).spend(Bucket.save_stall, 1)
    story.phase(Phase.train, 10).spend(Bucket.lost_work, 4).spend(Bucket.detect, 1).event("attempt.noticed")
    story.event("attempt.ended", outcome="failed", last_seen=story.now - 1, committed_step=10)
    story.event("decision.made", next="give_up").spend(Bucket.recover, 1).event("flow.finalizing")
    story.spend(Bucket.finalize, 1).event("flow.ended", status="failed").check()


def test_the_cost_of_an_end_is_lost_work_and_the_way_back() -> None:
    story = begun().spend(Bucket.productive, 20).phase(Phase.save, 20).spend(Bucket.save_stall, 1)
    killed(story.phase(Phase.train, 20).spend(Bucket.lost_work, 7), 20)
    claimed(story, 20, Bucket.recover).phase(Phase.train, 20).spend(Bucket.productive, 5)
    spent = costs(stretches(cuts(story.events, story.marks), story.now, resumed(story.events)))
    told = sum(story.truth[bucket] for bucket in (Bucket.lost_work, Bucket.detect, Bucket.recover, Bucket.restore))
    assert spent == {1: pytest.approx(told)}


def test_no_events_make_no_account() -> None:
    nothing = account(stretches(cuts([], []), 5.0, {}))
    assert (nothing.wall, nothing.ettr, set(nothing.buckets)) == (0.0, 0.0, set(Bucket))


@pytest.mark.parametrize(
    ("attempt", "step", "claims", "lost"),
    [
        (1, 10, {1: 0}, False),
        (1, 10, {1: 0, 2: 10}, True),
        (1, 9, {1: 0, 2: 10}, False),
        (2, 30, {1: 0, 2: 10}, False),
        (1, 5, {1: 0, 2: 10, 3: 0}, True),
        (2, 10, {1: 0, 2: 10, 3: 20}, False),
    ],
)
def test_thrown_away(attempt: int, step: int, claims: dict[int, int], lost: bool) -> None:
    assert (step >= left_at(attempt, claims)) is lost


def test_an_attempt_without_successor_stands_at_its_newest_commit() -> None:
    ended = begun().event("attempt.ended", outcome="failed", committed_step=10)
    assert resumed(ended.events) == {1: 0, 2: 10}
    assert resumed(claimed(ended, 7).events) == {1: 0, 2: 7}


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.sampled_from(list(Bucket)), st.integers(0, 3), st.integers(0, 9)), min_size=1
    ),
    st.floats(-50, 200),
    st.dictionaries(st.integers(0, 4), st.integers(0, 9)),
)
def test_stretches_follow_each_other_without_gap(
    marks: list[tuple[float, Bucket, int, int]], end: float, claims: dict[int, int]
) -> None:
    line = stretches((Cut(time, order, *rest) for order, (time, *rest) in enumerate(marks)), end, claims)
    assert all(before.end == after.begin for before, after in pairwise(line))
    assert all(piece.seconds >= 0 for piece in line)
    assert sum(account(line).buckets.values()) == pytest.approx(account(line).wall)


DATA = st.fixed_dictionaries(
    {},
    optional={
        "resumed_from": st.integers(0, 30),
        "committed_step": st.one_of(st.integers(0, 30), st.none()),
        "last_seen": st.one_of(st.floats(0, 120), st.just(math.nan), st.none(), st.text(max_size=2)),
        "queued_since": st.one_of(st.floats(0, 120), st.none()),
        "outcome": st.sampled_from(["done", "stopped", "failed", "odd"]),
        "next": st.sampled_from(["restart", "walk_back", "finish", "give_up", 3]),
    },
)
EVENTS = st.lists(
    st.builds(
        Event,
        id=st.just("x"),
        time=st.floats(0, 120),
        kind=st.sampled_from(KINDS),
        attempt=st.integers(0, 4),
        data=DATA,
    ),
    max_size=25,
)
MARKS = st.lists(
    st.builds(
        PhaseMark,
        attempt=st.integers(1, 4),
        time=st.floats(0, 120),
        phase=st.sampled_from(Phase),
        step=st.integers(0, 30),
    ),
    max_size=15,
)
ROWS = st.lists(st.builds(StepDone, st.integers(1, 4), st.integers(0, 30), st.floats(0, 120)), max_size=10)


@given(EVENTS, MARKS, ROWS)
@settings(max_examples=300, deadline=None)
def test_any_story_adds_up_to_its_wall_time(events: list[Event], marks: list[PhaseMark], rows: list[StepDone]) -> None:
    found = cuts(events, marks, rows)
    assert [cut.time for cut in found] == sorted(cut.time for cut in found)
    total = account(stretches(found, 200.0, resumed(events)))
    assert sum(total.buckets.values()) == pytest.approx(total.wall)
    assert 0 <= total.ettr <= 1
    if found:
        assert total.wall == pytest.approx(200.0 - found[0].time)


PIECE = st.integers(1, 8).map(float)


@given(
    st.lists(st.tuples(PIECE, st.sampled_from(["save", "kill", "vanish", "stop", "mute"])), min_size=1, max_size=12),
    PIECE,
)
@settings(max_examples=200, deadline=None)
def test_lost_work_is_the_training_beyond_the_resumed_step(pieces: list[tuple[float, str]], last: float) -> None:
    """One step takes a second; a save follows a stretch of training, and each fault goes back to the newest save."""
    story, step, saved = begun(), 0, 0
    unsaved = 0.0
    for seconds, then in pieces:
        story.now += seconds
        step, unsaved = step + int(seconds), unsaved + seconds
        if then in ("save", "stop"):
            story.truth[Bucket.productive] += unsaved
            saved, unsaved = step, 0.0
            story.phase(Phase.save, step).spend(Bucket.save_stall, 0.5)
        if then == "save":
            story.phase(Phase.train, step)
            continue
        story.truth[Bucket.lost_work] += unsaved
        step, unsaved = saved, 0.0
        _end(story, then, saved)
        fresh = then == "stop"
        claimed(story, saved, Bucket.startup if fresh else Bucket.recover).phase(Phase.train, saved)
    finished(story.spend(Bucket.productive, unsaved + last) if not unsaved else _tail(story, unsaved, last)).check()


def _tail(story: Story, unsaved: float, last: float) -> Story:
    story.truth[Bucket.productive] += unsaved
    return story.spend(Bucket.productive, last)


def _end(story: Story, how: str, saved: int) -> None:
    died = story.now
    if how == "kill":
        killed(story, saved)
    elif how == "mute":
        story.spend(Bucket.detect, 2).event("attempt.ended", outcome="failed", committed_step=saved, last_seen=died)
        story.spend(Bucket.recover, 1)
    elif how == "vanish":
        story.spend(Bucket.detect, 30).event("flow.started").spend(Bucket.recover, 1).event(
            "attempt.lost", last_seen=died
        )
        story.spend(Bucket.recover, 1)
    else:
        story.phase(Phase.stop, saved).spend(Bucket.stop, 1).event(
            "attempt.ended", outcome="stopped", committed_step=saved
        )
        story.spend(Bucket.stop, 1).event("flow.ended").spend(Bucket.idle, 40).event("flow.started")
        story.spend(Bucket.startup, 1)
