"""A scrub of one run or of many: which runs, with what rate, and what it all came to.

Events go to `scrub.jsonl` of the run directory, never to the journal of a run that may be training, and from there to
the ledger.
"""

import argparse
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from everstep.core.errors import EverstepError
from everstep.core.health import Severity
from everstep.core.job import CheckpointPolicy, explain
from everstep.core.ledger import Event
from everstep.core.place import is_object
from everstep.core.scrub import Line, Outcome, Scrubbed, ScrubJob, sentence
from everstep.host import browse, gentle, jobs, outcome
from everstep.host.gentle import Pace
from everstep.host.ledger import Ledger
from everstep.host.scrub import Scrub
from everstep.store import object_tier, s3_access
from everstep.store.layout import RunPlaces
from everstep.store.s3_access import Access

ASK_SECONDS = 20.0
"""How long the object tier is asked one thing before it counts as one that does not answer."""
CLOSE_SECONDS = 5.0
JOURNAL = "scrub.jsonl"


@dataclass
class Scrubber:
    """The runs that are to be scrubbed, one after the other and all at one rate, and what was found so far."""

    job: ScrubJob
    runs: list[RunPlaces]
    pace: Pace
    until: float
    access: Access | None = field(default=None, repr=False)
    found: list[Scrubbed] = field(default_factory=list)

    def far(self, places: RunPlaces) -> object_tier.ObjectTier:
        """The run's place on the object tier. Raises ValueError where nothing says how to reach it."""
        uri = str(places.object)
        if is_object(uri) and self.access is None:
            self.access = s3_access.access(self.job.s3)
        return object_tier.open_run(uri, self.access, seconds=ASK_SECONDS)


def asked(arguments: Sequence[str]) -> ScrubJob:
    """What a command line wants scrubbed. Raises ValueError with one sentence."""
    parser = _Parser(prog="python -m flows.scrub", add_help=False)
    parser.add_argument("where")
    parser.add_argument("--mb-per-second", type=float, default=None)
    parser.add_argument("--minutes", type=float, default=None)
    given = vars(parser.parse_args(list(arguments)))
    where = Path(given.pop("where"))
    fields = {name: value for name, value in given.items() if value is not None}
    if where.is_file():
        job = jobs.read(where)
        home = None if job.tiers.block else str(Path(job.tiers.persistent, job.name))
        fields |= {"where": home, "tiers": job.tiers.block, "s3": job.s3, "ledger": job.ledger.uri}
    else:
        fields["where"] = str(where)
    try:
        wanted = ScrubJob.model_validate(fields)
    except ValidationError as error:
        raise ValueError(explain(error, "the command line")) from None
    if wanted.where:
        runs_in(Path(wanted.where))
    return wanted


def begin(job: ScrubJob, access: Access | None = None) -> Scrubber:
    """Find the runs; the one whose last scrub is longest ago comes first. Raises ValueError where there are none."""
    if not job.where:
        raise ValueError(
            "where: is missing; give a run directory, a job's folder, a persistent tier, or a tiers block."
        )
    found = sorted(runs_in(Path(job.where).expanduser()), key=_last_scrub)
    until = time.monotonic() + job.minutes * 60 if job.minutes else float("inf")
    return Scrubber(job, [browse.places_of(one) for one in found], Pace(job.mb_per_second * 1e6), until, access)


def scrub_run(scrubber: Scrubber, places: RunPlaces) -> Scrubbed:
    """Scrub one run beside everything else that this machine does. What cannot be read is said, and is no rot."""
    what = str(places.persistent)
    found = gentle.aside(lambda: _scrub(scrubber, places), scrubber.pace, what)
    scrubber.found.append(found)
    return found


def finish(scrubber: Scrubber) -> dict[str, Any]:
    """The result as the command line prints it."""
    found = scrubber.found
    lines = [line for one in found for line in one.lines]
    left = sentence(found)
    final = {
        "status": "failed" if left else "completed",
        "finished": all(one.finished for one in found),
        "runs": len(found),
        "copies": len(lines),
        **{kind.value: sum(one.count(kind) for one in found) for kind in Outcome},
        "bytes": sum(one.bytes for one in found),
        "seconds": round(sum(one.seconds for one in found), 3),
        "found": [line.model_dump(mode="json") for line in lines if line.outcome is not Outcome.sound],
        "notes": [f"{one.job}/{one.run}: {one.note}" for one in found if one.note],
    }
    outcome.deliver(final)
    return final


def refuse(scrubber: Scrubber) -> None:
    """Raise EverstepError with what a person must know, if something is left that no scrub can mend."""
    if left := sentence(scrubber.found):
        raise EverstepError(left)


def runs_in(folder: Path) -> list[Path]:
    """The run directories at, or one or two folders below, `folder`. Raises ValueError where there are none."""
    found = [path.parent for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}run.json")]
    if not found:
        raise ValueError(
            f"where: {str(folder)!r} holds no run; give a run directory, a job's folder, a persistent tier, or a job's file."
        )
    return sorted(found)


def _scrub(scrubber: Scrubber, places: RunPlaces) -> Scrubbed:
    asked_for = _job_of(places)
    ledger = Ledger(scrubber.job.ledger or _ledger_of(asked_for, places), places.persistent / JOURNAL)
    job, run = places.persistent.parent.name, places.persistent.name

    def record(
        kind: str, *, step: int | None = None, severity: Severity = Severity.low, text: str = "", **data: Any
    ) -> None:
        now, name = time.time(), uuid.uuid4().hex
        ledger.append(
            Event(id=name, time=now, kind=kind, severity=severity, job=job, run=run, step=step, text=text, data=data)
        )

    far = (lambda: scrubber.far(places)) if places.object else None
    over: Callable[[], bool] = lambda: time.monotonic() > scrubber.until  # noqa: E731 - as short as it is
    try:
        return Scrub(places, far, scrubber.pace, record, _policy_of(asked_for), over).do()
    except (EverstepError, OSError, ValueError) as error:
        why = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
        line = Line(job=job, run=run, checkpoint="", tier="persistent", outcome=Outcome.unknown, why=why)
        return Scrubbed(job=job, run=run, lines=(line,), finished=False)
    finally:
        ledger.close(CLOSE_SECONDS)


def _job_of(places: RunPlaces) -> dict[str, Any]:
    """What the run's newest flow run was asked for; empty where that is not written down."""
    try:
        told = json.loads((places.persistent / "job.json").read_bytes())
    except (OSError, ValueError):
        return {}
    job = told.get("job") if isinstance(told, dict) else None
    return job if isinstance(job, dict) else {}


def _policy_of(job: dict[str, Any]) -> CheckpointPolicy:
    """What the run's job keeps; of one that cannot be read, the defaults."""
    try:
        return CheckpointPolicy.model_validate(job.get("checkpoint") or {})
    except ValueError:
        return CheckpointPolicy()


def _ledger_of(job: dict[str, Any], places: RunPlaces) -> str:
    """The ledger of the run's job. One with a password is not written down with it: then the default one is used."""
    uri = (job.get("ledger") or {}).get("uri")
    if isinstance(uri, str) and "..." not in uri and "***" not in uri:
        return uri
    return f"sqlite:///{places.persistent.parent.parent}/ledger.db"


def _last_scrub(run_dir: Path) -> float:
    try:
        return (run_dir / "scrub.json").stat().st_mtime
    except OSError:
        return 0.0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in a sentence, and leaves the exit to others."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"usage: python -m flows.scrub <job.yaml or folder> [--mb-per-second N] [--minutes N]; {message}."
        )
