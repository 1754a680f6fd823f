"""What a gate found: checks that each say pass, fail or not measured, with their figures and the rule. Pure.

A gate without a check that was measured is not measured: never a pass, never a fail.
"""

from collections.abc import Iterable
from enum import StrEnum

from pydantic import Field

from everstep.core.concern import ORDER
from everstep.core.health import State, Verdict
from everstep.core.record import Record, Versioned

Figure = float | int | str | None


class Outcome(StrEnum):
    """What one check says."""

    passed = "pass"
    failed = "fail"
    not_measured = "not measured"


class Check(Record):
    """One question and its answer. `figures` carry their unit in their names (`loss_before`, `gb_per_second`, ...).

    `rule` is what was asked for, in words and with its threshold; `why` says what was found, or why nothing was measured.
    """

    name: str
    outcome: Outcome
    rule: str
    why: str = ""
    figures: dict[str, Figure] = {}


class GateReport(Versioned):
    """What one gate (`passive`, `active`, `training`, `telemetry`) said at a moment.

    `verdict` is that of the table on samples and logs, where the gate has one. `step` and `segment` say where in the run.
    """

    gate: str
    time: float
    seconds: float = Field(0.0, ge=0)
    step: int | None = None
    segment: int | None = None
    checks: tuple[Check, ...] = ()
    verdict: Verdict | None = None

    @property
    def outcome(self) -> Outcome:
        """Failed if any check failed; passed if any was measured."""
        return overall(self.checks)

    @property
    def sentence(self) -> str:
        """One line for people: what failed, else how much was measured."""
        failed = [f"{one.name}: {one.why or one.rule}" for one in self.checks if one.outcome is Outcome.failed]
        if failed:
            return "; ".join(failed)
        measured = sum(one.outcome is Outcome.passed for one in self.checks)
        left = len(self.checks) - measured
        more = f", {left} not measured" if left else ""
        return f"{measured} of {len(self.checks)} checks pass{more}" if measured else "nothing was measured"


def overall(checks: Iterable[Check]) -> Outcome:
    """The outcome of all of them."""
    found = {one.outcome for one in checks}
    if Outcome.failed in found:
        return Outcome.failed
    return Outcome.passed if Outcome.passed in found else Outcome.not_measured


def passed(name: str, rule: str, why: str = "", **figures: Figure) -> Check:
    return Check(name=name, outcome=Outcome.passed, rule=rule, why=why, figures=figures)


def failed(name: str, rule: str, why: str, **figures: Figure) -> Check:
    return Check(name=name, outcome=Outcome.failed, rule=rule, why=why, figures=figures)


def not_measured(name: str, rule: str, why: str, **figures: Figure) -> Check:
    return Check(name=name, outcome=Outcome.not_measured, rule=rule, why=why, figures=figures)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of them; healthy where there is none."""
    return max(verdicts, key=lambda one: ORDER.index(one.state), default=Verdict(state=State.healthy))
