"""Segments are leases on optimizer steps: the records that parent and child exchange, and what they mean.

The parent writes `lease.json`. The child trains to `until_step`, saves at every segment end on the way, publishes
`segments/<n>/result.json` and goes on at once if the lease was extended by then.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from pydantic import Field, JsonValue

from everstep.core.job import Limits, TrainJob
from everstep.core.record import Record, Versioned


class Phase(StrEnum):
    """What a rank is doing. `wait` = at a segment end, without a further lease."""

    start = "start"
    restore = "restore"
    compile = "compile"
    train = "train"
    save = "save"
    eval = "eval"
    wait = "wait"
    stop = "stop"


class Lease(Versioned):
    """The parent's word to the child.

    `ends` maps the number of each leased segment to the step at which it ends, in order; the last one is `until_step`.
    `stop` asks for a save after this step and an orderly end. `saves` counts requests for a save.
    `save_every_seconds` replaces the attempt's own rhythm of saves by time, once it is given.
    """

    attempt: int
    ends: dict[int, int] = {}
    stop: bool = False
    saves: int = 0
    save_every_seconds: float | None = None

    @property
    def until_step(self) -> int:
        return max(self.ends.values(), default=0)

    def end_after(self, step: int) -> int:
        """The next segment end after `step`; 0 if no lease reaches that far."""
        return min((end for end in self.ends.values() if end > step), default=0)

    def segment_ending_at(self, step: int) -> int:
        """The number of the segment that ends at `step`; 0 if none does."""
        return next((number for number, end in self.ends.items() if end == step), 0)


class AttemptSpec(Versioned):
    """All that one rank is told; one line of JSON on its standard input. Times in seconds, paths absolute."""

    name: str
    run: str
    attempt: int = Field(ge=1)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    local_rank: int = Field(ge=0)
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    listen_fd: int | None = None
    program: str
    search_path: str
    config: dict[str, JsonValue]
    data: str
    steps: int
    seed: int
    threads: int
    device: str = "auto"
    save_every_steps: int | None = None
    save_every_seconds: float | None = None
    evaluate_every_steps: int | None = None
    restore: str | None = None
    resumed_from: int = 0
    check_probe: bool = True
    run_dir: str
    local_dir: str
    dataset_fingerprint: str = ""
    code_version: str = ""
    grace_seconds: float = Field(25.0, gt=0, description="After a stop signal a rank has left by then, saved or not.")
    parent_pid: int


class Heartbeat(Versioned):
    """A rank's sign of life, on node-local disk. `progress` grows with all that counts as progress.

    `work_seconds` is the median of this rank's own work in a step, before it waits for the others; None where that
    cannot be told apart (one rank, a sharded model) or too few steps were seen. `gpu` is the UUID of the rank's CUDA
    device as NVML prints it, empty on a CPU.
    """

    attempt: int
    rank: int
    pid: int
    time: float
    phase: Phase
    step: int
    progress: int
    loss: float | None = None
    step_seconds: float | None = None
    slowest_step_seconds: float | None = None
    samples_per_second: float | None = None
    saved_step: int = 0
    work_seconds: float | None = None
    gpu: str = ""


class PhaseMark(Record):
    """A line of `phases.jsonl`: rank 0 of `attempt` entered `phase` at `time` (Unix seconds) after `step`."""

    attempt: int
    time: float
    phase: Phase
    step: int


class Outcome(StrEnum):
    """How a segment or an attempt ended."""

    done = "done"
    stopped = "stopped"
    failed = "failed"


class CauseKind(StrEnum):
    """Why an attempt ended otherwise than done."""

    none = "none"
    stop = "stop"
    user = "user"
    exception = "exception"
    killed = "killed"
    exit = "exit"
    hang = "hang"
    damaged = "damaged"
    probe = "probe"
    verification = "verification"
    space = "space"
    lost = "lost"
    fenced = "fenced"
    health = "health"


class Cause(Record):
    """Why. `key` is the same for the same fault again (the exception's type, the signal, the file)."""

    kind: CauseKind = CauseKind.none
    key: str = ""
    message: str = ""
    phase: Phase | None = None
    rank: int | None = None
    step: int | None = None


class SegmentResult(Versioned):
    """What rank 0 publishes at a segment's end, after the checkpoint was committed."""

    attempt: int
    segment: int
    step: int
    outcome: Outcome
    checkpoint: str
    tier: str = "local"
    time: float
    metrics: dict[str, float] = {}
    shown: str = ""
    loss: float | None = None


class RankEnd(Versioned):
    """A rank's last word, written when it leaves by itself."""

    attempt: int
    rank: int
    outcome: Outcome
    step: int
    saved_step: int
    time: float
    cause: Cause = Cause()
    finished_early: bool = False


class AttemptEnd(Record):
    """The end of an attempt, from the ranks' last words first and their wait statuses second."""

    attempt: int
    outcome: Outcome
    cause: Cause = Cause()
    step: int = 0
    saved_step: int = 0
    finished_early: bool = False


def classify(attempt: int, ends: Mapping[int, RankEnd], statuses: Mapping[int, int | None]) -> AttemptEnd:
    """How an attempt ended.

    `ends` are the last words by rank, as far as there are any for this attempt. `statuses` are wait statuses by rank:
    exit code, negative signal number, or None for a rank that the supervisor itself had to kill after another had
    left. A rank that says why it failed is believed before the silent ones; the first silent death is the cause if
    nobody says more; a rank lost its peer second (connection errors) is an echo.
    """
    words = {rank: end for rank, end in ends.items() if end.attempt == attempt}
    step = max((end.step for end in words.values()), default=0)
    saved = max((end.saved_step for end in words.values()), default=0)
    early = any(end.finished_early for end in words.values())

    def ended(outcome: Outcome, cause: Cause) -> AttemptEnd:
        return AttemptEnd(
            attempt=attempt, outcome=outcome, cause=cause, step=step, saved_step=saved, finished_early=early
        )

    failures = [end for _, end in sorted(words.items()) if end.outcome is Outcome.failed]
    silent = {rank: status for rank, status in sorted(statuses.items()) if status and rank not in words}
    primary = [end for end in failures if not is_echo(end.cause)]
    if primary:
        return ended(Outcome.failed, _of_rank(primary, len(statuses)))
    if silent:
        rank, status = next(iter(silent.items()))
        return ended(Outcome.failed, _silent_cause(rank, status, step))
    if failures:
        return ended(Outcome.failed, failures[0].cause)
    missing = sorted(rank for rank in statuses if rank not in words)
    if missing:
        cause = Cause(
            kind=CauseKind.lost, key="no last word", message=f"rank {missing[0]} left without a word", step=step
        )
        return ended(Outcome.failed, cause)
    outcomes = {end.outcome for end in words.values()}
    if outcomes == {Outcome.done}:
        return ended(Outcome.done, Cause())
    stop = next((end.cause for end in words.values() if end.outcome is Outcome.stopped), Cause(kind=CauseKind.stop))
    return ended(Outcome.stopped, stop)


def _of_rank(failures: Sequence[RankEnd], ranks: int) -> Cause:
    """The first failure, with its rank where the others did not fail in the same way: that is where to look."""
    cause, rank = failures[0].cause, failures[0].rank
    alike = len(failures) == ranks and len({end.cause.key for end in failures}) == 1
    if alike or ranks < 2 or cause.kind not in (CauseKind.exception, CauseKind.user):
        return cause
    return cause.model_copy(update={"message": f"rank {rank}: {cause.message}", "rank": rank})


def is_echo(cause: Cause) -> bool:
    """Whether a failure is only the sound of another rank's death (a broken collective)."""
    text = cause.message.lower()
    heard = ("closed by peer", "reset by peer", "gloo", "nccl", "broken pipe", "bytes from the store", "tcpstore")
    return cause.kind is CauseKind.exception and any(word in text for word in heard)


def _silent_cause(rank: int, status: int, step: int) -> Cause:
    if status < 0:
        message = f"rank {rank} was killed by signal {-status}"
        return Cause(kind=CauseKind.killed, key=f"signal {-status}", message=message, rank=rank, step=step)
    message = f"rank {rank} exited with code {status} without a word"
    return Cause(kind=CauseKind.exit, key=f"code {status}", message=message, rank=rank, step=step)


def next_segment(job: TrainJob, step: int, last: int, step_seconds: float | None) -> dict[int, int]:
    """The segment that begins after `step`, as {number: step at which it ends}; empty when the job's steps are done.

    `last` is the number of the newest segment that ended at or before `step`. With `segment_steps` the ends stand on
    its multiples, wherever the run was resumed. With `segment_minutes` the end follows from the measured step time;
    before one is known the segment is a short one of 100 steps, which measures it.
    """
    if step >= job.steps:
        return {}
    if job.segment_steps:
        number = step // job.segment_steps + 1
        return {number: min(number * job.segment_steps, job.steps)}
    if job.segment_minutes:
        length = max(1, round(job.segment_minutes * 60 / step_seconds)) if step_seconds else 100
        return {last + 1: min(step + length, job.steps)}
    return {last + 1: job.steps}


def should_extend(lease: Lease, step: int, step_seconds: float | None, gates_pass: bool, ahead_seconds: float) -> bool:
    """Whether the lease is to be extended now: gates pass and its end is nearer than `ahead_seconds` of training."""
    if lease.stop or not gates_pass:
        return False
    left = lease.until_step - step
    return left <= 2 or step_seconds is None or left * step_seconds <= ahead_seconds


def phase_limit(limits: Limits, beat: Heartbeat | None) -> float:
    """Seconds without progress after which this phase counts as a hang."""
    if beat is None:
        return limits.start
    if beat.phase is Phase.train:
        return max(limits.train_floor, limits.train_factor * (beat.slowest_step_seconds or 0.0))
    if beat.phase is Phase.stop:
        return limits.save
    return float(getattr(limits, beat.phase.value))


def hung_ranks(limits: Limits, beats: Sequence[Heartbeat | None], still_seconds: Sequence[float | None]) -> list[int]:
    """The ranks that hang: no progress for longer than their phase allows.

    `still_seconds[r]` is how long the *parent's* clock has seen no change in rank r's progress, or None where the
    parent could not look (unknown is not failed). Ranks that wait in a collective for a hung one look the same as it,
    so all are named; the one with the least progress stands first.
    """
    late = [
        rank
        for rank, (beat, still) in enumerate(zip(beats, still_seconds, strict=True))
        if still is not None and still > phase_limit(limits, beat)
    ]

    def progress(rank: int) -> tuple[int, int]:
        beat = beats[rank]
        return (beat.progress if beat else -1, rank)

    return sorted(late, key=progress)
