"""What the gate on GPU health keeps of its monitor, and how a gate's report becomes an event of the run."""

import time
from collections.abc import Callable

from everstep.core.check import GateReport, Outcome
from everstep.core.gpu import Sweep
from everstep.core.health import Severity
from everstep.core.host import HostSample
from everstep.core.ledger import Event
from everstep.host.exporter import Snapshot
from everstep.host.monitor_watch import Watch
from everstep.host.telemetry_gate import TelemetryGate


def record(report: GateReport, say: Callable[..., None]) -> None:
    """A gate's report as an event of the run: `gate.passive`, `gate.active`, `gate.training`, `gate.telemetry`."""
    bad = report.outcome is Outcome.failed
    severity = report.verdict.severity if bad and report.verdict else Severity.medium if bad else Severity.low
    said = {Outcome.passed: True, Outcome.failed: False, Outcome.not_measured: None}[report.outcome]
    say(
        f"gate.{report.gate}",
        step=report.step,
        severity=severity,
        text=report.sentence,
        passed=said,
        outcome=report.outcome.value,
        seconds=report.seconds,
        segment=report.segment,
        checks=[one.model_dump(mode="json") for one in report.checks],
        state=report.verdict.state.value if report.verdict else None,
        action=report.verdict.action.value if report.verdict else None,
    )


class Kept:
    """For a monitor as its writer and exporter: the newest sweep, samples for the telemetry gate, events for the journal.

    `tell` appends an event to the run's journal; `counts` says whether the run uses a GPU.
    """

    def __init__(self, tell: Callable[..., None], counts: Callable[[str], bool]) -> None:
        self.lost = self.lost_rows = 0
        self.troubles: tuple[str, ...] = ()
        self.sweep: Sweep | None = None
        self.host: HostSample | None = None
        self.telemetry: TelemetryGate | None = None
        self.watch: Watch | None = None
        self._tell = tell
        self._counts = counts
        self._began = time.time()

    def take(self, sweep: Sweep | None = None, host: HostSample | None = None) -> None:
        self.host = host or self.host
        if sweep is not None:
            self.sweep = sweep
            if self.telemetry is not None:
                self.telemetry.take(sweep)

    def tell(self, event: Event) -> None:
        """Events of GPUs that the run does not use are a monitor's affair."""
        uuid = str(event.data.get("uuid") or "")
        if uuid and not self._counts(uuid):
            return
        if not uuid and (event.severity.rank > Severity.high.rank or event.time < self._began):
            return  # what the kernel's log says of the node's past is no news of this run
        data = {("finding" if name == "kind" else name): value for name, value in event.data.items()}
        self._tell(event.kind, severity=event.severity, text=event.text, at=event.time, **data)

    def show(self, snapshot: Snapshot) -> None:
        """Nobody scrapes a run."""
