"""The gate on GPU health of one run: watches the GPUs that its ranks use, and says whether the next segment may be leased.

A thread of its own samples, judges, and tests suspect GPUs while the ranks wait at a segment's end; the supervisor asks at
every tick and gets the newest word at once. Where the ranks use no GPU nothing is measured, and the door is open.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from everstep.core.check import GateReport, Outcome
from everstep.core.gating import (
    BUSY_TRIES,
    Door,
    Examined,
    Word,
    decide_door,
    doubted,
    doubts,
    examined_by,
    is_silent,
    of_used,
    passive,
    worst_of,
)
from everstep.core.gpu import Driver
from everstep.core.health import Severity, Verdict
from everstep.core.health_policy import DEFAULT, HealthPolicy
from everstep.core.job import TrainJob
from everstep.core.segment import Heartbeat, Phase
from everstep.host import gate_reports, gate_watch, health_policy
from everstep.host.gate_reports import Kept
from everstep.host.gpus import GpuSampler
from everstep.host.monitor import Monitor
from everstep.host.monitor_watch import Training, Watch
from everstep.host.telemetry_gate import TelemetryGate
from everstep.store.layout import RunPlaces

ABSENT_SECONDS = 600.0
SLICE_SECONDS = 0.25
BUSY_SECONDS = 1.0
SETTLE_SECONDS = 1.5
_COMPUTES = frozenset({Phase.train, Phase.save, Phase.eval})

Tell = Callable[[GateReport], None]


class Trial(Protocol):
    """An active test; `everstep.host.active_gate.ActiveGate` is one. Nothing of it waits but `close`."""

    @property
    def running(self) -> bool: ...

    def start(self, devices: Sequence[str], *, seconds: float) -> None: ...

    def poll(self) -> GateReport | None: ...

    def close(self) -> None: ...


def _active(token: str, log: Path) -> Trial:
    from everstep.host.active_gate import ActiveGate  # few runs ever come here

    return ActiveGate(token, log)


class HealthGate:
    """For the life of a flow run. `record` appends an event to the run's journal, `tell` shows a report to others."""

    def __init__(
        self,
        job: TrainJob,
        places: RunPlaces,
        token: str,
        record: Callable[..., None],
        tell: Tell,
        ledger_uri: str = "",
        *,
        make: Callable[[], GpuSampler] = GpuSampler,
        test: Callable[[str, Path], Trial] = _active,
    ) -> None:
        self._job = job
        self._places = places
        self._token = token
        self._record = record
        self._tell = tell
        self._ledger_uri = ledger_uri
        self._make = make
        self._make_test = test
        self._settings = job.health
        self._node = os.uname().nodename
        self._policy: HealthPolicy = DEFAULT
        self._beats: Sequence[Heartbeat | None] = ()
        self._used: frozenset[str] = frozenset()
        self._waits = False
        self._word = Word()
        self._tested: Examined | None = None
        self._tries = 0
        self._doubts: dict[str, tuple[str, ...]] = {}
        self._monitor: Monitor | None = None
        self._kept = Kept(record, lambda uuid: uuid in self._used)
        self._ended: list[tuple[int | None, int]] = []
        self._trouble = "the gates have not begun"
        self._judged_at = 0.0
        self._began = time.time()
        self._over = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-health", daemon=True)

    def start(self) -> None:
        """Begin to watch, where the job may use GPUs at all. Raises ValueError for a policy that cannot be read."""
        if self._settings.policy:
            self._policy = health_policy.load_policy(Path(self._settings.policy))
        if not self._settings.gates:
            self._trouble = "health.gates is false"
            return
        if not self._may_use_gpus:
            self._trouble = "the job trains on the CPU"
        self._thread.start()

    def ask(self, beats: Sequence[Heartbeat | None]) -> Word:
        """The newest word, at once. The supervisor tells what it knows of the ranks with it."""
        self._beats = beats
        there = [one for one in beats if one is not None]
        waits = bool(there) and len(there) == len(beats) and all(one.phase is Phase.wait for one in there)
        if waits and not self._waits:
            self._wake.set()
        self._waits = waits
        if self._settings.gpus == "used":
            used = frozenset(one.gpu for one in there if one.gpu)
            if used and used != self._used:
                self._used = used
                self._wake.set()
        return self._word

    def look(self, step: int | None, segment: int) -> GateReport:
        """The passive gate, in line: what the newest samples say of the GPUs that count. Milliseconds."""
        began = time.perf_counter()
        monitor, sweep = self._monitor, self._kept.sweep
        names = {one.uuid: f"GPU {one.index}" for one in sweep.gpus if one.index is not None} if sweep else {}
        why = self._trouble or (sweep.why if sweep and sweep.driver is not Driver.present else "")
        checks, verdict = passive(monitor.verdict if monitor else None, sweep, self._used, names, why)
        spent = time.perf_counter() - began
        self._ended.append((step, segment))
        self._wake.set()
        return GateReport(
            gate="passive",
            time=time.time(),
            seconds=round(spent, 6),
            step=step,
            segment=segment,
            checks=checks,
            verdict=verdict,
        )

    def doubt(self, report: GateReport) -> None:
        """Another gate has found what a sick GPU may cause: the GPUs that it may be are tested before training goes on."""
        for uuid, why in doubts(report, self._used, {one.rank: one.gpu for one in self._beats if one is not None}):
            self._doubts = {**self._doubts, uuid: (*self._doubts.get(uuid, ()), why)}

    def verdict(self, *, settled: bool = True) -> Verdict | None:
        """The verdict on the GPUs that the run uses; None where nothing measures any.

        `settled` waits for a judgement that is newer than now, a second or so: an attempt has just ended, and the reason
        may be on its way.
        """
        if not self._used or not self._thread.is_alive():
            return None
        asked, until = time.time(), time.monotonic() + SETTLE_SECONDS
        while settled and self._judged_at < asked and time.monotonic() < until and not self._over.wait(0.02):
            self._wake.set()
        monitor = self._monitor
        if monitor is None or monitor.verdict is None:
            return None
        found = {uuid: one for uuid, one in monitor.verdict.gpus.items() if uuid in self._used}
        return worst_of(found, self._tested)

    def close(self) -> None:
        """End the thread and all that it started; what hangs in a driver is left to the sweep of the run's processes."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    # -- the thread ---------------------------------------------------------------------------------------------------

    @property
    def _may_use_gpus(self) -> bool:
        return self._job.device != "cpu" or self._settings.gpus == "all"

    def _run(self) -> None:
        """The ranks' own logs are followed always, the kernel's where GPUs may be used and it can be read."""
        watch = gate_watch.listen(f"{self._places.persistent}/logs/attempt-*.log", kernel=self._may_use_gpus)
        try:
            self._go_on(watch)
        finally:
            gate_watch.tell(watch, self._node, self._record, self._began)
            watch.close()

    def _go_on(self, watch: Watch) -> None:
        while not self._over.is_set():
            if not self._may_use_gpus:
                self._rest(watch, ABSENT_SECONDS)
                continue
            try:
                self._watch(watch)
            except Exception as error:  # noqa: BLE001 - the edge of the thread: unknown is not failed, the door opens
                self._word = Word()
                self._trouble = f"the gates stumbled: {type(error).__name__}: {error}"
                self._record("gate.unknown", severity=Severity.medium, text=self._trouble)
                self._rest(watch, ABSENT_SECONDS)

    def _rest(self, watch: Watch, seconds: float) -> None:
        """Without GPUs to watch: what the logs say is told, until ranks say that they use one, or for so long."""
        until, used = time.monotonic() + seconds, self._used
        while not self._over.is_set() and self._used == used and time.monotonic() < until:
            self._over.wait(1.0)
            gate_watch.tell(watch, self._node, self._record, self._began)

    def _watch(self, watch: Watch) -> None:
        """Watch until the run ends; without a driver, look again once in a while."""
        with self._make() as gpus:
            if (first := gpus.start()).driver is not Driver.present:
                self._kept.sweep = first
                self._trouble = first.why or f"GPU driver: {first.driver.value}"
        if first.driver is not Driver.present:
            self._rest(watch, ABSENT_SECONDS)
            return
        with ExitStack() as held:
            gpus = held.enter_context(self._make())
            every = self._settings.every_seconds
            monitor = gate_watch.assemble(held, gpus, watch, self._kept, every, self._policy, self._ledger_uri)
            telemetry = TelemetryGate(
                self._places.persistent / "telemetry",
                self._places.local / "telemetry-gate",
                self._token,
                self._node,
                every,
            )
            held.callback(telemetry.close)
            test = self._make_test(f"{self._token}/test", self._places.persistent / "logs" / "gate.log")
            held.callback(test.close)
            self._kept.watch, self._kept.telemetry = watch, telemetry
            self._trouble, self._monitor = "", monitor
            while not self._over.is_set():
                monitor.step(SLICE_SECONDS)
                if self._wake.is_set():
                    self._wake.clear()
                self._judge(monitor, test)
                self._judge_telemetry(telemetry)

    def _judge(self, monitor: Monitor, test: Trial) -> None:
        """The word, from the newest verdict and test; and the test itself, where one is due or running."""
        sweep, found = self._kept.sweep, monitor.verdict
        if sweep is None or found is None:
            return
        if self._settings.gpus == "all":
            self._used = frozenset(one.uuid for one in sweep.gpus)
        self._training()
        verdicts = doubted(of_used(found, sweep, self._used), self._doubts)
        report = test.poll()
        if report is not None:
            self._tries += 1
            self._show(report.model_copy(update={"step": self._step}))
            busy = report.outcome is Outcome.not_measured and not is_silent(verdicts)
            if busy and self._tries < BUSY_TRIES:
                self._over.wait(BUSY_SECONDS)
                report = None
        if report is not None:
            self._tries = 0
            self._tested = examined_by(report, verdicts, self._tested)
            self._doubts = {}
        word = decide_door(verdicts, self._tested, time.time(), may_test=self._settings.test != "never")
        if word.door is Door.hold and self._waits and not test.running:
            devices = [one.gpu or "cpu" for one in self._beats if one is not None]
            self._record("gate.testing", step=self._step, text=word.why)
            test.start(devices, seconds=self._settings.test_seconds)
        if word.door is not self._word.door and word.door is not Door.open:
            severity = word.verdict.severity if word.verdict else Severity.medium
            self._record(
                f"gate.health_{word.door.value}", step=self._step, severity=severity, text=word.why, passed=False
            )
        self._word = word
        self._judged_at = found.time

    def _judge_telemetry(self, telemetry: TelemetryGate) -> None:
        while self._ended:
            step, segment = self._ended.pop(0)
            telemetry.ends(step, segment, self._policy.of().alarm_c)
        report = telemetry.poll(self._used)
        if report is not None:
            self._show(report)
            self.doubt(report)

    def _training(self) -> None:
        """Tell the monitor whether the ranks compute now: idle GPUs are a sign only then."""
        watch = self._kept.watch
        if watch is None:
            return
        computes = any(one is not None and one.phase in _COMPUTES for one in self._beats)
        if not computes:
            watch.training = Training(job=self._job.name)
        elif not watch.training.computes:
            watch.training = Training(computes=True, since=time.time(), job=self._job.name)

    def _show(self, report: GateReport) -> None:
        gate_reports.record(report, self._record)
        self._tell(report)

    @property
    def _step(self) -> int | None:
        return max((one.step for one in self._beats if one is not None), default=None)
