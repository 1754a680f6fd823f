"""One attempt while it runs: observe its ranks, decide whether it has ended, act on what is asked of it."""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.core.checkpoint import AttemptClaim
from everstep.core.gating import Door, Word
from everstep.core.health import Severity
from everstep.core.job import TrainJob
from everstep.core.segment import (
    AttemptEnd,
    Cause,
    CauseKind,
    Outcome,
    Phase,
    RankEnd,
    SegmentResult,
    classify,
    hung_ranks,
)
from everstep.host import watch
from everstep.host.gang import Gang
from everstep.host.leasing import LeaseKeeper
from everstep.host.watch import Pulse, Watch
from everstep.store.layout import RunPlaces

TICK = 0.05
LAST_WORDS = 0.15
LEAVING = 15.0
CLAIM_SECONDS = 1.0
WORDS_SECONDS = 0.5


@dataclass
class Stopping:
    """A graceful stop that was asked for. `until` is when patience ends on our clock, None for never."""

    reason: str
    until: float | None


class Attempt:
    """The running attempt. `end` is set once, when it has ended and no process of it is left."""

    def __init__(
        self,
        job: TrainJob,
        places: RunPlaces,
        claim: AttemptClaim,
        gang: Gang,
        leasing: LeaseKeeper,
        last_segment: int,
        others: Watch,
        clock: Callable[[], float],
    ) -> None:
        self.claim = claim
        self.end: AttemptEnd | None = None
        self.pulse = Pulse(places, claim.attempt, len(gang.ranks), clock)
        self._job = job
        self._places = places
        self._gang = gang
        self._leasing = leasing
        self._reported = last_segment
        self._watch = others
        self._clock = clock
        self._stopping: Stopping | None = None
        self._noticed: set[int] = set()
        self._leaving_since: float | None = None
        self._claim_checked = clock()
        self._words_checked = clock()
        self._unwritten = False
        self._sick: Word | None = None

    @property
    def has_trained(self) -> bool:
        """Whether a step of this attempt has been seen."""
        return self.pulse.step > self.claim.resumed_from

    def tick(self) -> SegmentResult | AttemptEnd | None:
        """Look once, waiting `TICK` at most: a segment's result that was not reported yet, the end, or nothing new."""
        if self.end is None:
            self._gang.wait(TICK)
            self.pulse.look()
            self.end = (
                self._left() or self._taken_over() or self._gate_closed() or self._out_of_patience() or self._hung()
            )
        result = self._next_result()
        if result is not None or self.end is not None:
            return result or self.end
        if self._stopping is not None and self._stopping.until is not None:
            self._write_lease()
            return None  # nobody is asked or shown anything more: what others raise must not break into the stop
        self._obey_wishes()
        self._lease_on()
        self._watch.show(self.pulse.beats[0], self._leasing.lease)
        return None

    def ask_to_stop(self, reason: str, grace: float | None) -> None:
        """Ask for a save and an orderly end; with `grace` the ranks are signalled, and killed after so many seconds."""
        if self._stopping is None or (self._stopping.until is None and grace is not None):
            self._watch.record("stop.requested", step=self.pulse.step, text=reason, by=reason)
            self._stopping = Stopping(reason, None if grace is None else self._clock() + grace)
            self._leasing.stop()
            self.pulse.forget_stillness()
            if grace is not None:
                self._gang.signal(signal.SIGTERM)
        self._write_lease()

    # -- has it ended? ------------------------------------------------------------------------------------------------

    def _left(self) -> AttemptEnd | None:
        """Ranks are gone: in order, then the others may follow in peace; or not, then the attempt is over now."""
        dead = {rank: status for rank, status in self._gang.statuses().items() if status is not None}
        if not dead and self._clock() - self._words_checked < WORDS_SECONDS:
            return None
        self._words_checked = self._clock()
        words = watch.last_words(self._places, self.claim.attempt, len(self._gang.ranks))
        if not dead and not words:
            return None
        broken = {rank: status for rank, status in dead.items() if not _in_order(words.get(rank))}
        self._notice(broken)
        if not broken and len(dead) < len(self._gang.ranks) and not self._lingers(words):
            return None
        if broken:
            self._gang.wait_all(LAST_WORDS)
        return self._classified()

    def _lingers(self, words: Mapping[int, RankEnd]) -> bool:
        """Whether the ranks have said their last words (or one that it failed) and still do not go."""
        if len(words) < len(self._gang.ranks) and all(_in_order(word) for word in words.values()):
            self._leaving_since = None
            return False
        if self._leaving_since is None:
            self._leaving_since = self._clock()
        return self._clock() - self._leaving_since > LEAVING

    def _classified(self) -> AttemptEnd:
        statuses = self._gang.statuses()
        self._gang.kill()
        words = watch.last_words(self._places, self.claim.attempt, len(self._gang.ranks))
        end = classify(self.claim.attempt, words, statuses)
        cause = end.cause
        if self._stopping and cause.kind is CauseKind.killed and cause.key == f"signal {int(signal.SIGTERM)}":
            return self._finish(Outcome.stopped, self._unsaved("was stopped before it could save"))
        beat = self.pulse.beats[cause.rank] if cause.rank is not None else None
        if beat and cause.kind in (CauseKind.killed, CauseKind.exit):
            cause = cause.model_copy(update={"phase": cause.phase or beat.phase, "step": beat.step})
        return self._finish(end.outcome, cause, end)

    def _taken_over(self) -> AttemptEnd | None:
        if self._clock() - self._claim_checked < CLAIM_SECONDS:
            return None
        self._claim_checked = self._clock()
        newest = watch.newest_claim(self._places)
        if newest is None or newest <= self.claim.attempt:
            return None
        self._gang.kill()
        message = f"attempt {newest} has been claimed by another supervisor"
        return self._finish(Outcome.failed, Cause(kind=CauseKind.fenced, key="newer attempt", message=message))

    def _gate_closed(self) -> AttemptEnd | None:
        reason = self._watch.gate()
        if reason is None:
            return None
        self._watch.record("gate.closed", step=self.pulse.step, severity=Severity.medium, text=reason, reason=reason)
        self._gang.kill()
        cause = Cause(kind=CauseKind.verification, key=reason, message=f"{reason} did not pass its verification")
        return self._finish(Outcome.failed, cause)

    def _out_of_patience(self) -> AttemptEnd | None:
        stopping = self._stopping
        if stopping is None or stopping.until is None or self._clock() < stopping.until:
            return None
        self._gang.kill()
        words = watch.last_words(self._places, self.claim.attempt, len(self._gang.ranks))
        if len(words) == len(self._gang.ranks) and all(_in_order(word) for word in words.values()):
            end = classify(self.claim.attempt, words, {})
            return self._finish(end.outcome, end.cause, end)
        return self._finish(Outcome.stopped, self._unsaved("did not save in the time it was given"))

    def _hung(self) -> AttemptEnd | None:
        alive = {rank for rank, status in self._gang.statuses().items() if status is None}
        still = [seconds if rank in alive else None for rank, seconds in enumerate(self.pulse.still)]
        hung = hung_ranks(self._job.limits, self.pulse.beats, still)
        if not hung:
            return None
        rank = hung[0]
        beat = self.pulse.beats[rank]
        phase, step = (beat.phase, beat.step) if beat else (Phase.start, self.claim.resumed_from)
        message = f"rank {rank} made no progress for {still[rank]:.0f} s in phase {phase.value} after step {step}"
        self._watch.record("attempt.noticed", step=step, severity=Severity.high, text=message, ranks=hung)
        self._gang.kill()
        cause = Cause(kind=CauseKind.hang, key=phase.value, message=message, phase=phase, rank=rank, step=step)
        return self._finish(Outcome.failed, cause)

    # -- what follows -------------------------------------------------------------------------------------------------

    def _next_result(self) -> SegmentResult | None:
        """The next segment's result, also after the end: a rank may publish and leave within one look."""
        if self.end is not None and self.end.cause.kind in (CauseKind.verification, CauseKind.fenced):
            return None
        number = min((number for number in self._leasing.lease.ends if number > self._reported), default=None)
        result = watch.segment_result(self._places, self.claim.attempt, number) if number is not None else None
        if result is not None:
            self._reported = result.segment
            self._leasing.forget_before(result.segment + 1)
        return result

    def _obey_wishes(self) -> None:
        wish = self._watch.stop_wish()
        if wish is not None:
            self.ask_to_stop(wish, self._job.grace_seconds)
        elif self._stopping is None and (request := watch.stop_request(self._places)):
            self.ask_to_stop(request, None)

    def _lease_on(self) -> None:
        self._leasing.pace(self._watch.save_every())
        beat = self.pulse.beats[0]
        if beat is not None and self._stopping is None:
            word = self._watch.health(self.pulse.beats)
            if word.door is Door.closed:
                self._sick = word
                self.ask_to_stop(f"the gate on GPU health is closed: {word.why}", None)
            more = self._leasing.extend(beat.step, beat.step_seconds, gates_pass=word.door is Door.open)
            if more:
                ends = {str(number): end for number, end in more.items()}
                self._watch.record("lease.extended", step=beat.step, ends=ends)
        self._write_lease()

    def _write_lease(self) -> None:
        """A tier that does not take the lease now may take it at the next tick; training goes on to the old one."""
        try:
            self._leasing.write()
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                self._watch.record("lease.unwritten", severity=Severity.medium, text=str(error))
            self._unwritten = True

    def _notice(self, broken: Mapping[int, int]) -> None:
        for rank, status in broken.items():
            if rank not in self._noticed:
                self._noticed.add(rank)
                how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
                self._watch.record(
                    "attempt.noticed",
                    step=self.pulse.step,
                    severity=Severity.medium,
                    text=f"rank {rank} {how}",
                    rank=rank,
                )

    def _unsaved(self, what: str) -> Cause:
        kept = watch.committed_step(self._places, self.claim.attempt) or self.claim.resumed_from
        reason = self._stopping.reason if self._stopping else "stop"
        message = f"{reason}: the attempt {what}; kept step {kept}"
        return Cause(kind=CauseKind.stop, key="unsaved", message=message, step=self.pulse.step)

    def _finish(self, outcome: Outcome, cause: Cause, told: AttemptEnd | None = None) -> AttemptEnd:
        """The end, with what the ranks told or else what was seen of them last."""
        if self._sick is not None and outcome is Outcome.stopped:
            outcome, cause = Outcome.failed, _of_health(self._sick, self.pulse.step)
        committed = watch.committed_step(self._places, self.claim.attempt) or self.claim.resumed_from
        self.end = AttemptEnd(
            attempt=self.claim.attempt,
            outcome=outcome,
            cause=cause,
            step=max(told.step if told else 0, self.pulse.step),
            saved_step=max(told.saved_step if told else 0, committed),
            finished_early=told.finished_early if told else False,
        )
        if self._stopping and outcome is not Outcome.failed:
            with contextlib.suppress(OSError):  # a stop file that stays is obeyed once more, which is no harm
                self._places.stop_file.unlink(missing_ok=True)
        self._watch.record(
            "attempt.ended",
            step=self.end.step,
            severity=Severity.low if outcome is not Outcome.failed else Severity.medium,
            text=cause.message,
            outcome=outcome.value,
            cause=cause.model_dump(mode="json"),
            last_seen=self.pulse.last_seen or self.claim.time,
            committed_step=committed,
            noticed=time.time(),
        )
        return self.end


def _of_health(word: Word, step: int) -> Cause:
    """Why ranks that were asked to stop, and did, are no stopped run."""
    return Cause(kind=CauseKind.health, key="gate", message=word.why, step=step)


def _in_order(word: RankEnd | None) -> bool:
    return word is not None and word.outcome is not Outcome.failed
