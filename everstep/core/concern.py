"""One thing that speaks against a GPU or node, and how many of them become a verdict."""

from collections.abc import Iterable
from typing import NamedTuple

from everstep.core.health import Action, Severity, State, Verdict

ORDER = (State.healthy, State.unknown, State.suspect, State.failed)
"""From best to worst."""

RUNGS = tuple(Action)
"""From the least to the most that is done; `Action` lists them so."""


class Concern(NamedTuple):
    """`healthy` is a note: it is said, and blames nobody."""

    state: State
    severity: Severity
    action: Action
    reason: str


def note(reason: str) -> Concern:
    return Concern(State.healthy, Severity.low, Action.ignore_log, reason)


def suspect(
    reason: str, action: Action = Action.diagnose_then_restart, severity: Severity = Severity.medium
) -> Concern:
    return Concern(State.suspect, severity, action, reason)


def failed(reason: str, action: Action, severity: Severity = Severity.high) -> Concern:
    return Concern(State.failed, severity, action, reason)


def unknown(reason: str) -> Concern:
    return Concern(State.unknown, Severity.medium, Action.diagnose_then_restart, reason)


def verdict(concerns: Iterable[Concern]) -> Verdict:
    """The worst state, severity and action of all; reasons from the worst to the least. Nothing is healthy."""
    found = sorted(
        dict.fromkeys(concerns),
        key=lambda one: (-ORDER.index(one.state), one.severity.rank, -RUNGS.index(one.action), one.reason),
    )
    if not found:
        return Verdict(state=State.healthy)
    return Verdict(
        state=found[0].state,
        reasons=tuple(dict.fromkeys(one.reason for one in found)),
        action=max((one.action for one in found), key=RUNGS.index),
        severity=min((one.severity for one in found), key=lambda one: one.rank),
    )
