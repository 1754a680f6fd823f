"""What the console says when a run has ended: how it stands, the program's own text, and where to look."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from everstep.core.job import TrainJob


def lines(
    final: Mapping[str, Any], metrics: Mapping[str, float], shown: str, job: TrainJob, flow_run: str
) -> Iterator[str]:
    """The closing lines, before the JSON line. `flow_run` is Prefect's id of it, or empty."""
    if final["status"] == "stopped":
        yield f"stopped at step {final['step']}; run the same command to go on"
        return
    figures = "".join(f", {name} {value:.4g}" for name, value in sorted(metrics.items()))
    yield f"{final['status']}: step {final['step']}{figures}"
    if shown:
        yield "\n".join(f"  | {line}" for line in printable(shown).splitlines())
    yield f"report:     {final['report']}"
    if final.get("mlflow_run"):
        yield f"MLflow:     {_mlflow(job.tracking.uri)}"
    yield f"Prefect UI: {_prefect(os.environ.get('PREFECT_API_URL', ''), flow_run)}"


def printable(text: str) -> str:
    """The text without what a terminal would obey: control characters become a dot."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{MIDDLE DOT}" for one in text)


def _mlflow(uri: str) -> str:
    uri = re.sub("//[^/@]*@", "//...@", uri)  # a password in a URL is not repeated
    return uri if uri.startswith("http") else f"{_tool('mlflow')} ui --backend-store-uri {uri}"


def _prefect(api: str, flow_run: str) -> str:
    if api and flow_run:
        return f"{api.rstrip('/').removesuffix('/api')}/runs/flow-run/{flow_run}"
    return f"{_tool('prefect')} server start, then run with PREFECT_API_URL=http://127.0.0.1:4200/api; this run had its own"


def _tool(name: str) -> str:
    """How to call a program that stands beside this Python, from the present folder."""
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(beside) or not beside.exists():
        return name
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
