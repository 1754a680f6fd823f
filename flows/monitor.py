"""Watches the GPUs of this machine: samples, Xid events at once, verdicts, telemetry, metrics, events.

`python -m flows.monitor`, with a file and options as in docs/monitor.md. It goes on until it is stopped.
"""

import sys

if __name__ == "__main__":  # what is wrong is answered, and the server is starting, before Prefect is imported
    from everstep.host.console import open_monitor

    console = open_monitor(sys.argv[1:])

from typing import Any

from everstep.core.monitor import MonitorJob
from tasks.monitor import tell, watch
from tasks.server import LocalFlow


def monitor_of_node(job: MonitorJob) -> dict[str, Any]:
    """Watch one machine, beside whatever trains there.

    Args:
        job: What is watched, how often, and where it goes.

    """
    return watch(job, tell)


monitor = LocalFlow(
    monitor_of_node,
    name="monitor",
    flow_run_name="{job.name}",
    validate_parameters=True,
    persist_result=False,
)

if __name__ == "__main__":
    raise SystemExit(console.run(lambda job, **_: monitor(job)))
