"""Reads stored checkpoints again, at a bounded rate, and mends what is rotten from another tier.

`python -m flows.scrub job.yaml`, or a run directory, the folder of a job, or a whole persistent tier in its place.
"""

import sys

if __name__ == "__main__":  # what is wrong is answered, and the server is starting, before Prefect is imported
    from everstep.host.console import open_scrub

    console = open_scrub(sys.argv[1:])

from typing import Any

from blocks.tiers import StorageTiers
from everstep.core.scrub import ScrubJob
from tasks.scrub import begin, end, finish, reached, scrub_run
from tasks.server import LocalFlow


def scrub_of_runs(job: ScrubJob) -> dict[str, Any]:
    """Prove every stored checkpoint again: local, persistent and object tier. Safe beside a living training.

    Args:
        job: What is to be scrubbed, and how fast.

    """
    with reached(job, StorageTiers) as (resolved, access):
        scrubber = begin(resolved, access)
        for run in scrubber.runs:
            scrub_run(scrubber, run)
        return end(scrubber, finish(scrubber))


scrub = LocalFlow(
    scrub_of_runs,
    name="scrub",
    flow_run_name="scrub-{job.where}",
    validate_parameters=True,
    persist_result=False,
)

if __name__ == "__main__":
    raise SystemExit(console.run(lambda job, **_: scrub(job)))
