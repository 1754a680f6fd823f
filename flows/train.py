"""The life of a training run: stage, train in leased segments, verify beside the next one, keep, recover, report.

`python -m flows.train job.yaml`, or `from flows.train import train; train(job)`.
"""

import sys

if __name__ == "__main__":  # a wrong job is answered, and the server is starting, before Prefect is imported
    from everstep.host.console import open_console

    console = open_console(sys.argv[1:])

from typing import Any

from prefect import allow_failure

from blocks.guardrails import Guardrails
from blocks.tiers import StorageTiers
from blocks.tracking import Tracking
from everstep.core.job import TrainJob
from everstep.core.segment import SegmentResult
from everstep.host.life import own_run
from flows.stage import stage
from tasks.cancel import watching
from tasks.gate import check_data
from tasks.guard import bounded
from tasks.health import check_health, check_training
from tasks.places import placed
from tasks.promote import promote
from tasks.server import LocalFlow
from tasks.train import begin_attempt, decide, finish, keep, train_segment, verify


def life_of_a_run(job: TrainJob, take_over: bool = False) -> dict[str, Any]:
    """Train a job to its last step, whatever happens on the way.

    Args:
        job: The training job.
        take_over: Ask another living flow run that owns this run to save and leave.

    """
    with watching() as prefect, placed(bounded(job, Guardrails), StorageTiers, Tracking):
        staged = stage(job)
        with own_run(staged, prefect, take_over=take_over) as run:
            check_data(run)
            while not run.over:
                begin_attempt(run)
                while isinstance(end := train_segment(run), SegmentResult):
                    check_health(run, end)
                    verified = verify.submit(run, end)
                    check_training.submit(run, end, wait_for=[allow_failure(verified)], return_state=False)
                    keep(run)
                decide(run, end)
            promote(run, return_state=True)  # a promotion that fails is shown, and is no failed training
            return prefect.end(finish(run))


train = LocalFlow(life_of_a_run, name="train", flow_run_name="train-{job.name}", validate_parameters=True)

if __name__ == "__main__":
    raise SystemExit(console.run(train))
