"""The events of one run as this flow writes them: to the run's journal first, and from there to the ledger."""

import time
import uuid
from collections.abc import Callable
from typing import Any

from everstep.core.health import Severity
from everstep.core.job import TrainJob
from everstep.core.ledger import Event
from everstep.core.recovery import Past
from everstep.core.segment import AttemptEnd, Cause, Outcome
from everstep.host.ledger import Ledger
from everstep.host.runs import Run
from everstep.store import jsonl

CLOSE_SECONDS = 5.0


class Journal:
    """Appends events of one run. `attempt` is put on every event until it changes; `told` hears kind and text of each."""

    def __init__(self, job: TrainJob, run: Run, flow_run: str) -> None:
        self.attempt = 0
        self.told: Callable[[str, str], None] = _nobody
        self._run = run
        self._flow_run = flow_run
        self.uri = job.ledger.uri or f"sqlite:///{job.tiers.persistent}/ledger.db"
        self._ledger = Ledger(self.uri, run.places.events)

    def record(
        self,
        kind: str,
        *,
        step: int | None = None,
        severity: Severity = Severity.low,
        text: str = "",
        at: float | None = None,
        **data: Any,
    ) -> None:
        """Append an event; `at` is Unix seconds, now if not given."""
        self._ledger.append(
            Event(
                id=uuid.uuid4().hex,
                time=time.time() if at is None else at,
                kind=kind,
                severity=severity,
                job=self._run.record.name,
                run=self._run.record.run,
                attempt=self.attempt,
                step=step,
                text=text,
                data=data,
            )
        )
        self.told(kind, text)

    def past(self) -> list[Past]:
        """The failed attempts of earlier flow runs, oldest first, for the retry budget."""
        return [
            Past(
                AttemptEnd(
                    attempt=event["attempt"],
                    outcome=Outcome(event["data"]["outcome"]),
                    cause=Cause.model_validate(event["data"]["cause"]),
                    step=event["step"] or 0,
                ),
                int(event["data"].get("committed_step") or 0),
            )
            for event in jsonl.read(self._run.places.events)
            if event.get("kind") == "attempt.ended"
        ]

    def close(self) -> None:
        """Bring the events to the ledger, as far as its database answers in time; the rest is replayed later."""
        self._ledger.close(CLOSE_SECONDS)


def _nobody(_kind: str, _text: str) -> None:
    """Who hears an event until somebody listens."""
