"""The table of recovery: every row is reached, budgets hold, and a healthy run never gives up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core import recovery
from everstep.core.health import Action, Severity, State, Verdict
from everstep.core.job import Retries
from everstep.core.recovery import Decision, History, Next, Past, decide
from everstep.core.segment import AttemptEnd, Cause, CauseKind, Outcome, Phase


def failed(
    kind: CauseKind, key: str = "k", step: int | None = 7, attempt: int = 1, phase: Phase = Phase.train
) -> AttemptEnd:
    cause = Cause(kind=kind, key=key, message=f"{kind.value} happened", step=step, phase=phase)
    return AttemptEnd(attempt=attempt, outcome=Outcome.failed, cause=cause, step=step or 0)


def times(count: int, kind: CauseKind, committed: int = 0, **more: object) -> tuple[Past, ...]:
    return tuple(Past(failed(kind, attempt=number + 1, **more), committed) for number in range(count))


SICK = Verdict(
    state=State.failed, reasons=("GPU 0 fell off the bus",), action=Action.drain_replace, severity=Severity.critical
)
SUSPECT = Verdict(state=State.suspect)
UNKNOWN = Verdict(state=State.unknown)

ROWS = {
    "_done": (AttemptEnd(attempt=1, outcome=Outcome.done), None, History(), Next.finish),
    "_stopped": (AttemptEnd(attempt=1, outcome=Outcome.stopped), SICK, History(), Next.stop),
    "_fenced": (failed(CauseKind.fenced), SICK, History(), Next.give_up),
    "_node_failed": (failed(CauseKind.killed), SICK, History(), Next.give_up),
    "_sick": (failed(CauseKind.health), SUSPECT, History(), Next.give_up),
    "_user": (failed(CauseKind.user), None, History(), Next.give_up),
    "_deterministic": (failed(CauseKind.exception), None, History(times(1, CauseKind.exception)), Next.give_up),
    "_probe": (failed(CauseKind.probe), None, History(), Next.walk_back),
    "_diverged": (failed(CauseKind.verification), None, History(times(2, CauseKind.verification)), Next.give_up),
    "_budget": (failed(CauseKind.killed), None, History(times(5, CauseKind.killed)), Next.give_up),
    "_damaged": (failed(CauseKind.damaged), None, History(), Next.walk_back),
    "_space": (failed(CauseKind.space), None, History(), Next.give_up),
    "_restart": (failed(CauseKind.killed), None, History(), Next.restart),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_decides_its_own_case(name: str) -> None:
    end, verdict, history, what = ROWS[name]
    asked = [row.__name__ for row in recovery._TABLE if row(end, verdict, history) is not None]
    assert asked[0] == name
    assert decide(end, verdict, history).next is what


def test_every_row_of_the_table_is_tested() -> None:
    assert [row.__name__ for row in recovery._TABLE] == list(ROWS)


@pytest.mark.parametrize("kind", [kind for kind in CauseKind if kind not in (CauseKind.none, CauseKind.stop)])
def test_no_failure_is_left_without_a_row(kind: CauseKind) -> None:
    decision = decide(failed(kind), None, History())
    assert "nothing is known" not in decision.reason
    assert decision.reason


@pytest.mark.parametrize("kind", [CauseKind.none, CauseKind.stop])
def test_an_end_that_nobody_understands_is_not_repeated(kind: CauseKind) -> None:
    decision = decide(failed(kind), None, History())
    assert (decision.next, decision.severity) == (Next.give_up, Severity.high)
    assert "nothing is known to help" in decision.reason


@pytest.mark.parametrize(
    "kind", [CauseKind.exception, CauseKind.killed, CauseKind.exit, CauseKind.hang, CauseKind.lost]
)
@pytest.mark.parametrize("verdict", [None, SUSPECT, UNKNOWN, Verdict(state=State.healthy)])
def test_a_first_fault_restarts_at_once(kind: CauseKind, verdict: Verdict | None) -> None:
    decision = decide(failed(kind), verdict, History())
    assert (decision.next, decision.action, decision.delay_seconds) == (Next.restart, Action.restart_app, 0.0)


def test_a_repeated_fault_waits_longer_each_time_up_to_a_minute() -> None:
    budget = Retries(per_cause=12)
    delays = [
        decide(failed(CauseKind.killed), None, History(times(count, CauseKind.killed), budget=budget)).delay_seconds
        for count in range(12)
    ]
    assert delays[:4] == [0.0, 1.0, 2.0, 4.0]
    assert delays == sorted(delays)
    assert delays[-1] == 60.0


@pytest.mark.parametrize("budget", [0, 1, 3, 5])
def test_the_budget_of_a_cause_is_what_it_says(budget: int) -> None:
    def after(count: int) -> Decision:
        history = History(times(count, CauseKind.killed, committed=10), 10, Retries(per_cause=budget))
        return decide(failed(CauseKind.killed), None, history)

    assert [after(count).next for count in range(budget)] == [Next.restart] * budget
    over = after(budget)
    assert (over.next, over.action) == (Next.give_up, Action.diagnose_then_restart)
    assert f"came {budget + 1} times without a new checkpoint" in over.reason


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_budget_of_a_job_counts_failures_of_every_cause(budget: int) -> None:
    kinds = [CauseKind.killed, CauseKind.hang, CauseKind.exit, CauseKind.lost]
    past = tuple(Past(failed(kinds[number % 4], key=str(number)), number) for number in range(budget))
    history = History(past, budget, Retries(per_job=budget))
    assert decide(failed(CauseKind.killed, key="new"), None, history).next is Next.give_up
    assert (
        decide(failed(CauseKind.killed, key="new"), None, History(past[1:], budget, Retries(per_job=budget + 1))).next
        is Next.restart
    )


def test_ends_on_request_cost_no_budget() -> None:
    stopped = AttemptEnd(attempt=1, outcome=Outcome.stopped, cause=Cause(kind=CauseKind.killed, key="k"))
    history = History(tuple(Past(stopped, 10) for _ in range(200)), 10)
    assert decide(failed(CauseKind.killed), None, history).next is Next.restart


@given(st.lists(st.integers(1, 50), max_size=90))
def test_a_run_that_commits_between_two_kills_never_gives_up(steps: list[int]) -> None:
    past: list[Past] = []
    committed = 0
    for step in steps:
        committed += step
        decision = decide(failed(CauseKind.killed, step=committed), None, History(tuple(past), committed))
        assert (decision.next, decision.delay_seconds) == (Next.restart, 0.0)
        past.append(Past(failed(CauseKind.killed, step=committed), committed))


def test_a_commit_below_an_older_one_that_was_set_aside_is_progress_too() -> None:
    past = (*times(4, CauseKind.killed, committed=30), *times(1, CauseKind.damaged, committed=20))
    assert History(past, 20).same_cause_without_progress(failed(CauseKind.killed)) == 4
    assert History(past, 25).same_cause_without_progress(failed(CauseKind.killed)) == 0


def test_two_causes_that_take_turns_do_not_hide_each_other() -> None:
    past = tuple(Past(failed(kind), 10) for kind in [CauseKind.killed, CauseKind.hang] * 5)
    assert decide(failed(CauseKind.killed), None, History(past, 10)).next is Next.give_up


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (("ValueError", 7), ("ValueError", 7), Next.give_up),
        (("ValueError", 7), ("ValueError", 8), Next.restart),
        (("ValueError", 7), ("KeyError", 7), Next.restart),
        (("ValueError", None), ("ValueError", None), Next.give_up),
    ],
)
def test_the_same_exception_at_the_same_step_is_the_programs_own(
    first: tuple[str, int | None], second: tuple[str, int | None], what: Next
) -> None:
    history = History((Past(failed(CauseKind.exception, *first), 5),), 5)
    decision = decide(failed(CauseKind.exception, *second), None, history)
    assert decision.next is what
    if what is Next.give_up:
        assert decision.action is Action.fix_app
        assert str(second[1]) in decision.reason


def test_a_deterministic_error_is_known_again_after_other_faults_and_commits() -> None:
    past = (*times(1, CauseKind.exception, committed=5), *times(3, CauseKind.killed, committed=6))
    assert decide(failed(CauseKind.exception), None, History(past, 7)).next is Next.give_up


def test_being_killed_at_the_same_step_is_no_deterministic_error() -> None:
    assert decide(failed(CauseKind.killed), None, History(times(1, CauseKind.killed))).next is Next.restart


def test_one_probe_mismatch_blames_the_checkpoint() -> None:
    decision = decide(failed(CauseKind.probe), None, History(times(3, CauseKind.killed)))
    assert (decision.next, decision.action) == (Next.walk_back, Action.check_storage)


def test_two_probe_mismatches_in_a_row_blame_the_environment() -> None:
    decision = decide(
        failed(CauseKind.probe, key="step-00000010.a1"),
        None,
        History(times(1, CauseKind.probe, key="step-00000020.a1")),
    )
    assert (decision.next, decision.action) == (Next.give_up, Action.fix_config)
    assert "suspect this machine" in decision.reason


def test_probe_mismatches_with_another_end_between_are_not_in_a_row() -> None:
    past = (*times(1, CauseKind.probe), *times(1, CauseKind.killed))
    assert decide(failed(CauseKind.probe), None, History(past)).next is Next.walk_back


@pytest.mark.parametrize("kind", [CauseKind.damaged, CauseKind.verification])
def test_damage_walks_back_and_its_budget_ends_it(kind: CauseKind) -> None:
    assert decide(failed(kind), None, History()).next is Next.walk_back
    assert decide(failed(kind), None, History(times(5, kind))).next is Next.give_up


def test_only_the_users_fault_is_called_so() -> None:
    for end, verdict, history, _ in ROWS.values():
        decision = decide(end, verdict, history)
        assert decision.user_error is (end.cause.kind is CauseKind.user)


def test_a_sick_node_says_what_the_fleet_has_to_do() -> None:
    decision = decide(failed(CauseKind.killed), SICK, History())
    assert (decision.action, decision.severity) == (Action.drain_replace, Severity.critical)
    assert decision.reason == "GPU 0 fell off the bus"


ENDS = st.builds(
    AttemptEnd,
    attempt=st.integers(1, 9),
    outcome=st.sampled_from(Outcome),
    cause=st.builds(
        Cause,
        kind=st.sampled_from(CauseKind),
        key=st.sampled_from("abc"),
        message=st.text(max_size=5),
        step=st.one_of(st.none(), st.integers(0, 9)),
        phase=st.one_of(st.none(), st.sampled_from(Phase)),
    ),
)


@given(
    ENDS,
    st.one_of(st.none(), st.builds(Verdict, state=st.sampled_from(State))),
    st.lists(st.builds(Past, ENDS, st.integers(0, 9)), max_size=8),
    st.integers(0, 9),
)
def test_every_case_has_one_answer(end: AttemptEnd, verdict: Verdict | None, past: list[Past], committed: int) -> None:
    decision = decide(end, verdict, History(tuple(past), committed))
    assert 0 <= decision.delay_seconds <= 60
    assert (decision.next is Next.finish) is (end.outcome is Outcome.done)
    assert (decision.next is Next.stop) is (end.outcome is Outcome.stopped)


@pytest.mark.parametrize("steps", [(30, 30, 30), (30, 60, 40)])
def test_the_third_bad_checkpoint_without_a_good_one_between_blames_training(steps):
    past = []
    for attempt, step in enumerate(steps, start=1):
        end = failed(CauseKind.verification, key=f"step-{step:08d}.a{attempt}")
        decision = decide(end, None, History(tuple(past), 20))
        past.append(Past(end, 20))
    assert [decide(one.end, None, History(tuple(past[:i]), 20)).next for i, one in enumerate(past)] == [
        Next.walk_back,
        Next.walk_back,
        Next.give_up,
    ]
    assert "again and again" in decision.reason


def test_bad_checkpoints_with_progress_between_are_walked_back_from_each_time():
    end = failed(CauseKind.verification, key="step-00000090.a9")
    past = tuple(Past(failed(CauseKind.verification, key=f"step-{n}0.a{n}"), n * 10) for n in range(1, 9))
    assert decide(end, None, History(past, 85)).next is Next.walk_back


def test_the_same_damage_in_another_attempts_folder_is_the_same_fault():
    past = tuple(Past(failed(CauseKind.damaged, key=f"step-00000030.a{n}"), 30) for n in range(1, 6))
    assert decide(failed(CauseKind.damaged, key="step-00000030.a6"), None, History(past, 30)).next is Next.give_up
