"""What a job may name that comes from far away: programs, data, tiers, servers, variables. Judged before anything runs."""

import os.path
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from everstep.core.job import Tiers, Tracking, TrainJob
from everstep.core.place import is_object
from everstep.core.record import Record

_DATABASE = Tracking().uri.partition(":///")[2]


class Guardrails(Record):
    """Allow-lists. An entry of `programs` is a module, a package, or an absolute folder; of `data` and `tiers` an
    absolute folder or s3://bucket/prefix: what stands below it is allowed too. `hosts` are those of MLflow servers,
    ledgers and object stores that a job names itself. An empty list allows nothing; what a job leaves at its default,
    or takes from a block, is not judged.
    """

    programs: tuple[str, ...]
    data: tuple[str, ...]
    tiers: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    def refusal(self, job: TrainJob, base: Path, real: Callable[[str], str] = os.path.normpath) -> str:
        """Why the job is refused, as one sentence; empty if all of it is allowed.

        Relative paths in the job are taken from `base`. `real` gives the path that a path comes to, links followed.
        """
        return next(self._refusals(job.resolve(base), base, real), "")

    def _refusals(self, job: TrainJob, base: Path, real: Callable[[str], str]) -> Iterator[str]:
        if not _is_program(job.program, self.programs, real):
            yield _sentence("program", job.program, self.programs)
        for field, where in (("data.source", job.data.source), ("data.gate.suite", job.data.gate.suite)):
            if where and not _is_below(where, self.data, real):
                yield _sentence(field, where, self.data)
        for field, where in _own_places(job, base):
            if not _is_below(where, self.tiers, real):
                yield _sentence(field, where, self.tiers)
        for field, host in _own_hosts(job):
            if host not in self.hosts and host.rpartition(":")[0] not in self.hosts:
                yield _sentence(field, host, self.hosts)
        for name in job.env:
            if name not in self.variables:
                yield _sentence("env", name, self.variables)


def check_entry(entry: str) -> str:
    """An entry of an allow-list of places; ValueError for one that could not be meant so."""
    if not is_object(entry) and not entry.startswith("/"):
        raise ValueError(f"{entry!r} is neither an absolute folder nor s3://bucket/prefix")
    return entry


def _own_places(job: TrainJob, base: Path) -> Iterator[tuple[str, str]]:
    """Folders and files to write to that the job names itself."""
    usual = Tiers().resolve(base)
    for name in ("local", "persistent", "object"):
        where = getattr(job.tiers, name)
        if not job.tiers.block and where and where != getattr(usual, name):
            yield f"tiers.{name}", where
    for field, uri in _databases(job):
        file = uri.partition(":///")[2]
        if uri.startswith("sqlite") and file != os.path.normpath(base / _DATABASE):
            yield field, file


def _own_hosts(job: TrainJob) -> Iterator[tuple[str, str]]:
    for field, uri in _databases(job):
        if not uri.startswith("sqlite"):
            yield field, urlsplit(uri).netloc.rpartition("@")[2]
    if job.s3.endpoint_url:
        yield "s3.endpoint_url", urlsplit(job.s3.endpoint_url).netloc


def _databases(job: TrainJob) -> Iterator[tuple[str, str]]:
    if not job.tracking.block:
        yield "tracking.uri", job.tracking.uri
    if job.ledger.uri:
        yield "ledger.uri", job.ledger.uri


def _is_program(program: str, allowed: tuple[str, ...], real: Callable[[str], str]) -> bool:
    file = program.rpartition(":")[0]
    if file.endswith(".py"):
        return _is_below(file, tuple(one for one in allowed if one.startswith("/")), real)
    return any(one in (file, program) or file.startswith(f"{one.rstrip('.')}.") for one in allowed)


def _is_below(where: str, roots: tuple[str, ...], real: Callable[[str], str]) -> bool:
    if is_object(where):
        parts = [f"{one.rstrip('/')}/" for one in roots if is_object(one)]
        return any(f"{where.rstrip('/')}/".startswith(one) for one in parts)
    found = real(where)
    return any(os.path.commonpath([found, real(one)]) == real(one) for one in roots if one.startswith("/"))


def _sentence(field: str, value: str, allowed: tuple[str, ...]) -> str:
    shown = ", ".join(allowed) if allowed else "none"
    return f"{field}: {value!r} is not allowed in a job that comes through this server (allowed: {shown})."
