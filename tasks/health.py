"""How Prefect treats the gates on health: the passive one in line, the one on the training beside the next segment.

Neither is tried again: the next segment asks anew. What they say is an event each, and a table of the newest reports.
"""

import contextvars
import queue
import threading
import time
from datetime import UTC, datetime
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.logging import get_logger

from everstep.core.check import GateReport
from everstep.host import between

EVERY_SECONDS = 20.0
"""A table is a version of an artifact in Prefect's database: a report with another outcome is shown at once, others later."""

MOST_WAITING = 1000
CLOSE_SECONDS = 3.0

check_health = task(name="check-health", cache_policy=NO_CACHE)(between.check_health)
check_training = task(name="check-training", cache_policy=NO_CACHE)(between.check_training)

_Told = tuple[GateReport, str, str]


class Gates:
    """Tells Prefect what gates said, from a thread of its own: while Prefect is away the run's journal has it all."""

    def __init__(self, flow_run_id: str) -> None:
        self._flow_run_id = flow_run_id
        self._waiting: queue.Queue[_Told | None] = queue.Queue(MOST_WAITING)
        self._newest: dict[str, GateReport] = {}
        self._shown: dict[str, str] = {}
        self._shown_at = float("-inf")
        settings = contextvars.copy_context()  # the artifact belongs to this flow run, and to its server
        self._thread = threading.Thread(target=settings.run, args=(self._run,), name="everstep-gates", daemon=True)

    def tell(self, report: GateReport, job: str, run: str) -> None:
        """Hand over a report. Never waits; the oldest stay where nobody takes them."""
        if self._flow_run_id and not self._thread.is_alive() and self._thread.ident is None:
            self._thread.start()
        if not self._waiting.full():
            self._waiting.put_nowait((report, job, run))

    def close(self) -> None:
        """Tell what is left, for three seconds at most."""
        if self._thread.ident is not None:
            self._waiting.put(None)
            self._thread.join(timeout=CLOSE_SECONDS)

    def _run(self) -> None:
        job = run = ""
        while (told := self._waiting.get()) is not None:
            report, job, run = told
            self._newest[report.gate] = report
            try:
                _emit(report, job, run)
                outcomes = {name: one.outcome.value for name, one in self._newest.items()}
                if outcomes != self._shown or time.monotonic() - self._shown_at >= EVERY_SECONDS:
                    self._show(job, run, outcomes)
            except Exception:  # noqa: BLE001 - the edge of the thread: whatever Prefect raises, the run goes on
                get_logger("everstep").exception("Prefect took no report of the gate %s", report.gate)
        if job:
            try:
                self._show(job, run, {})
            except Exception:  # noqa: BLE001 - as above
                get_logger("everstep").exception("Prefect took no table of the gates of %s", run)

    def _show(self, job: str, run: str, outcomes: dict[str, str]) -> None:
        create_table_artifact(rows(self._newest), key=f"gates-{job}", description=f"Gates of run {run}")
        self._shown, self._shown_at = outcomes, time.monotonic()


def rows(newest: dict[str, GateReport]) -> list[dict[str, Any]]:
    """The newest report of each gate, a row for each check."""
    found = []
    for name, report in newest.items():
        for one in report.checks:
            figures = ", ".join(f"{key} {_plain(value)}" for key, value in one.figures.items())
            row = {"gate": name, "segment": report.segment, "check": one.name, "says": one.outcome.value}
            found.append(row | {"figures": figures, "rule": one.rule, "why": one.why})
    return found


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _emit(report: GateReport, job: str, run: str) -> None:
    """`everstep.gate.pass`, `.fail` or `.not-measured`; the resource is the job's gate."""
    emit_event(
        f"everstep.gate.{report.outcome.value.replace(' ', '-')}",
        resource={"prefect.resource.id": f"everstep.gate.{job}.{report.gate}", "prefect.resource.name": report.gate},
        occurred=datetime.fromtimestamp(report.time, UTC),
        payload={"job": job, "run": run, "text": report.sentence, **report.model_dump(mode="json")},
    )
