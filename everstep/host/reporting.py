"""The report of a run: collects the facts in its directory and writes `report.html`, `report.json` and `report.txt`.

`python -m everstep.host.reporting <run_dir>` makes it again, also for a run that was killed.
"""

import fcntl
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from everstep.core import words
from everstep.core.chronicle import Chronicle
from everstep.core.errors import Damaged
from everstep.core.health import Severity
from everstep.core.job import Price, TrainJob
from everstep.core.record import Versioned
from everstep.core.secrets import without_secrets
from everstep.core.summarise import summarise
from everstep.core.summary import Curves, Facts, RunReport
from everstep.host import browse, curves, history, mlflow_run, runs
from everstep.report import page, text
from everstep.store import atomic, checkpoint
from everstep.store.layout import RunPlaces

WHOLE_BYTES = 512 * 2**20
QUICK_BYTES = 12 * 2**20
"""After a stop signal little time is left: of longer metrics only samples are read then."""
READ_SECONDS = 20.0
PACKAGES = ("everstep", "prefect", "mlflow-skinny", "numpy")


class Asked(Versioned):
    """`job.json` of a run: what its newest flow run was asked for, without secrets, and where it ran."""

    job: dict[str, JsonValue]
    environment: dict[str, str] = {}
    gpus: tuple[str, ...] = ()


def note(places: RunPlaces, job: TrainJob, record: Callable[..., None]) -> None:
    """Write down what is asked for and where, for the report: the run directory has no other copy of the job."""
    try:
        asked = Asked(job=without_secrets(job.model_dump(mode="json")), environment=_environment(), gpus=_gpus())
        atomic.write(_job_file(places), asked.to_json().encode(), sync=False)
    except Exception as error:  # noqa: BLE001 - the report's edge: recorded, and no reason for a run to end
        record("report.failed", severity=Severity.medium, text=_sentence(error))


@dataclass
class Reporter:
    """Makes the report of one run. `begin` reads the long file in the background, `write` does the rest."""

    places: RunPlaces
    trouble: str = ""
    _thread: threading.Thread | None = None
    _curves: Curves = field(default_factory=Curves)
    _failure: Exception | None = None

    def begin(self, most_bytes: int = WHOLE_BYTES) -> None:
        """Read the curves beside whatever the caller waits for. Nothing is trained any more by then."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, args=(most_bytes,), name="everstep-report", daemon=True)
            self._thread.start()

    def write(
        self, chronicle: Chronicle, final: Mapping[str, Any], status: str = "", *, quick: bool = False
    ) -> RunReport:
        """Write the page and the record. Raises what the disk or the drawing raise."""
        self.begin(QUICK_BYTES if quick else WHOLE_BYTES)
        assert self._thread is not None
        self._thread.join(READ_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.places.metrics} was not read within {READ_SECONDS:.0f} s")
        if self._failure is not None:
            raise self._failure
        report = summarise(_facts(self.places, chronicle, final, status, self._curves))
        atomic.write(html_file(self.places), page.render(report).encode(), sync=False)
        atomic.write(json_file(self.places), report.to_json().encode(), sync=False)
        return report

    def _read(self, most_bytes: int) -> None:
        try:
            resumed = {number: claim.resumed_from for number, claim in history.claims(self.places).items()}
            self._curves = curves.read(self.places.metrics, resumed, most_bytes)
        except Exception as error:  # noqa: BLE001 - the edge of the thread: raised again by write()
            self._failure = error


def attempt(
    reporter: Reporter,
    chronicle: Chronicle,
    final: Mapping[str, Any],
    record: Callable[..., None],
    publish: Callable[[RunReport], None],
    *,
    quick: bool = False,
) -> bool:
    """Write the report at a run's end and publish it; whether it was written. Nothing that goes wrong reaches the run."""
    written = False
    try:
        report = reporter.write(chronicle, final, quick=quick)
        written = True
        publish(report)
    except Exception as error:  # noqa: BLE001 - the report's edge: recorded, and no reason for a run to fail
        first, reporter.trouble = not reporter.trouble, _sentence(error)
        if first:
            record("report.failed", severity=Severity.medium, text=reporter.trouble)
    return written


def draft(
    reporter: Reporter, final: Mapping[str, Any], record: Callable[..., None], *, quick: bool = False
) -> tuple[str, ...]:
    """Write the report as it stands before MLflow is told of the end; the names of the files that MLflow may have."""
    written = attempt(reporter, history.read(reporter.places), final, record, lambda _report: None, quick=quick)
    return (html_file(reporter.places).name, json_file(reporter.places).name) if written else ()


def html_file(places: RunPlaces) -> Path:
    return places.persistent / "report.html"


def json_file(places: RunPlaces) -> Path:
    return places.persistent / "report.json"


def again(run_dir: Path) -> RunReport:
    """Make all three files of a run again from what its directory holds. Raises ValueError where there is no run."""
    places = browse.open_run(run_dir).places
    chronicle = history.read(places)
    final = (runs.final_line(places) or {}) if chronicle.status != "running" else {}
    status = "killed" if chronicle.status == "running" and not _is_owned(places) else ""
    report = Reporter(places).write(chronicle, final, status)
    told = dict(final) | ({"status": status} if status else {})
    atomic.write(places.report, text.render(chronicle, told).encode())
    return report


def _facts(places: RunPlaces, chronicle: Chronicle, final: Mapping[str, Any], status: str, drawn: Curves) -> Facts:
    asked = _asked(places)
    job = asked.job if asked else {}
    try:
        structure = checkpoint.read_structure(places.persistent)
    except Damaged:
        structure = None
    on_gpus = bool(asked and asked.gpus) and job.get("device") != "cpu"
    on_gpus = on_gpus and not (structure and structure.torch_version.endswith("+cpu"))
    return Facts(
        chronicle=chronicle,
        made=time.time(),
        curves=drawn,
        final=final,
        status=status,
        job=job or None,
        price=_price(job),
        structure=structure,
        gpus=on_gpus,
        environment=(asked.environment if asked else {})
        | ({"GPUs": ", ".join(asked.gpus)} if asked and on_gpus else {}),
        places=_places(places, job, final),
        links=_links(places, chronicle),
    )


def _links(places: RunPlaces, chronicle: Chronicle) -> dict[str, str]:
    """The pages beside the report that events name, as far as they are there."""
    named = {event.kind: str(event.data["docs"]) for event in chronicle.events if event.data.get("docs")}
    return {kind: link for kind, link in named.items() if page.safe_link(link) and (places.persistent / link).is_file()}


def _places(places: RunPlaces, job: Mapping[str, Any], final: Mapping[str, Any]) -> dict[str, str]:
    tracking = job.get("tracking")
    uri = str(tracking.get("uri") or "") if isinstance(tracking, dict) else ""
    return {
        "run directory": str(places.persistent),
        "checkpoint": str(final.get("checkpoint") or ""),
        "weights": str(final.get("weights") or ""),
        "MLflow": uri,
        "MLflow run": str(final.get("mlflow_run") or ""),
        "MLflow database": str(mlflow_run.sqlite_file(uri) or ""),
    }


def _price(job: Mapping[str, Any]) -> Price | None:
    try:
        return Price.model_validate(job["price"]) if job.get("price") else None
    except ValidationError:
        return None


def _asked(places: RunPlaces) -> Asked | None:
    path = _job_file(places)
    try:
        return Asked.parse(path.read_bytes(), str(path.parent), path.name)
    except (OSError, Damaged):
        return None


def _job_file(places: RunPlaces) -> Path:
    return places.persistent / "job.json"


def _is_owned(places: RunPlaces) -> bool:
    """Whether a living process holds the run's lock."""
    try:
        handle = os.open(places.persistent / "owner.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _environment() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform(terse=True), "CPUs": str(os.cpu_count())}
    for package in PACKAGES:
        try:
            found[package.removesuffix("-skinny")] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> tuple[str, ...]:
    """The models of the GPUs that this machine's driver shows; none where there is no driver."""
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            match = re.search(r"^Model:\s*(.+)$", file.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        found.append(match[1].strip() if match else "unknown GPU")
    return tuple(found)


def _sentence(error: Exception) -> str:
    what = f"{type(error).__name__}: {words.first_line(str(error), 300)}"
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.strerror}: {error.filename2 or error.filename or 'its folder'}"
    return f"the report could not be made: {what}"


def main(arguments: list[str]) -> int:
    """Make the report of the run in the given directory again, and print where it is."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m everstep.host.reporting <run_dir>\n")
        return 2
    folder = Path(arguments[0])
    try:
        report = again(folder)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write(f"{Path(report.places['run directory']) / 'report.html'}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
