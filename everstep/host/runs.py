"""Runs: find or create the run that a job means, own it, and claim attempts on it.

A run is its job's name and a fingerprint. It lives in `<persistent>/<name>/<run>/`; whoever holds its lock trains it.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from everstep.core.checkpoint import AttemptClaim, RunRecord
from everstep.core.dataset import DatasetManifest
from everstep.core.errors import AlreadyOwned, Damaged
from everstep.core.job import TrainJob
from everstep.store import atomic
from everstep.store.layout import RunPlaces


@dataclass(frozen=True)
class Run:
    """A run that this process owns. `final` is the JSON line of a finished run, else None."""

    job: TrainJob
    record: RunRecord
    places: RunPlaces
    created: bool
    final: dict[str, Any] | None
    adopted: bool = False
    """Whether its directory has just been made from what the object tier holds."""
    owned: bool = False
    """Whether this process holds its lock. A finished run may be looked at without it."""


class Elsewhere(Protocol):
    """Where a run may be that this machine does not know."""

    def records(self) -> list[RunRecord]: ...

    def restore(self, record: RunRecord, places: RunPlaces) -> None: ...


@contextmanager
def own(
    job: TrainJob,
    dataset: DatasetManifest,
    flow_run: str,
    code_version: str,
    *,
    take_over: bool = False,
    elsewhere: Elsewhere | None = None,
) -> Iterator[Run]:
    """Find or create the job's run and hold its lock.

    A run that this machine does not know is looked for `elsewhere` before a new one is made. `take_over` asks the present owner to save and leave, and waits for that. Raises ValueError when another
    fingerprint is unfinished under this name, AlreadyOwned when another process trains this run.
    """
    home = Path(job.tiers.persistent) / job.name
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(home / ".lock"):
        run = _find_or_create(job, dataset, home, flow_run, code_version, elsewhere)
    lock = _lock(run.places.persistent / "owner.lock", wait=False)
    if lock is None and take_over and run.final is None:
        lock = _take_over(run, job.grace_seconds + 15)
    if lock is None and run.final is None:
        owner = _owner(run.places)
        raise AlreadyOwned(f"Run {run.record.run} of {job.name} is already owned by {owner}; stop that one first.")
    try:
        if lock is not None:
            takeover_wish(run.places).unlink(missing_ok=True)
            _say_owner(run.places, flow_run)
        yield replace(run, owned=lock is not None)
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def alone(places: RunPlaces) -> Iterator[bool]:
    """Whether nobody trains the run; if so, nobody can begin to for the length of the block."""
    lock = _lock(places.persistent / "owner.lock", wait=False)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def takeover_wish(places: RunPlaces) -> Path:
    """The file by which another flow run asks the owner to save and leave."""
    return places.persistent / "takeover"


def _take_over(run: Run, patience: float) -> int | None:
    atomic.write(takeover_wish(run.places), socket.gethostname().encode())
    until = time.monotonic() + patience
    while time.monotonic() < until:
        lock = _lock(run.places.persistent / "owner.lock", wait=False)
        if lock is not None:
            return lock
        time.sleep(0.1)
    return None


def _find_or_create(
    job: TrainJob,
    dataset: DatasetManifest,
    home: Path,
    flow_run: str,
    code_version: str,
    elsewhere: Elsewhere | None = None,
) -> Run:
    fingerprint = job.fingerprint(dataset.fingerprint)
    known = runs(home)
    mine = next((record for record in reversed(known) if record.fingerprint == fingerprint), None)
    fresh = job.fresh and not (mine and flow_run and mine.flow_run == flow_run)
    far = elsewhere.records() if elsewhere and (fresh or mine is None) else []
    taken = [record.run for record in far]
    if fresh:
        return _create(job, dataset, fingerprint, home, taken, flow_run, code_version)
    there = [record for record in far if record.fingerprint == fingerprint and record.name == job.name]
    if elsewhere and mine is None and there:
        mine = max(there, key=lambda record: _number(record.run))
        places = _places(job, mine.run)
        elsewhere.restore(mine, places)
        return Run(job, mine, places, created=False, final=_last_line(job, places), adopted=True)
    if mine is not None:
        places = _places(job, mine.run)
        return Run(job, mine, places, created=False, final=_last_line(job, places))
    others = [record for record in far if record.name == job.name]
    if elsewhere and others and not known:
        known = [max(others, key=lambda record: _number(record.run))]
        elsewhere.restore(known[0], _places(job, known[0].run))
    if known:
        _refuse_change(job, dataset, known[-1])
    return _create(job, dataset, fingerprint, home, taken, flow_run, code_version)


def _last_line(job: TrainJob, places: RunPlaces) -> dict[str, Any] | None:
    """The JSON line of a run in which nothing is left to do for this job."""
    final = final_line(places)
    if final is None or final["status"] not in ("completed", "degraded"):  # of the latter a copy is still to be made
        return None
    return final if int(final["step"]) >= job.steps or final.get("finished_early") else None


def _refuse_change(job: TrainJob, dataset: DatasetManifest, newest: RunRecord) -> None:
    """Another fingerprint under an unfinished name is a mistake more often than a wish."""
    places = _places(job, newest.run)
    final = final_line(places)
    if final is not None and (final["status"] == "completed" or not claims(places)):
        return  # also a run that was refused before it began, by the gate on its data: it binds nobody
    changed = [
        name
        for name, before, now in (
            ("program", newest.program, job.program),
            ("config", newest.config, job.config),
            ("data", newest.dataset_fingerprint, dataset.fingerprint),
            ("seed", newest.seed, job.seed),
        )
        if before != now
    ]
    what = " and ".join(changed) or "program"
    raise ValueError(
        f"name: {job.name!r} has an unfinished run {newest.run} with another {what}; "
        f"put the old {what} back to go on with it, choose another name, or set fresh: true to start over."
    )


def _create(
    job: TrainJob,
    dataset: DatasetManifest,
    fingerprint: str,
    home: Path,
    taken: list[str],
    flow_run: str,
    code_version: str,
) -> Run:
    number = max(map(_number, [*taken, *(path.name for path in home.iterdir())]), default=0) + 1
    run = f"r{number:03d}-{fingerprint[:8]}"
    places = _places(job, run)
    for folder in ("attempts", "segments", "marks", "logs", "checkpoints"):
        (places.persistent / folder).mkdir(parents=True, mode=0o700)
    places.persistent.chmod(0o700)
    record = RunRecord(
        name=job.name,
        run=run,
        fingerprint=fingerprint,
        dataset_fingerprint=dataset.fingerprint,
        created=time.time(),
        program=job.program,
        seed=job.seed,
        config=job.config,
        flow_run=flow_run,
        threads=job.threads or max(1, (os.cpu_count() or 1) // job.ranks),
        code_version=code_version,
    )
    atomic.write(places.run_record, record.to_json().encode())
    return Run(job, record, places, created=True, final=None)


def runs(home: Path) -> list[RunRecord]:
    """The runs under one name, oldest first. A folder without a readable run.json is none."""
    records = []
    for folder in sorted(home.iterdir() if home.exists() else (), key=lambda path: _number(path.name)):
        try:
            text = (folder / "run.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            records.append(RunRecord.parse(text, str(folder), "run.json"))
        except Damaged as error:
            raise Damaged(
                error.where, error.path, f"{error.why}; restore it from a copy, or move the folder away"
            ) from None
    return records


def final_line(places: RunPlaces) -> dict[str, Any] | None:
    """The JSON line that the run's last flow run left, or None."""
    try:
        line = json.loads(places.final.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return line if isinstance(line, dict) and "status" in line and "step" in line else None


def claims(places: RunPlaces) -> dict[int, AttemptClaim]:
    """Every claimed attempt of a run by number. A claim that cannot be read is a reason to stop: fencing rests on it."""
    found = {}
    for path in sorted((places.persistent / "attempts").glob("*.json")):
        claim = AttemptClaim.parse(path.read_bytes(), str(path.parent), path.name)
        found[claim.attempt] = claim
    return found


def claim(places: RunPlaces, attempt: int, resumed_from: int, checkpoint: str, flow_run: str) -> AttemptClaim | None:
    """Claim an attempt number; None if another was faster."""
    wanted = AttemptClaim(
        attempt=attempt,
        resumed_from=resumed_from,
        checkpoint=checkpoint,
        host=socket.gethostname(),
        pid=os.getpid(),
        boot=_boot(),
        flow_run=flow_run,
        time=time.time(),
    )
    return wanted if atomic.create(places.claim(attempt), wanted.to_json().encode()) else None


def _places(job: TrainJob, run: str) -> RunPlaces:
    return RunPlaces.of(job.tiers.local, job.tiers.persistent, job.tiers.object, job.name, run)


def _number(folder: str) -> int:
    head, dash, _ = folder.partition("-")
    return int(head[1:]) if dash and head.startswith("r") and head[1:].isdigit() else 0


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _say_owner(places: RunPlaces, flow_run: str) -> None:
    tiers = {name: str(folder) for name, folder in places.tiers.items()} | {"object": places.object}
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "flow_run": flow_run,
        "since": time.time(),
        "tiers": tiers,
    }
    atomic.write(places.persistent / "owner.json", json.dumps(owner).encode())


def _owner(places: RunPlaces) -> str:
    try:
        owner = json.loads((places.persistent / "owner.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return "another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
    return f"process {owner['pid']} on {owner['host']} since {since}"


def _lock(path: Path, *, wait: bool) -> int | None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = _lock(path, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
