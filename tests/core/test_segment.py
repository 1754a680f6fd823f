"""Leases, ends and hangs: what parent and child mean by their records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.job import DataSource, Limits, TrainJob
from everstep.core.segment import (
    AttemptEnd,
    Cause,
    CauseKind,
    Heartbeat,
    Lease,
    Outcome,
    Phase,
    RankEnd,
    classify,
    hung_ranks,
    is_echo,
    next_segment,
    phase_limit,
    should_extend,
)


def job(**fields: object) -> TrainJob:
    return TrainJob(name="x", program="a.b:build", data=DataSource(source="d"), steps=600, **fields)


def beat(phase: Phase = Phase.train, progress: int = 1, slowest: float | None = None) -> Heartbeat:
    return Heartbeat(
        attempt=1, rank=0, pid=1, time=0.0, phase=phase, step=1, progress=progress, slowest_step_seconds=slowest
    )


def word(rank: int, outcome: Outcome, step: int = 10, attempt: int = 1, **cause: object) -> RankEnd:
    return RankEnd(
        attempt=attempt, rank=rank, outcome=outcome, step=step, saved_step=step - 1, time=0.0, cause=Cause(**cause)
    )


def error(message: str, **more: object) -> dict[str, object]:
    return {"kind": CauseKind.exception, "key": "RuntimeError", "message": message, **more}


# -- ends ---------------------------------------------------------------------------------------------------------------


def test_all_done_is_done() -> None:
    end = classify(1, {rank: word(rank, Outcome.done) for rank in range(4)}, dict.fromkeys(range(4), 0))
    assert end == AttemptEnd(attempt=1, outcome=Outcome.done, step=10, saved_step=9)


def test_one_that_stopped_makes_it_stopped_with_its_reason() -> None:
    stop = word(1, Outcome.stopped, kind=CauseKind.stop, message="asked by a signal")
    end = classify(1, {0: word(0, Outcome.done), 1: stop}, {0: 0, 1: 0})
    assert (end.outcome, end.cause.message) == (Outcome.stopped, "asked by a signal")


@pytest.mark.parametrize(
    ("status", "kind", "key"),
    [
        (-9, CauseKind.killed, "signal 9"),
        (-15, CauseKind.killed, "signal 15"),
        (1, CauseKind.exit, "code 1"),
        (137, CauseKind.exit, "code 137"),
    ],
)
def test_a_silent_death_is_told_by_its_status(status: int, kind: CauseKind, key: str) -> None:
    end = classify(1, {}, {0: status})
    assert (end.outcome, end.cause.kind, end.cause.key, end.cause.rank) == (Outcome.failed, kind, key, 0)


def test_a_word_is_believed_before_a_status() -> None:
    words = {1: word(1, Outcome.failed, **error("loss is nan"))}
    end = classify(1, words, {0: -9, 1: 1})
    assert end.cause.message == "rank 1: loss is nan"


@pytest.mark.parametrize(
    "message",
    [
        "[../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1",
        "Connection reset by peer",
        "NCCL communicator was aborted",
        "Broken pipe",
        "failed to recv, got 0 bytes from the store",
    ],
)
def test_a_lost_peer_is_an_echo_of_the_silent_death(message: str) -> None:
    words = {rank: word(rank, Outcome.failed, **error(message)) for rank in (0, 2, 3)}
    assert all(is_echo(one.cause) for one in words.values())
    end = classify(1, words, {0: 1, 1: -9, 2: 1, 3: 1})
    assert (end.cause.kind, end.cause.rank) == (CauseKind.killed, 1)


def test_an_echo_is_all_there_is_when_nobody_says_more() -> None:
    end = classify(1, {0: word(0, Outcome.failed, **error("gloo: timed out"))}, {0: 1, 1: None})
    assert (end.outcome, end.cause.message) == (Outcome.failed, "gloo: timed out")


def test_the_first_primary_failure_by_rank_counts() -> None:
    words = {
        2: word(2, Outcome.failed, **error("second")),
        1: word(1, Outcome.failed, **error("first")),
        0: word(0, Outcome.failed, **error("Connection closed by peer")),
    }
    end = classify(1, words, {0: 1, 1: 1, 2: 1})
    assert (end.cause.message, end.cause.rank) == ("rank 1: first", 1)


def test_an_error_that_all_ranks_have_alike_names_none() -> None:
    words = {rank: word(rank, Outcome.failed, **error("loss is nan")) for rank in (0, 1)}
    assert classify(1, words, {0: 1, 1: 1}).cause.message == "loss is nan"


def test_a_rank_that_left_with_zero_and_no_word_is_lost() -> None:
    end = classify(1, {0: word(0, Outcome.done)}, {0: 0, 1: 0})
    assert (end.outcome, end.cause.kind) == (Outcome.failed, CauseKind.lost)
    assert "rank 1" in end.cause.message


def test_words_of_an_older_attempt_do_not_count() -> None:
    end = classify(2, {0: word(0, Outcome.done, attempt=1)}, {0: -9})
    assert (end.outcome, end.step) == (Outcome.failed, 0)


def test_the_farthest_step_and_an_early_finish_are_kept() -> None:
    words = {0: word(0, Outcome.done, step=30), 1: word(1, Outcome.done, step=31)}
    words[1] = words[1].model_copy(update={"finished_early": True})
    end = classify(1, words, {0: 0, 1: 0})
    assert (end.step, end.saved_step, end.finished_early) == (31, 30, True)


WORDS = st.builds(
    RankEnd,
    attempt=st.integers(1, 2),
    rank=st.just(0),
    outcome=st.sampled_from(Outcome),
    step=st.integers(0, 50),
    saved_step=st.integers(0, 50),
    time=st.just(0.0),
    cause=st.builds(Cause, kind=st.sampled_from(CauseKind), message=st.sampled_from(["gloo", "boom"])),
)


@given(
    st.dictionaries(st.integers(0, 3), WORDS),
    st.dictionaries(st.integers(0, 3), st.sampled_from([0, 1, -9, None]), min_size=1),
)
def test_every_end_has_one_name(words: dict[int, RankEnd], statuses: dict[int, int | None]) -> None:
    end = classify(1, words, statuses)
    spoke = [one for rank, one in words.items() if one.attempt == 1]
    if end.outcome is Outcome.done:
        assert spoke
        assert all(one.outcome is Outcome.done for one in spoke)
        assert all(rank in words and words[rank].attempt == 1 for rank in statuses)


# -- leases -------------------------------------------------------------------------------------------------------------


def test_a_lease_knows_its_ends() -> None:
    lease = Lease(attempt=1, ends={1: 200, 2: 400})
    assert lease.until_step == 400
    assert [lease.end_after(step) for step in (0, 199, 200, 399, 400, 500)] == [200, 200, 400, 400, 0, 0]
    assert [lease.segment_ending_at(step) for step in (200, 400, 300, 0)] == [1, 2, 0, 0]
    assert Lease(attempt=1).until_step == 0


@pytest.mark.parametrize(
    ("step", "segment"),
    [
        (0, {1: 200}),
        (1, {1: 200}),
        (199, {1: 200}),
        (200, {2: 400}),
        (437, {3: 600}),
        (599, {3: 600}),
        (600, {}),
        (700, {}),
    ],
)
def test_segments_stand_on_their_multiples_wherever_the_run_resumed(step: int, segment: dict[int, int]) -> None:
    assert next_segment(job(segment_steps=200), step, 0, None) == segment


def test_the_last_segment_ends_with_the_job() -> None:
    assert next_segment(job(segment_steps=250), 500, 2, None) == {3: 600}


def test_minutes_become_steps_by_the_measured_step_time() -> None:
    minutes = job(segment_minutes=2)
    assert next_segment(minutes, 0, 0, None) == {1: 100}
    assert next_segment(minutes, 100, 1, 0.5) == {2: 340}
    assert next_segment(minutes, 500, 4, 0.5) == {5: 600}
    assert next_segment(minutes, 10, 4, 1e6) == {5: 11}


def test_without_a_length_the_run_is_one_segment() -> None:
    assert next_segment(job(), 37, 2, None) == {3: 600}


@given(st.integers(1, 700), st.integers(0, 700))
def test_a_segment_moves_on_and_stays_within_the_job(length: int, step: int) -> None:
    for number, end in next_segment(job(segment_steps=length), step, 0, None).items():
        assert step < end <= 600
        assert number == -(-end // length)


@pytest.mark.parametrize(
    ("lease", "step", "seconds", "gates", "extend"),
    [
        (Lease(attempt=1, ends={1: 200}), 0, 1.0, True, False),
        (Lease(attempt=1, ends={1: 200}), 169, 1.0, True, False),
        (Lease(attempt=1, ends={1: 200}), 170, 1.0, True, True),
        (Lease(attempt=1, ends={1: 200}), 198, 100.0, True, True),
        (Lease(attempt=1, ends={1: 200}), 0, None, True, True),
        (Lease(attempt=1, ends={1: 200}), 199, 1.0, False, False),
        (Lease(attempt=1, ends={1: 200}, stop=True), 199, 1.0, True, False),
        (Lease(attempt=1), 0, 1.0, True, True),
    ],
)
def test_a_lease_is_extended_ahead_of_time_and_only_when_gates_pass(
    lease: Lease, step: int, seconds: float | None, gates: bool, extend: bool
) -> None:
    assert should_extend(lease, step, seconds, gates, 30.0) is extend


# -- hangs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in (Phase.train, Phase.stop)])
def test_each_phase_has_its_own_limit(phase: Phase) -> None:
    assert phase_limit(Limits(), beat(phase)) == getattr(Limits(), phase.value)


def test_a_step_may_last_a_multiple_of_the_slowest_one_and_never_less_than_the_floor() -> None:
    limits = Limits(train_floor=10, train_factor=5)
    assert [phase_limit(limits, beat(slowest=slowest)) for slowest in (None, 1.0, 2.0, 30.0)] == [10, 10, 10, 150]
    assert phase_limit(limits, beat(Phase.stop)) == limits.save
    assert phase_limit(limits, None) == limits.start


def test_unknown_is_not_failed() -> None:
    assert hung_ranks(Limits(), [beat(), None], [None, None]) == []


def test_who_moves_does_not_hang() -> None:
    limits = Limits(train_floor=10)
    assert hung_ranks(limits, [beat(), beat()], [9.9, 10.0]) == []


def test_the_rank_with_the_least_progress_stands_first() -> None:
    limits = Limits(train_floor=10, start=10)
    beats = [beat(progress=5), beat(progress=4), None, beat(progress=5)]
    assert hung_ranks(limits, beats, [11.0, 11.0, 11.0, 1.0]) == [2, 1, 0]


def test_a_slow_phase_of_one_rank_does_not_condemn_it() -> None:
    limits = Limits(train_floor=10)
    assert hung_ranks(limits, [beat(), beat(Phase.save)], [11.0, 11.0]) == [0]
