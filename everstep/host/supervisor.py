"""The supervisor: starts the ranks of an attempt, leases them steps, tells how each segment and the attempt ended.

It runs in the main thread of the flow process, because that is where Prefect raises a cancellation and because the
ranks' parent-death signal hangs on the thread that started them. However `run_segment` is left but by a result, the
ranks have been asked to save, and are gone.
"""

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from everstep.core.checkpoint import AttemptClaim, RunRecord
from everstep.core.errors import Fenced, StoreUnavailable
from everstep.core.health import Severity
from everstep.core.job import TrainJob
from everstep.core.place import is_object
from everstep.core.segment import AttemptEnd, AttemptSpec, SegmentResult
from everstep.host import gang, process, scratch, warden
from everstep.host.attempt import Attempt
from everstep.host.courier import CopierSpec, carried
from everstep.host.gang import Gang
from everstep.host.keeper import Keeper
from everstep.host.leasing import LeaseKeeper
from everstep.host.process import Process
from everstep.host.watch import Watch, newest_claim
from everstep.store.layout import RunPlaces
from everstep.store.s3_access import Access

__all__ = ["Supervisor", "Watch"]

DEFAULT_SAVE_SECONDS = 15 * 60.0
STANDBY_NICENESS = 5
COPIER = (sys.executable, "-m", "everstep.host.copier")


class Supervisor:
    """Supervises one run on this machine, one attempt after the other; see the module.

    `last_end` is the end of the newest attempt, also when `run_segment` raised. `token` marks all processes that this
    supervisor starts.
    """

    def __init__(
        self,
        job: TrainJob,
        places: RunPlaces,
        run: RunRecord,
        data: Path,
        watch: Watch,
        clock: Callable[[], float] = time.monotonic,
        *,
        command: Sequence[str] = gang.COMMAND,
        copier: Sequence[str] = COPIER,
        access: Access | None = None,
    ) -> None:
        self.last_end: AttemptEnd | None = None
        self.token = f"{process.token(run)}/{secrets.token_hex(4)}"
        self._job = job
        self._places = places
        self._run = run
        self._data = data
        self._watch = watch
        self._clock = clock
        self._command = tuple(command)
        self._serial = 0
        self._attempt: Attempt | None = None
        self._gang: Gang | None = None
        self._standby: Gang | None = None
        self._standby_wanted = False
        self._stopped_at: float | None = None
        self._warden: Process | None = None
        self._copier = self._keeper(copier, "copier", self._copier_spec())
        self._uploader: Keeper | None = None
        if places.object:
            packed, names = carried(access)
            more = {"object_uri": _absolute(places.object), "access": packed}
            self._uploader = self._keeper(copier, "uploader", self._copier_spec().model_copy(update=more), names)

    def prepare(self) -> None:
        """Start the first ranks ahead of time: they import what they need and wait for `start`."""
        if self._standby is None and self._gang is None:
            self._standby = self._spawn()

    def start(self, claim: AttemptClaim, restore: Path | None, last_segment: int) -> None:
        """Start the ranks of a claimed attempt from the checkpoint folder `restore`, or from nothing.

        `last_segment` is the number of the newest segment that ended at or before the claim's step. Raises Fenced when
        the claim is not the newest, StoreUnavailable when that cannot be told.
        """
        self._check_owner(claim)
        self._clear(claim)
        leasing = LeaseKeeper(self._job, self._places, claim.attempt, claim.resumed_from, last_segment)
        leasing.write()
        self._gang = self._take_standby() or self._spawn()
        self._attempt = Attempt(
            self._job, self._places, claim, self._gang, leasing, last_segment, self._watch, self._clock
        )
        self._standby_wanted = self._job.standby
        self._gang.go(self._spec(claim, restore), lambda rank: self._places.log(claim.attempt, rank))
        for keeper in self._keepers:
            keeper.start()
        self._watch.record("attempt.started", step=claim.resumed_from, pids=[one.pid for one in self._gang.ranks])

    def run_segment(self) -> SegmentResult | AttemptEnd:
        """Supervise until the next segment's result is there or the attempt has ended.

        When anything is raised in here (a cancellation, Ctrl-C), the ranks are stopped gracefully within the job's
        grace, further signals wait meanwhile, and it is raised again.
        """
        attempt = self._running()
        try:
            while (news := attempt.tick()) is None:
                for keeper in self._keepers:
                    keeper.tend()
                self._keep_standby(attempt)
        except BaseException as error:
            self.stop(f"the flow was stopped ({type(error).__name__})")
            raise
        if isinstance(news, AttemptEnd):
            self.last_end = news
        return news

    def stop(self, reason: str) -> AttemptEnd:
        """Ask the ranks to save and leave, for the job's grace; then end them. How the attempt ended."""
        with _deaf():
            self._stopped_at = self._clock()
            attempt = self._running()
            attempt.ask_to_stop(reason, self._job.grace_seconds)
            while attempt.end is None:
                attempt.tick()
            self.last_end = attempt.end
            return attempt.end

    def settle(self) -> bool:
        """Stop what trains; then let the copiers finish in what is left of the job's grace.

        Whether all is durable; the object tier may come later.
        """
        if self._attempt is not None and self._attempt.end is None:
            self.stop("the flow was stopped")
        began = self._clock() if self._stopped_at is None else self._stopped_at
        drained = self.drain(began + self._job.grace_seconds - self._clock())
        self.drain_object(began + self._job.grace_seconds - self._clock())
        return drained

    def drain(self, deadline_seconds: float) -> bool:
        """Let what is pending become durable on the persistent tier; whether it did."""
        return self._copier.drain(deadline_seconds)

    def drain_object(self, deadline_seconds: float) -> bool:
        """Let what is pending come to the object tier; whether it did. True without one."""
        if self._uploader is None:
            return True
        self._uploader.start()
        return self._uploader.drain(deadline_seconds)

    def close(self) -> None:
        """Stop what still runs. Afterwards no process that this supervisor ever started is left on this machine."""
        with _deaf():
            try:
                if self._attempt is not None and self._attempt.end is None:
                    self.stop("the supervisor was closed")
            finally:
                for one in (self._gang, self._standby):
                    if one is not None:
                        one.dismiss()
                self._gang = self._standby = None
                for keeper in self._keepers:
                    keeper.stop()
                process.sweep(self.token, 0.0)
                scratch.clear(self.token)
                if self._warden is not None:
                    self._warden.close()
                    self._warden = None

    def described(self, claim: AttemptClaim, restore: Path) -> tuple[AttemptSpec, dict[str, str]]:
        """What a rank would be told of this checkpoint, and its environment: for who looks at it after the training."""
        return self._spec(claim, restore), self._environment()

    def _running(self) -> Attempt:
        if self._attempt is None:
            raise ValueError("start: no attempt was started yet")
        return self._attempt

    def _check_owner(self, claim: AttemptClaim) -> None:
        newest = newest_claim(self._places)
        if newest is None:
            raise StoreUnavailable(f"{self._places.claim(claim.attempt).parent}: cannot be read; is the tier mounted?")
        if newest != claim.attempt:
            raise Fenced(f"Attempt {claim.attempt} is not the newest claim of run {self._run.run}; {newest} is.")

    def _clear(self, claim: AttemptClaim) -> None:
        """Nothing of an older attempt may run on, or be taken for news of this one."""
        if self._attempt is not None and self._attempt.end is None:
            raise ValueError(f"start: attempt {self._attempt.claim.attempt} still runs")
        if self._gang is not None:
            self._gang.kill()
            self._gang = None
        process.sweep(process.token(self._run), 0.0, spare=self.token)
        scratch.clear(process.token(self._run), spare=self.token)
        for folder in (self._places.local, self._logs, self._places.end(claim.attempt, 0).parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._places.lease.unlink(missing_ok=True)
        for path in self._places.local.glob("heartbeat-*.json"):
            path.unlink(missing_ok=True)

    def _take_standby(self) -> Gang | None:
        standby, self._standby = self._standby, None
        if standby is None or standby.whole:
            return standby
        standby.dismiss()
        return None

    def _keep_standby(self, attempt: Attempt) -> None:
        """One try for each attempt, after its first step: spare ranks that die by themselves are not made again."""
        if self._standby_wanted and attempt.has_trained:
            self._standby_wanted = False
            try:
                self._standby = self._standby or self._spawn(STANDBY_NICENESS)
            except OSError as error:
                self._watch.record("standby.failed", severity=Severity.medium, text=str(error))

    def _spawn(self, nice: int = 0) -> Gang:
        self._serial += 1
        token = f"{self.token}/{self._serial}"
        env = self._environment() | scratch.make(token)
        made = Gang.spawn(self._job.ranks, env, token, self._logs, command=self._command, nice=nice)
        if self._warden is None:
            self._warden = warden.start(self.token, self._job.grace_seconds, self._logs / "warden.log")
        warden.look_after(self._warden, [one.pid for one in made.ranks])
        return made

    def _environment(self) -> dict[str, str]:
        extra = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": str(self._run.threads)}
        return process.child_environment(self._job.env, extra)

    @property
    def _logs(self) -> Path:
        return self._places.log(1, 0).parent

    @property
    def _keepers(self) -> list[Keeper]:
        return [self._copier, *([self._uploader] if self._uploader else [])]

    def _keeper(
        self, command: Sequence[str], name: str, spec: CopierSpec, names: Mapping[str, str] | None = None
    ) -> Keeper:
        line = spec.model_dump_json().encode() + b"\n"
        log, env = self._logs / f"{name}.log", {**self._environment(), **(names or {})}
        return Keeper(command, line, env, f"{self.token}/{name}", log, self._watch.record, self._clock, name)

    def _copier_spec(self) -> CopierSpec:
        places = self._places
        return CopierSpec(
            name=self._job.name,
            run=self._run.run,
            run_dir=str(places.persistent.absolute()),
            local_dir=str(places.local.absolute()),
            policy=self._job.checkpoint,
            parent_pid=os.getpid(),
        )

    def _spec(self, claim: AttemptClaim, restore: Path | None) -> AttemptSpec:
        job, policy = self._job, self._job.checkpoint
        seconds = policy.every_minutes * 60 if policy.every_minutes else None
        if not policy.every_steps and not seconds:
            seconds = DEFAULT_SAVE_SECONDS
        return AttemptSpec(
            name=job.name,
            run=self._run.run,
            attempt=claim.attempt,
            rank=0,
            world_size=job.ranks,
            local_rank=0,
            program=job.program,
            search_path=_search_path(job.program),
            config=job.config,
            data=str(self._data),
            steps=job.steps,
            seed=job.seed,
            threads=self._run.threads,
            device=job.device,
            save_every_steps=policy.every_steps,
            save_every_seconds=seconds,
            evaluate_every_steps=job.evaluate_every_steps,
            restore=str(restore) if restore else None,
            resumed_from=claim.resumed_from,
            run_dir=str(self._places.persistent.absolute()),
            local_dir=str(self._places.local.absolute()),
            dataset_fingerprint=self._run.dataset_fingerprint,
            code_version=self._run.code_version,
            parent_pid=os.getpid(),
        )


def _absolute(place: str) -> str:
    return place if is_object(place) else str(Path(place).absolute())


def _search_path(program: str) -> str:
    """Where the program's own imports are looked for: its file's folder, or the working directory for a package."""
    place = program.rpartition(":")[0]
    return str(Path(place).absolute().parent) if place.endswith(".py") else str(Path.cwd())


@contextmanager
def _deaf() -> Iterator[None]:
    """No second SIGTERM or SIGINT breaks into an orderly stop. Only the main thread hears signals at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
