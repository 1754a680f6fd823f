"""Whether Prefect wants this flow run to end: asked by a side thread, because a worker's cancel can be lost."""

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed

from everstep.core.check import GateReport
from everstep.core.summary import RunReport
from tasks.health import Gates
from tasks.report import tell

POLL_SECONDS = 5.0
_CANCELLED = "cancelled in Prefect"
_ENDING = {
    StateType.CANCELLING: _CANCELLED,
    StateType.CANCELLED: _CANCELLED,
    StateType.CRASHED: "marked crashed in Prefect",
    StateType.PAUSED: "suspended in Prefect",
}


class Watch:
    """Polls the state of this flow run. No answer is no news: it looks again."""

    def __init__(self, flow_run_id: str) -> None:
        self.flow_run_id = flow_run_id
        self.reason: str | None = None
        self._gates = Gates(flow_run_id)
        self._over = threading.Event()
        settings = contextvars.copy_context()  # a bare thread would see Prefect's global ones, and start a server
        self._thread = threading.Thread(target=settings.run, args=(self._poll,), name="everstep-prefect", daemon=True)

    def start(self) -> None:
        if self.flow_run_id:
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._gates.close()

    def wish(self) -> str | None:
        """Why Prefect wants the run to stop; None while it does not or cannot be asked."""
        return self.reason

    def publish(self, report: RunReport) -> None:
        """Show the run's report in Prefect, if it answers soon."""
        tell(report)

    def show(self, report: GateReport, job: str, run: str) -> None:
        """Show what a gate said, as an event and an artifact. Never waits."""
        self._gates.tell(report, job, run)

    def end(self, final: dict[str, Any]) -> dict[str, Any]:
        """What the flow returns: the JSON line; as a state `Stopped` or `Cancelled` for a run that stopped on request."""
        if final["status"] != "stopped":
            return final
        message = f"stopped on request at step {final['step']}; a new flow run of this job goes on from there"
        cancelled = self.reason == _CANCELLED
        state: State[Any] = (
            Cancelled(message=message) if cancelled else Completed(name="Stopped", message=message, data=final)
        )
        return cast("dict[str, Any]", state)  # Prefect hands its data to the caller

    def _poll(self) -> None:
        while not self._over.wait(POLL_SECONDS) and self.reason is None:
            try:
                with get_client(sync_client=True) as client:
                    state = client.read_flow_run(UUID(self.flow_run_id)).state
            except (httpx.HTTPError, PrefectException, OSError):
                continue
            self.reason = _ENDING.get(state.type) if state else None


@contextmanager
def watching() -> Iterator[Watch]:
    """A watch on the present flow run, for the length of the block."""
    watch = Watch(str(flow_run.get_id() or ""))
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
