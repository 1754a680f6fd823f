"""What is said to MLflow about one run, and what it is known to have heard. Used by one thread only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from everstep.host import mlflow_run
from everstep.host.tail import Tail

METRICS_AT_ONCE = 1000


@dataclass(frozen=True)
class Subject:
    """What is tracked: a run of ours, with what MLflow shows of it from its first moment.

    `artifacts` is a folder's URI for small files, for an MLflow that has no place of its own.
    """

    job: str
    run: str
    tags: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, JsonValue] = field(default_factory=dict)
    artifacts: str | None = None


@dataclass(frozen=True)
class Hint:
    """What MLflow says is the newest durable checkpoint of a run. A hint: the tiers are the truth."""

    checkpoint: str
    step: int
    mlflow_run: str


class Speaker:
    """Knows which MLflow run it is, how far MLflow has the metrics, and what its status is there."""

    def __init__(self, uri: str, subject: Subject, tail: Tail) -> None:
        self.hint: Hint | None = None
        self._uri = uri
        self._subject = subject
        self._tail = tail
        self.client: Any = None
        self._run_id: str | None = None
        self._step = -1
        self._status: str | None = None

    def open(self) -> None:
        """Import MLflow and make its client: seconds of our own, in which nobody has been asked anything."""
        self.client = self.client or mlflow_run.connect(self._uri)

    def attach(self) -> str:
        """MLflow's id of the run; found or made, if it is not known since the last failure."""
        if self._run_id is None:
            self.open()
            subject = self._subject
            found = mlflow_run.find(self.client, subject.job, subject.run)
            self.hint = self.hint or hint_in(found)
            found = found or mlflow_run.create(self.client, subject.job, subject.run, subject.tags, subject.artifacts)
            mlflow_run.log_params(self.client, found, subject.config)
            self._step = mlflow_run.newest_step(found)
            self._status = found.info.status
            self._tail.rewind()
            self._run_id = str(found.info.run_id)
        return self._run_id

    def tell(self, tags: Mapping[str, str], status: str | None, over: Callable[[], bool]) -> None:
        """Log the rows that are new, then tags, then the status. Stops between two calls once `over` says so."""
        run_id = self.attach()
        for rows in self._tail.batches(METRICS_AT_ONCE, lambda row: len(list(mlflow_run.figures(row))), self._is_news):
            if over():
                return
            mlflow_run.log_rows(self.client, run_id, rows, METRICS_AT_ONCE)
        if tags and not over():
            mlflow_run.log_tags(self.client, run_id, tags)
        if status and status != self._status and not over():
            mlflow_run.say_status(self.client, run_id, status)
            self._status = status

    def forget(self) -> None:
        """After a failure nothing is sure: an answer may have been lost, a run deleted."""
        self._run_id = None

    def _is_news(self, row: Mapping[str, Any]) -> bool:
        """Only ever forward: a step that MLflow has is not logged again, whichever attempt repeats it."""
        step = row.get("step")
        if not isinstance(step, int) or not isinstance(row.get("time"), int | float) or step <= self._step:
            return False
        self._step = step
        return True


def hint_in(found: Any) -> Hint | None:
    """The newest durable checkpoint that an MLflow run names, if it names one."""
    tags = found.data.tags if found else {}
    step = tags.get("everstep.checkpoint_step", "")
    if not step.isdecimal() or not tags.get("everstep.checkpoint"):
        return None
    return Hint(tags["everstep.checkpoint"], int(step), str(found.info.run_id))
