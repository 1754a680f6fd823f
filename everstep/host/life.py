"""The life of a run in one flow process: what each step of `flows.train` does. No order in here, and no Prefect."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from everstep.core import place
from everstep.core.check import GateReport
from everstep.core.checkpoint import Key
from everstep.core.checkpoint import State as CheckpointState
from everstep.core.errors import Damaged, Fenced, TrainingFailed
from everstep.core.gate import GateResult
from everstep.core.gating import Word
from everstep.core.health import Severity
from everstep.core.job import TrainJob
from everstep.core.promotion import Promotion
from everstep.core.recovery import Decision, History, Next, Past
from everstep.core.recovery import decide as judge
from everstep.core.segment import AttemptEnd, Cause, CauseKind, Heartbeat, Outcome, SegmentResult
from everstep.core.summary import RunReport
from everstep.host import (
    closing,
    code,
    gate_reports,
    jobs,
    process,
    promotion,
    reporting,
    resume,
    runs,
    staging,
)
from everstep.host.cadence import Pacer
from everstep.host.far import Far, elsewhere
from everstep.host.gate import Gatekeeper
from everstep.host.health_gate import HealthGate
from everstep.host.housekeeper import Housekeeper
from everstep.host.journal import Journal
from everstep.host.observer import Observer
from everstep.host.progress import Progress
from everstep.host.supervisor import Supervisor, Watch
from everstep.host.tracking import Tracker
from everstep.store import faults, jsonl, marks, s3_access
from everstep.store.s3_access import Access

CHECKS_SECONDS = 5.0
HINT_SECONDS = 10.0
"""How long a resume waits for MLflow. The ranks import torch meanwhile."""


class Orchestrator(Protocol):
    """What the hands ask of Prefect: which flow run this is, whether it is wished to end, and to show its report."""

    flow_run_id: str

    def wish(self) -> str | None: ...

    def publish(self, report: RunReport) -> None: ...

    def show(self, report: GateReport, job: str, run: str) -> None: ...


@dataclass(frozen=True)
class Staged:
    """A checked job with its data on the local tier."""

    job: TrainJob
    staged: staging.Staged
    began: float
    finished: float
    access: Access | None = field(default=None, repr=False)


class Life:
    """A run while this flow trains it.

    No dataclass: Prefect would walk through one for each task that is given it, and stumble over what changes meanwhile.
    """

    gate: Gatekeeper
    health: HealthGate
    far: Far
    housekeeper: Housekeeper

    def __init__(
        self,
        run: runs.Run,
        prefect: Orchestrator,
        journal: Journal,
        observer: Observer,
        supervisor: Supervisor,
        tracker: Tracker,
        progress: Progress,
        pacer: Pacer,
    ) -> None:
        self.run = run
        self.journal = journal
        self.observer = observer
        self.supervisor = supervisor
        self.tracker = tracker
        self.progress = progress
        self.pacer = pacer
        self.publish = prefect.publish
        self.flow_run = prefect.flow_run_id
        self.past = journal.past()
        self.start: resume.Start | None = None
        self.resumed_from: int | None = None
        self.attempts_here = 0
        self.probed: list[tuple[str, str]] = []
        self.decision: Decision | None = None
        self.end: AttemptEnd | None = None
        self.closed = False
        self.all_landed: bool | None = None
        self.promotion: Promotion | None = None
        self.reading = ""  # the checkpoint that the ranks may still be loading
        self.beats: Sequence[Heartbeat | None] = ()
        self._prefect = prefect
        self._checking = 0

    def show(self, report: GateReport) -> None:
        """Show in Prefect what a gate said."""
        self._prefect.show(report, self.run.record.name, self.run.record.run)

    @cached_property
    def reporter(self) -> reporting.Reporter:
        return reporting.Reporter(self.run.places)

    @property
    def over(self) -> bool:
        """Whether nothing is left to train in this flow run."""
        return self.run.final is not None or (
            self.decision is not None and self.decision.next not in (Next.restart, Next.walk_back)
        )

    def keep(self) -> None:
        """Delete what retention allows on every tier."""
        self.housekeeper.keep()

    def heard(self, beats: Sequence[Heartbeat | None]) -> Word:
        """What the gates say of the next segment, for the supervisor."""
        self.beats = beats
        return self.health.ask(beats)

    def told(self, report: GateReport) -> None:
        """A gate's report goes into the journal, and is shown."""
        gate_reports.record(report, self.journal.record)
        self.show(report)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """A gate that runs beside the training; the run's end waits for it a little."""
        self._checking += 1
        try:
            yield
        finally:
            self._checking -= 1

    def await_checks(self) -> None:
        """Let the last segment's gates come to their end, so that the report has them."""
        until = time.monotonic() + CHECKS_SECONDS
        while self._checking and time.monotonic() < until:
            time.sleep(0.02)

    def landed(self, key: Key, uri: str) -> None:
        """A newer checkpoint is durable: MLflow hears of it, and older ones may go, also in a long segment."""
        self.tracker.checkpoint(uri, key.step)
        self.tracker.propose(promotion.candidate(self.run, key))
        self.keep()


def stage(job: TrainJob, access: Access | None = None, progress: staging.Progress | None = None) -> Staged:
    """Check the job and bring its data to the local tier. Raises ValueError for what the user can mend.

    `access` is the way to the object store that a block gave; without one the job and the environment say it.
    `progress` is told bytes done and bytes in all.
    """
    job = job.resolve(Path.cwd())
    jobs.check(job, Path.cwd())
    began = time.time()
    if access is None and any(place.is_object(one) for one in (job.data.source, job.tiers.object or "")):
        access = s3_access.access(job.s3)
    found = staging.stage(
        job.data.source, Path(job.tiers.local), progress=progress, access=access, budget_gb=job.tiers.budget_gb
    )
    return Staged(job, found, began, time.time(), access)


@contextmanager
def own_run(staged: Staged, prefect: Orchestrator, *, take_over: bool = False) -> Iterator[Life]:
    """Own the job's run for the length of the block; whatever happens, nothing is left running after it."""
    job, manifest = staged.job, staged.staged.manifest
    version = code.version(job.program)
    where = elsewhere(job, staged.access)
    with runs.own(job, manifest, prefect.flow_run_id, version, take_over=take_over, elsewhere=where) as run:
        journal = Journal(job, run, prefect.flow_run_id)
        life = _assemble(run, staged, prefect, journal)
        try:
            if run.final is None:
                _open(life, staged)
            yield life
        except BaseException as error:
            closing.interrupted(life, error)
            raise
        finally:
            life.gate.close()
            life.health.close()
            life.pacer.close()
            life.supervisor.close()
            life.observer.stop()
            life.tracker.close_quickly()
            journal.close()
            life.progress.close()


def check_data(life: Life) -> GateResult | None:
    """Wait for the verdict on the data, before anything is trained on it. Raises ValueError when the gate is closed."""
    return None if life.run.final is not None else life.gate.answer()


def begin_attempt(life: Life) -> None:
    """Choose the checkpoint to start from, claim the next attempt, and let its ranks go."""
    places = life.run.places
    again = life.attempts_here > 0
    hinted = None if again or life.run.created else _ask_mlflow(life)
    answered = again or life.run.created or life.far.look()
    claimed = runs.claims(places)
    resumed = {number: claim.resumed_from for number, claim in claimed.items()}
    start = resume.choose(
        places, resumed, life.journal.record, hinted, trust_marks=again, bring=life.far.bring, told_all=answered
    )
    number = max([*claimed, *resume.attempts_seen(places)], default=0) + 1
    folder = start.folder.name if start.folder else ""
    claim = runs.claim(places, number, start.step, folder, life.flow_run)
    if claim is None:
        raise Fenced(f"Attempt {number} of run {life.run.record.run} was claimed by another flow run.")
    if not again:
        life.far.claim(claim)
    life.journal.attempt = number
    life.journal.record("attempt.claimed", step=start.step, resumed_from=start.step, checkpoint=folder, tier=start.tier)
    if life.attempts_here == 0:
        life.resumed_from = start.step if start.folder else None
        where = f"from step {start.step} ({start.tier} tier)" if start.folder else "from step 0: no checkpoint yet"
        life.progress.say(f"run {life.run.record.run}: attempt {number}, {where}")
    life.start, life.reading = start, folder
    life.attempts_here += 1
    life.observer.follow(number)
    life.tracker.attempt(number, start.step)
    life.supervisor.start(claim, start.folder, _last_segment(life, start.step))
    life.pacer.begin(number)


def train_segment(life: Life) -> SegmentResult | AttemptEnd:
    """Supervise until the next segment's result or the attempt's end."""
    end = life.supervisor.run_segment()
    life.reading = ""
    if isinstance(end, SegmentResult):
        life.pacer.ask()
        life.journal.record("segment.finished", step=end.step, segment=end.segment, checkpoint=end.checkpoint)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in end.metrics.items())
        life.progress.say(f"segment {end.segment} ends at step {end.step}" + (f": {figures}" if figures else ""))
    return end


def decide(life: Life, end: AttemptEnd) -> Decision:
    """Judge an attempt's end, say so, and set damaged checkpoints aside. Waits where the decision says so."""
    faults.point("flow.decide")
    committed = closing.proven_step(life.run.places)
    end = _explained(life, _proved(life, end))
    decision = judge(end, life.health.verdict(), History(tuple(life.past), committed, life.run.job.retries))
    life.past.append(Past(end, committed))
    life.end, life.decision = end, decision
    life.journal.record(
        "decision.made",
        step=end.step,
        severity=decision.severity,
        text=decision.reason,
        next=decision.next.value,
        action=decision.action.value,
        cause=end.cause.kind.value,
    )
    if decision.next is Next.walk_back:
        _set_aside(life, end)
    if end.cause.kind is CauseKind.probe and decision.next is Next.give_up:
        for folder, tier in life.probed:
            marks.lift(life.run.places, folder, tier)
    if end.outcome is Outcome.failed:
        verb = {Next.restart: "restarting", Next.walk_back: "going back to the checkpoint before"}.get(decision.next)
        life.progress.say(f"attempt {end.attempt}: {decision.reason}" + (f"; {verb}" if verb else ""))
    if decision.delay_seconds:
        time.sleep(decision.delay_seconds * random.uniform(0.5, 1.0))  # noqa: S311 - jitter is no secret
    return decision


def finish(life: Life) -> dict[str, Any]:
    """Bring the run to its end and give its JSON line.

    Raises ValueError when the user's program or job is at fault, TrainingFailed when the run cannot go on.
    """
    if life.run.final is not None:
        return closing.again(life)
    life.gate.settle()
    life.await_checks()
    assert life.decision is not None
    if life.decision.next is Next.finish:
        return closing.completed(life)
    if life.decision.next is Next.stop:
        return closing.stopped(life)
    closing.failed(life)
    if life.decision.user_error:
        raise ValueError(life.decision.reason)
    raise TrainingFailed(
        f"{life.decision.reason}. What to do: {life.decision.action.advice}. "
        f"The logs are in {life.run.places.persistent / 'logs'}."
    )


def _assemble(run: runs.Run, staged: Staged, prefect: Orchestrator, journal: Journal) -> Life:
    tracker = Tracker.of(run, journal.record)
    observer = Observer(run.places, journal.record)
    progress = Progress(run.job.steps, lambda: observer.durable_step)
    journal.told = progress.hear
    pacer = Pacer(run.job, run.places, journal.uri, journal.record)
    watch = Watch(
        stop_wish=lambda: prefect.wish() or observer.takeover(),
        gate=observer.gate,
        show=progress.show,
        record=journal.record,
        save_every=lambda: pacer.seconds,
        health=lambda beats: life.heard(beats),  # noqa: PLW0108 - made below
    )
    supervisor = Supervisor(run.job, run.places, run.record, staged.staged.data, watch, access=staged.access)
    life = Life(run, prefect, journal, observer, supervisor, tracker, progress, pacer)
    life.far = Far(run.places, staged.access, journal.record)
    observer.landed = life.landed
    life.housekeeper = Housekeeper(
        run.places, run.job.checkpoint, journal.record, lambda: {life.reading} if life.reading else set()
    )
    observer.tend = life.housekeeper.make_room
    life.health = HealthGate(run.job, run.places, supervisor.token, journal.record, life.show, journal.uri)
    life.gate = Gatekeeper(run.job, run.places, staged.staged, supervisor.token, journal.record)
    return life


def _open(life: Life, staged: Staged) -> None:
    """Say that this flow run begins, and make sure that nothing of an earlier one still runs on this machine."""
    places = life.run.places
    for folder in (places.checkpoints("local"), places.checkpoints("persistent")):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if life.run.created:
        life.journal.record(
            "run.created", at=life.run.record.created, queued_since=min(staged.began, life.run.record.created)
        )
    if life.run.adopted:
        life.journal.record("run.adopted", text=f"found on the object tier, {places.object}")
        life.progress.say(f"run {life.run.record.run} is not on this machine; it was found in {places.object}")
    life.journal.record("flow.started", at=staged.began, flow_run=life.flow_run)
    life.journal.record("stage.started", at=staged.began)
    life.journal.record(
        "stage.finished",
        at=staged.finished,
        files=len(staged.staged.manifest.files),
        bytes=staged.staged.bytes,
        fetched=staged.staged.fetched,
    )
    reporting.note(places, life.run.job, life.journal.record)
    life.supervisor.prepare()
    killed = process.sweep(process.token(life.run.record), life.run.job.grace_seconds, spare=life.supervisor.token)
    if killed:
        life.journal.record("leftovers.killed", severity=Severity.medium, pids=list(killed))
    life.gate.ask()
    life.health.start()
    _note_lost_attempt(life)
    life.observer.start()
    life.tracker.start(at_once=not life.run.created)


def _ask_mlflow(life: Life) -> resume.Hinted | None:
    """What MLflow names as the run's newest durable checkpoint. It is asked first; the tiers are the truth."""
    hint = life.tracker.hint(HINT_SECONDS)
    if hint is None or not hint.checkpoint.startswith(("file://", "s3://")):
        return None
    life.journal.record("tracking.hint", step=hint.step, checkpoint=hint.checkpoint)
    return resume.Hinted(hint.checkpoint)


def _note_lost_attempt(life: Life) -> None:
    """Say when the last attempt was seen alive, if the flow that supervised it could not say how it ended."""
    places = life.run.places
    lost = max(runs.claims(places), default=0)
    if not lost or any(
        e.get("kind") == "attempt.ended" and e.get("attempt") == lost for e in jsonl.read(places.events)
    ):
        return
    signs = [row["time"] for row in jsonl.read(places.phases) if row.get("attempt") == lost]
    for path in places.local.glob("heartbeat-*.json"):
        try:
            beat = Heartbeat.parse(path.read_bytes(), str(path.parent), path.name)
        except (Damaged, FileNotFoundError):
            continue
        signs += [beat.time] if beat.attempt == lost else []
    life.journal.attempt = lost
    life.journal.record("attempt.lost", last_seen=max(signs, default=None))


def _last_segment(life: Life, step: int) -> int:
    """The number of the newest segment that ended at or before `step`."""
    numbers = [0]
    for path in (life.run.places.persistent / "segments").glob("*/result.json"):
        try:
            result = SegmentResult.parse(path.read_bytes(), str(path.parent), path.name)
        except Damaged:
            continue
        if result.step <= step:
            numbers.append(result.segment)
    return max(numbers)


def _proved(life: Life, end: AttemptEnd) -> AttemptEnd:
    """Steps are done when the checkpoint of the last one verifies: training may end before a gate could close."""
    if end.outcome is not Outcome.done:
        return end
    wrong = resume.unproven(life.run.places, end.step)
    if wrong is None:
        return end
    cause = Cause(kind=CauseKind.verification, key=wrong.folder, message=wrong.why, step=end.step)
    return end.model_copy(update={"outcome": Outcome.failed, "cause": cause})


def _explained(life: Life, end: AttemptEnd) -> AttemptEnd:
    """The end with the reason for which its checkpoint failed, where another process found it."""
    why = marks.reason(life.run.places, end.cause.key, "local", CheckpointState.quarantined)
    if end.cause.kind is not CauseKind.verification or not why:
        return end
    return end.model_copy(update={"cause": end.cause.model_copy(update={"message": why.rstrip(".")})})


def _set_aside(life: Life, end: AttemptEnd) -> None:
    """Quarantine what the attempt's end names: on the tier it was read from, or everywhere for a probe mismatch."""
    places, folder = life.run.places, end.cause.key
    tiers = list(places.tiers) if end.cause.kind is CauseKind.probe else [life.start.tier if life.start else "local"]
    if end.cause.kind is CauseKind.verification:
        tiers = ["local"]
    for tier in tiers:
        if (places.checkpoints(tier) / folder).exists():
            marks.quarantine(places, folder, tier, end.cause.message)
            if end.cause.kind is CauseKind.probe:
                life.probed.append((folder, tier))
