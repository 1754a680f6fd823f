"""What the health of GPUs means for a run's next segment: go on, test them first, or stop. Pure.

A healthy training is never stopped by its guardian: only hard evidence about a GPU that the run uses closes the door (an
Xid that says so, uncorrectable errors, a GPU that fell off the bus, an active test that it failed). A driver that does not
answer is none while the ranks go on making steps; how a rank that hangs is judged is the supervisor's business.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

from pydantic import Field

from everstep.core.check import Check, GateReport, Outcome, failed, not_measured, passed, worst
from everstep.core.concern import RUNGS
from everstep.core.gpu import Answer, Driver, Sweep
from everstep.core.health import Action, Severity, State, Verdict
from everstep.core.judgement import NodeVerdict
from everstep.core.monitor import cause_of
from everstep.core.record import Record

AGAIN_SECONDS = 3600.0
"""After an active test that was passed, the same causes ask for another one only when so long has gone by."""

SILENT_SECONDS = 15.0
"""Three periods of five seconds (`core.gpu.SILENT_PERIODS`): by then missing telemetry is an alarm."""

SILENT = "telemetry is silent"

BUSY_TRIES = 4
"""A test that could not measure anything is tried so often: something else may hold the device just then."""

RULE = "no GPU that the run uses is failed by the policy; a suspect one is tested before training goes on"
FOR_GOOD = 20
"""Losses in a row that are no numbers, after which no program gets better by itself. PyTorch's scaler halves its scale with
each skipped step, from 65,536: it is at its end after 16."""

NO_NUMBERS = ("finite_loss", "finite_gradients", "finite_weights")
DOUBTFUL = {
    "training": ("throughput", "slow_rank"),
    "telemetry": ("temperature", "ecc", "remapped rows", "nvlink", "clocks"),
}
"""Failed checks by gate that a sick GPU may have caused."""

_OF_SILENCE = ("it does not answer", "it is missing", "nothing is known of it")
_FIRM = (Answer.ok, Answer.lost, Answer.reset_required)
"""Answers by which a GPU says something of itself; the others are silence."""

_BY_TEST = Action.drain_then_reset_gpu
_VALUES_WRONG = Action.drain_replace


class Door(StrEnum):
    """What the gate says of the next segment: `hold` is until the GPUs have been tested."""

    open = "open"
    hold = "hold"
    closed = "closed"


class Word(Record):
    """The gate's word to the supervisor. `verdict` says what is wrong where the door is closed."""

    door: Door = Door.open
    why: str = ""
    verdict: Verdict | None = None


class Examined(Record):
    """What the newest active test said of each GPU (by UUID), and of which causes it cleared it."""

    time: float
    cleared: dict[str, tuple[str, ...]] = Field({}, description="causes by GPU that a passed test has answered")
    condemned: dict[str, Verdict] = Field({}, description="verdicts by GPU that failed the test")


def of_used(
    found: NodeVerdict, sweep: Sweep, used: Collection[str], patience: float = SILENT_SECONDS
) -> dict[str, Verdict]:
    """The verdicts on the GPUs that count here. One of which nothing is known is unknown; after `patience` seconds of
    silence it is suspect, so that it is tested before training goes on.
    """
    answers = {one.uuid: one for one in sweep.gpus}
    verdicts = {}
    for uuid in sorted(used):
        verdict = found.gpus.get(uuid)
        sample = answers.get(uuid)
        if verdict is None:
            why = "the driver lists no such GPU" if sweep.driver is Driver.present else sweep.why or sweep.driver.value
            verdict = Verdict(state=State.unknown, reasons=(why,), severity=Severity.medium)
        elif not _is_firm(sweep, sample.answer if sample else None) and not _has_proof(verdict):
            verdict = _silent(verdict, max(sweep.silent_s, sample.silent_s if sample else 0.0), patience)
        verdicts[uuid] = verdict
    return verdicts


def _has_proof(verdict: Verdict) -> bool:
    """Whether a GPU that says nothing now has failed for what it said before: its last evidence stays."""
    return verdict.state is State.failed and not verdict.reasons[0].startswith(_OF_SILENCE)


def _silent(verdict: Verdict, seconds: float, patience: float) -> Verdict:
    """What is made of a GPU that says nothing: missing telemetry is itself an alarm, and no proof."""
    if seconds < patience:
        return verdict.model_copy(update={"state": State.unknown})
    reason = f"{SILENT} for {seconds:.0f} s"
    return Verdict(state=State.suspect, reasons=(reason,), action=verdict.action, severity=Severity.medium)


def _is_firm(sweep: Sweep, answer: Answer | None) -> bool:
    return sweep.driver is Driver.present and answer in _FIRM


def decide_door(verdicts: Mapping[str, Verdict], tested: Examined | None, now: float, *, may_test: bool = True) -> Word:
    """Whether the next segment may be leased."""
    condemned = dict(tested.condemned) if tested else {}
    hard = {uuid: one for uuid, one in verdicts.items() if one.state is State.failed} | {
        uuid: one for uuid, one in condemned.items() if uuid in verdicts
    }
    if hard:
        return Word(door=Door.closed, why=_said(hard), verdict=_joined(hard))
    doubtful = {uuid: one for uuid, one in verdicts.items() if untested(uuid, one, tested, now)}
    if doubtful and may_test:
        return Word(door=Door.hold, why=_said(doubtful), verdict=_joined(doubtful))
    return Word()


def doubts(report: GateReport, used: Collection[str], gpus: Mapping[int, str]) -> list[tuple[str, str]]:
    """Which GPUs a failed check of another gate puts in doubt, and why. A slow rank is its own GPU's matter, else all are.

    `gpus` has the GPU of each rank. What is no GPU's matter (a plateau, a slow disk, a starved sampler) puts none in doubt.
    """
    found = []
    for one in report.checks:
        if one.outcome is not Outcome.failed or one.name not in DOUBTFUL.get(report.gate, ()):
            continue
        rank = one.figures.get("rank")
        blamed = [gpus[rank]] if isinstance(rank, int) and gpus.get(rank) in used else sorted(used)
        found += [(uuid, f"{report.gate}: {one.name.replace('_', ' ')}: {one.why}") for uuid in blamed]
    return found


def doubted(verdicts: Mapping[str, Verdict], doubts: Mapping[str, Sequence[str]]) -> dict[str, Verdict]:
    """The verdicts with what other gates hold against GPUs that the table finds healthy."""
    found = dict(verdicts)
    for uuid, reasons in doubts.items():
        if uuid in found and found[uuid].state is State.healthy:
            told = (*reasons, *found[uuid].reasons)
            action = Action.diagnose_then_restart
            found[uuid] = Verdict(state=State.suspect, reasons=told, action=action, severity=Severity.medium)
    return found


def is_silent(verdicts: Mapping[str, Verdict]) -> bool:
    """Whether silence is all that speaks against the GPUs: then a test that hangs as well need not be tried again."""
    doubtful = [one for one in verdicts.values() if one.state is State.suspect]
    return all(one.reasons[0].startswith(SILENT) for one in doubtful)


def untested(uuid: str, verdict: Verdict, tested: Examined | None, now: float) -> bool:
    """Whether a GPU is suspect for a cause that no passed test has answered lately."""
    if verdict.state is not State.suspect:
        return False
    if tested is None or not 0 <= now - tested.time < AGAIN_SECONDS:
        return True
    known = set(tested.cleared.get(uuid, ()))
    return any(cause_of(one) not in known for one in verdict.reasons)


def examined_by(report: GateReport, verdicts: Mapping[str, Verdict], before: Examined | None) -> Examined:
    """What an active test says. Its checks carry the GPU in their figures, under `uuid`; one without is about all.

    What was not measured clears nobody and condemns nobody, but is not asked for again at once either.
    """
    cleared = dict(before.cleared) if before else {}
    condemned = dict(before.condemned) if before else {}
    for uuid, verdict in verdicts.items():
        wrong = [
            one for one in report.checks if one.outcome is Outcome.failed and one.figures.get("uuid", uuid) == uuid
        ]
        if wrong:
            condemned[uuid] = _condemned(wrong)
        else:
            cleared[uuid] = tuple(sorted({cause_of(one) for one in verdict.reasons}))
    return Examined(time=report.time, cleared=cleared, condemned=condemned)


def _condemned(wrong: Iterable[Check]) -> Verdict:
    found = list(wrong)
    values = any("wrong" in one.figures for one in found)
    return Verdict(
        state=State.failed,
        reasons=tuple(f"active test: {one.name}: {one.why or one.rule}" for one in found),
        action=_VALUES_WRONG if values else _BY_TEST,
        severity=Severity.critical if values else Severity.high,
    )


def no_numbers(report: GateReport) -> str:
    """Why what was trained in a segment must be thrown away: a loss, gradients or weights that stay no numbers.

    A program may skip a bad step by itself: one value that is none is told, and stops nobody while the weights are finite.
    """
    failures = [one for one in report.checks if one.outcome is Outcome.failed and one.name in NO_NUMBERS]
    wrong = [one for one in failures if one.name == "finite_weights" or _stays(one)]
    return "; ".join(f"{one.name.replace('_', ' ')}: {one.why}" for one in wrong)


def _stays(found: Check) -> bool:
    measured, run = found.figures.get("measured"), found.figures.get("longest_run")
    if not isinstance(measured, int) or not isinstance(run, int):
        return False
    return run >= FOR_GOOD or (run == measured and measured > 1)


def worst_of(verdicts: Mapping[str, Verdict], tested: Examined | None) -> Verdict:
    """One verdict on all GPUs that count: what a test has found stands beside what the samples say."""
    condemned = {f"{uuid}": one for uuid, one in (tested.condemned if tested else {}).items() if uuid in verdicts}
    found = {uuid: condemned.get(uuid, one) for uuid, one in verdicts.items()}
    state = worst(found.values()).state
    return _joined({uuid: one for uuid, one in found.items() if one.state is state}) if found else worst(())


def passive(
    found: NodeVerdict | None, sweep: Sweep | None, used: Collection[str], names: Mapping[str, str], why: str
) -> tuple[tuple[Check, ...], Verdict | None]:
    """The checks of the passive gate, and the verdict on what the run uses. `why` says why nothing is known, if so."""
    if found is None or sweep is None:
        return (not_measured("gpus", RULE, why or "no sample yet"),), None
    if not used:
        return (not_measured("gpus", RULE, why or "the run uses no GPU here"), _of_node(found)), None
    verdicts = of_used(found, sweep, used)
    checks = [_of_gpu(names.get(uuid, f"GPU {uuid}"), uuid, one, found) for uuid, one in verdicts.items()]
    return (*checks, _of_node(found)), worst(verdicts.values())


def _of_gpu(name: str, uuid: str, verdict: Verdict, found: NodeVerdict) -> Check:
    figures = {"uuid": uuid, "state": verdict.state.value, "not_measured": len(found.not_measured.get(uuid, ()))}
    why = "; ".join(verdict.reasons)
    if verdict.state is State.unknown:
        return not_measured(name, RULE, why or "nothing is known of it", **figures)
    if verdict.state is State.healthy:
        return passed(name, RULE, why, **figures)
    return failed(name, RULE, why, **figures)


def _of_node(found: NodeVerdict) -> Check:
    """What is said of the node itself. It is told, and stops nobody: a training that it hits shows that itself."""
    rule = "the node's own signals are noted; they stop no training"
    own = tuple(one for one in found.verdict.reasons if not one.startswith("GPU "))
    if not own or found.verdict.state is State.healthy:
        return passed("node", rule, "; ".join(own))
    return not_measured("node", rule, "; ".join(own), noted=len(own))


def _said(verdicts: Mapping[str, Verdict]) -> str:
    return "; ".join(f"GPU {uuid}: {'; '.join(one.reasons[:2])}" for uuid, one in verdicts.items())


def _joined(verdicts: Mapping[str, Verdict]) -> Verdict:
    """One verdict on all of them."""
    found = list(verdicts.values())
    return Verdict(
        state=worst(found).state,
        reasons=tuple(f"GPU {uuid}: {reason}" for uuid, one in verdicts.items() for reason in one.reasons),
        action=max((one.action for one in found), key=RUNGS.index),
        severity=min((one.severity for one in found), key=lambda one: one.rank),
    )
