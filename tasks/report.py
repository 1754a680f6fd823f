"""The report of a run in Prefect: a markdown artifact, a table of its checkpoints, and a link to the page."""

import contextvars
import threading
from pathlib import Path

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.logging import get_logger

from everstep.core.summary import RunReport
from everstep.host.browse import open_run
from everstep.report import markdown

DEADLINE_SECONDS = 3.0


def tell(report: RunReport) -> None:
    """Create the artifacts, under keys of the job's name, so that Prefect shows a job's reports as versions of one.

    Waits three seconds at most: when Prefect is away, the files in the run directory are the report.
    """
    context = contextvars.copy_context()  # the artifact belongs to this flow run, and to its server
    thread = threading.Thread(target=context.run, args=(_create, report), name="everstep-artifact", daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    if thread.is_alive():
        get_logger("everstep").warning("Prefect took no report of %s in %.0f s", report.run, DEADLINE_SECONDS)


def _create(report: RunReport) -> None:
    page = Path(report.places["run directory"], "report.html")
    try:
        create_markdown_artifact(
            markdown.render(report), key=f"report-{report.name}", description=f"Report of run {report.run}"
        )
        create_link_artifact(
            page.as_uri(), link_text=f"report of {report.run}", key=f"page-{report.name}", description=str(page)
        )
        found = open_run(page.parent).checkpoints()
        create_table_artifact(
            found.rows(), key=f"checkpoints-{report.name}", description=f"Checkpoints of {report.run}"
        )
    except Exception:  # noqa: BLE001 - the edge of the thread: whatever Prefect raises, the run has ended as it has
        get_logger("everstep").exception("Prefect took no report of %s", report.run)
