"""What to do after an attempt ended: one table that a person can read.

`decide` takes the end, the verdict of the gates on the GPUs that the run uses (None where nothing measures them) and the
history of the run, and gives a decision. The first row that matches decides. The rows of GPU health come before all causes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from everstep.core.health import Action, Severity, State, Verdict
from everstep.core.job import Retries
from everstep.core.record import Record
from everstep.core.segment import AttemptEnd, CauseKind, Outcome, Phase


class Next(StrEnum):
    """What the train flow does with its own job."""

    finish = "finish"
    stop = "stop"
    restart = "restart"
    walk_back = "walk_back"
    give_up = "give_up"


class Decision(Record):
    """What to do, why, and what the fleet is to do with the node. `delay_seconds` before the restart, without jitter."""

    next: Next
    reason: str
    action: Action = Action.ignore_log
    severity: Severity = Severity.low
    delay_seconds: float = 0.0
    user_error: bool = False


_CHECKPOINT = (CauseKind.damaged, CauseKind.probe)  # their key is a folder, which also names an attempt


@dataclass(frozen=True)
class Past:
    """An earlier attempt of this run. `committed_step` is the newest committed checkpoint when it ended."""

    end: AttemptEnd
    committed_step: int


@dataclass(frozen=True)
class History:
    """Earlier attempts, oldest first, and the budget. `committed_step` is the newest committed checkpoint now."""

    past: Sequence[Past] = ()
    committed_step: int = 0
    budget: Retries = Retries()

    def same_cause_without_progress(self, end: AttemptEnd) -> int:
        """How many of the latest attempts ended for this cause with no step committed since."""
        count = 0
        for one in reversed(self.past):
            if one.committed_step < self.committed_step:
                break
            count += one.end.outcome is Outcome.failed and _fault(one.end) == _fault(end)
        return count

    def restarts(self) -> int:
        return sum(1 for one in self.past if one.end.outcome is Outcome.failed)

    def same_exception_at_same_step(self, end: AttemptEnd) -> bool:
        return any(
            one.end.cause.kind is CauseKind.exception
            and (one.end.cause.key, one.end.cause.step) == (end.cause.key, end.cause.step)
            for one in self.past
        )


def _fault(end: AttemptEnd) -> tuple[CauseKind, str]:
    """The same for the same fault. Which checkpoint a bad one is, is chance: the gate may close sooner or later."""
    if end.cause.kind is CauseKind.verification:
        return end.cause.kind, ""
    return end.cause.kind, end.cause.key.partition(".a")[0] if end.cause.kind in _CHECKPOINT else end.cause.key


def decide(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision:
    """What to do after `end`. Pure; the rows of the table in the order in which they are asked."""
    for row in _TABLE:
        decision = row(end, verdict, history)
        if decision is not None:
            return decision
    return Decision(next=Next.give_up, reason=f"nothing is known to help: {end.cause.message}", severity=Severity.high)


Row = Callable[[AttemptEnd, Verdict | None, History], Decision | None]


def _done(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    if end.outcome is not Outcome.done:
        return None
    return Decision(next=Next.finish, reason="all steps are done")


def _stopped(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    if end.outcome is not Outcome.stopped:
        return None
    return Decision(next=Next.stop, reason=end.cause.message or "stopped on request")


def _fenced(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    if end.cause.kind is not CauseKind.fenced:
        return None
    return Decision(next=Next.give_up, reason="a newer attempt owns this run now", severity=Severity.medium)


def _node_failed(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    """Without a second node the job cannot move: the action is the fleet's, and the run says so."""
    if verdict is None or verdict.state is not State.failed:
        return None
    reason = "; ".join(verdict.reasons) or "the node failed its health gates"
    return Decision(next=Next.give_up, reason=reason, action=verdict.action, severity=verdict.severity)


def _sick(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    """The gate on GPU health had the ranks save and stop; whatever it is by now, a person or the fleet looks first."""
    if end.cause.kind is not CauseKind.health:
        return None
    action = verdict.action if verdict is not None else Action.diagnose_then_restart
    return Decision(next=Next.give_up, reason=end.cause.message, action=action, severity=Severity.high)


def _user(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    if end.cause.kind is not CauseKind.user:
        return None
    return Decision(
        next=Next.give_up, reason=end.cause.message, action=Action.fix_app, severity=Severity.medium, user_error=True
    )


def _budget(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    if history.restarts() >= history.budget.per_job:
        reason = f"the budget of {history.budget.per_job} restarts of this run is used up; last: {end.cause.message}"
        return Decision(next=Next.give_up, reason=reason, severity=Severity.high)
    same = history.same_cause_without_progress(end)
    if same >= history.budget.per_cause:
        reason = f"the same fault came {same + 1} times without a new checkpoint: {end.cause.message}"
        return Decision(next=Next.give_up, reason=reason, action=Action.diagnose_then_restart, severity=Severity.high)
    return None


def _deterministic(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    """The same exception at the same step twice is the program's own, and no restart mends it."""
    if end.cause.kind is not CauseKind.exception or not history.same_exception_at_same_step(end):
        return None
    reason = f"the same error came again at step {end.cause.step}: {end.cause.message}"
    return Decision(next=Next.give_up, reason=reason, action=Action.fix_app, severity=Severity.high)


def _diverged(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    """Three times what training wrote failed its verification, with nothing good in between: training is at fault."""
    if end.cause.kind is not CauseKind.verification or history.same_cause_without_progress(end) < 2:
        return None
    reason = f"training gives bad checkpoints again and again: {end.cause.message}"
    return Decision(next=Next.give_up, reason=reason, action=Action.fix_app, severity=Severity.high)


def _damaged(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    if end.cause.kind not in (CauseKind.damaged, CauseKind.verification):
        return None
    return Decision(
        next=Next.walk_back, reason=end.cause.message, action=Action.check_storage, severity=Severity.medium
    )


def _probe(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    """One mismatch blames the checkpoint. Two in a row blame the environment: nothing more is set aside."""
    if end.cause.kind is not CauseKind.probe:
        return None
    last = history.past[-1] if history.past else None
    if last is not None and last.end.cause.kind is CauseKind.probe:
        reason = f"two checkpoints in a row give another loss than when they were saved, so suspect this machine or its software, not the checkpoints: {end.cause.message}"
        return Decision(next=Next.give_up, reason=reason, action=Action.fix_config, severity=Severity.high)
    return Decision(
        next=Next.walk_back, reason=end.cause.message, action=Action.check_storage, severity=Severity.medium
    )


def _space(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    if end.cause.kind is not CauseKind.space:
        return None
    return Decision(next=Next.give_up, reason=end.cause.message, action=Action.free_space, severity=Severity.high)


def _restart(end: AttemptEnd, verdict: Verdict | None, history: History) -> Decision | None:
    """A first fault restarts at once; a repeated one waits longer each time, one minute at most."""
    if end.cause.kind not in (
        CauseKind.exception,
        CauseKind.killed,
        CauseKind.exit,
        CauseKind.hang,
        CauseKind.lost,
    ):
        return None
    same = history.same_cause_without_progress(end)
    delay = 0.0 if same == 0 else min(60.0, 0.5 * 2.0**same)
    severity = Severity.medium if end.cause.phase is not Phase.start else Severity.high
    return Decision(
        next=Next.restart, reason=end.cause.message, action=Action.restart_app, severity=severity, delay_seconds=delay
    )


_TABLE: tuple[Row, ...] = (
    _done,
    _stopped,
    _fenced,
    _node_failed,
    _sick,
    _user,
    _deterministic,
    _probe,
    _diverged,
    _budget,
    _damaged,
    _space,
    _restart,
)
