"""Brings the data of a job to the local tier: the first part of `flows.train`, and a flow of its own.

`python -m flows.stage job.yaml` fills a machine's NVMe before a run needs it.
"""

import sys

if __name__ == "__main__":  # a wrong job is answered, and the server is starting, before Prefect is imported
    from everstep.host.console import open_console

    console = open_console(sys.argv[1:], "flows.stage")

from blocks.guardrails import Guardrails
from blocks.tiers import StorageTiers
from blocks.tracking import Tracking
from everstep.core.job import TrainJob
from everstep.host.life import Staged
from tasks.guard import bounded
from tasks.places import placed
from tasks.server import PartFlow
from tasks.stage import bring, deliver


def data_of_a_job(job: TrainJob) -> Staged:
    """Bring a job's data to the local tier. What stands there verified is not fetched again.

    Args:
        job: The training job.

    """
    with placed(bounded(job, Guardrails), StorageTiers, Tracking) as (resolved, access):
        return bring(resolved, access)


stage = PartFlow(
    data_of_a_job,
    name="stage",
    flow_run_name="stage-{job.name}",
    validate_parameters=True,
    persist_result=False,  # what it returns holds the keys of the object store
)

if __name__ == "__main__":
    raise SystemExit(console.run(lambda job, **_: deliver(stage(job))))
