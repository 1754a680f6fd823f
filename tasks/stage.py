"""How Prefect treats staging: what may pass is tried again, what the user must mend is said at once; progress is shown."""

from typing import Any
from uuid import UUID

import httpx
from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import PrefectException
from prefect.logging import get_logger

from everstep.core.job import TrainJob
from everstep.host import life, outcome
from everstep.host.meter import Meter
from everstep.store.s3_access import Access


def _may_pass(_task: Any, _run: Any, state: Any) -> bool:
    """What the user must mend is said at once; what a disk or a store refuses may pass."""
    return not isinstance(state.result(raise_on_failure=False), ValueError)


@task(
    name="stage-data",
    retries=2,
    retry_delay_seconds=[2, 10],
    retry_condition_fn=_may_pass,
    cache_policy=NO_CACHE,
    persist_result=False,  # what it returns holds the keys of the object store
)
def bring(job: TrainJob, access: Access | None = None) -> life.Staged:
    """Bring the job's data to the local tier, with a line on the terminal and a progress bar in Prefect."""
    meter = Meter(_Bar(job.name).tell)
    is_whole = False
    try:
        staged = life.stage(job, access, meter)
        is_whole = True
    finally:
        meter.close(whole=is_whole)
    return staged


def deliver(staged: life.Staged) -> None:
    """Leave what was staged for the command line to print."""
    found = staged.staged
    outcome.deliver(
        {
            "status": "completed",
            "dataset": found.manifest.fingerprint,
            "data": str(found.data.absolute()),
            "files": len(found.manifest.files),
            "bytes": found.manifest.bytes,
            "fetched": found.fetched,
            "fetched_bytes": found.bytes,
            "seconds": round(staged.finished - staged.began, 3),
        }
    )


class _Bar:
    """A progress artifact, made when there is something to show. A Prefect that does not answer holds up nothing for long."""

    def __init__(self, name: str) -> None:
        self._key = f"staging-{name}"
        self._artifact: UUID | None = None
        self._gone = False

    def tell(self, percent: float, words: str) -> None:
        if self._gone:
            return
        try:
            if self._artifact is None:
                made = create_progress_artifact(percent, key=self._key, description=words)
                self._artifact = made if isinstance(made, UUID) else None
            else:
                update_progress_artifact(self._artifact, percent, description=words)
        except (httpx.HTTPError, PrefectException, OSError):
            self._gone = True
            get_logger("everstep").warning("Prefect takes no progress of the staging of %s", self._key)
