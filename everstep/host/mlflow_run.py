"""One MLflow run, spoken to with explicit ids only: found by tag, made if missing, never a hidden global one.

Importing this module is cheap; `connect` imports MLflow (about 1.6 s). Any call may raise whatever MLflow raises.
"""

import fcntl
import glob
import json
import os
import posixpath
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KEY_LENGTH = 250
PARAM_LENGTH = 500
TAG_LENGTH = 5000
TAGS_AT_ONCE = 100
MOST_PARAMS = 200

_DEADLINES = {"connect_timeout": "5", "options": "-c statement_timeout=60000"}
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}


def connect(uri: str) -> Any:
    """A client. What the user has set in the environment stays; else deadlines are short and telemetry is off.

    A database server gets the user and password of MLflow's own variables where its URI has none.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    file = sqlite_file(uri)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_database(file)
    from mlflow.tracking import MlflowClient

    if not is_database(uri):
        return MlflowClient(tracking_uri=uri)
    whole = _whole(uri)
    _knock(whole)
    return MlflowClient(tracking_uri=whole)


def is_database(uri: str) -> bool:
    """Whether it is a database server that is spoken to directly: no SQLite file, no MLflow server."""
    return uri.partition("://")[0].partition("+")[0] in ("postgresql", "mysql", "mssql")


def _whole(uri: str) -> str:
    """A database's URI with its credentials and deadlines. It is for MLflow's eyes only."""
    from sqlalchemy.engine import make_url

    url = make_url(uri)
    if url.username is None and (user := os.environ.get("MLFLOW_TRACKING_USERNAME")):
        url = url.set(username=user, password=os.environ.get("MLFLOW_TRACKING_PASSWORD"))
    if url.get_backend_name() == "postgresql":
        if "+" not in url.drivername and find_spec("psycopg2") is None:
            url = url.set(drivername="postgresql+psycopg")
        url = url.update_query_dict(_DEADLINES | dict(url.query))
    return url.render_as_string(hide_password=False)


def _knock(uri: str) -> None:
    """Raise what a database server answers at once. MLflow itself asks one that refuses for minutes."""
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    create_engine(uri, poolclass=NullPool).connect().close()


def _make_database(file: Path) -> None:
    """Make a database that is not there yet beside its place, and put it there whole.

    MLflow would build it in place, over some seconds; a process that ended meanwhile would leave one that no MLflow
    can open again. One of several processes makes it, the others wait for it.
    """
    if file.exists():
        return
    from mlflow.tracking import MlflowClient

    with file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            return
        for left in file.parent.glob(f".{glob.escape(file.name)}.new*"):  # of one that ended over it
            left.unlink()
        new = file.with_name(f".{file.name}.new-{secrets.token_hex(4)}")  # MLflow remembers what it made under a name
        MlflowClient(tracking_uri=f"sqlite:///{new}").search_experiments(max_results=1)
        new.rename(file)


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite tracking URI, None for any other one."""
    scheme, slashes, rest = uri.partition(":///")
    return Path(rest) if slashes and scheme.startswith("sqlite") and rest not in ("", ":memory:") else None


def find(client: Any, job: str, run: str) -> Any:
    """The MLflow run of this run of ours, or None. The oldest, should a lost answer have made two."""
    experiment = client.get_experiment_by_name(job)
    if experiment is None:
        return None
    wanted = f"tags.`everstep.run` = '{run}'"
    found = client.search_runs(
        [experiment.experiment_id], wanted, max_results=1, order_by=["attributes.start_time ASC"]
    )
    return found[0] if found else None


def create(client: Any, job: str, run: str, tags: Mapping[str, str], artifacts: str | None = None) -> Any:
    """A new MLflow run in the experiment named like the job.

    `artifacts` is where its small files go if MLflow is a database server, which keeps none itself.
    """
    experiment = client.get_experiment_by_name(job)
    if experiment is not None and experiment.lifecycle_stage != "active":
        raise RuntimeError(f"the MLflow experiment {job} is deleted; restore it there, or give the job another name")
    number = (
        experiment.experiment_id if experiment else client.create_experiment(job, _artifacts(client, job, artifacts))
    )
    return client.create_run(number, tags={**tags, "everstep.run": run, "mlflow.runName": run})


def newest_step(found: Any) -> int:
    """The newest step that MLflow has of the loss, or of the samples that go with it; -1 for none."""
    metrics = found.data.to_proto().metrics
    return max((int(metric.step) for metric in metrics if metric.key in ("loss", "samples")), default=-1)


def log_rows(client: Any, run_id: str, rows: Sequence[Mapping[str, Any]], at_once: int = 1000) -> None:
    """Log rows of metrics, each with its own step and time. A step's loss comes last, so it says that all is there."""
    from mlflow.entities import Metric

    batch = [
        Metric(key, value, int(float(row["time"]) * 1000), int(row["step"]))
        for row in rows
        for key, value in figures(row)
    ]
    for begin in range(0, len(batch), at_once):
        client.log_batch(run_id, metrics=batch[begin : begin + at_once], synchronous=True)


def log_params(client: Any, found: Any, config: Mapping[str, Any]) -> None:
    """Log what MLflow does not have yet: it refuses to change a parameter."""
    from mlflow.entities import Param

    known = found.data.params
    params = [Param(key, value) for key, value in flat(config) if key not in known][:MOST_PARAMS]
    for begin in range(0, len(params), TAGS_AT_ONCE):
        client.log_batch(found.info.run_id, params=params[begin : begin + TAGS_AT_ONCE], synchronous=True)


def log_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value[:TAG_LENGTH]) for key, value in tags.items()], synchronous=True)


def say_status(client: Any, run_id: str, status: str) -> None:
    """RUNNING, or one of FINISHED, KILLED, FAILED with the present moment as the end."""
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    else:
        client.set_terminated(run_id, status=status, end_time=int(time.time() * 1000))


def figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics in a row of `metrics.jsonl`: evaluations as eval/<name> first, the loss last."""
    evaluation = row.get("eval")
    for key, value in (evaluation if isinstance(evaluation, dict) else {}).items():
        yield from _figure(f"eval/{key}", value)
    plain = {key: value for key, value in row.items() if key not in ("attempt", "step", "time", "eval")}
    for key, value in sorted(plain.items(), key=lambda item: item[0] == "loss"):
        yield from _figure(key, value)


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A configuration as MLflow parameters: dotted keys, values of bounded length."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        text = value if isinstance(value, str) else json.dumps(value)
        yield allowed(prefix), text[:PARAM_LENGTH]


def allowed(key: str) -> str:
    """The key as MLflow takes it: letters, digits, `_-. /`, and no path that could be written otherwise."""
    key = re.sub(r"[^/\w.\- ]", "_", key)[:KEY_LENGTH]
    plain = posixpath.normpath(key) == key and not key.startswith(("/", "..")) and key != "."
    return key if plain else re.sub(r"[/.]", "_", key) or "_"


def _figure(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """Non-finite values rest as strings in our files; MLflow takes them as numbers."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number or value in ("nan", "inf", "-inf"):
        yield allowed(key), float(value)


def _artifacts(client: Any, job: str, wished: str | None) -> str | None:
    """With a SQLite file, artifacts stand beside it; MLflow itself would put them into the working directory."""
    file = sqlite_file(client.tracking_uri)
    if file:
        return (file.absolute().parent / "mlartifacts" / job).as_uri()
    return wished if is_database(client.tracking_uri) else None
