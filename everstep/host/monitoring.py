"""A monitor from its start to its end: what it is made of, how long it runs, and its command line without Prefect."""

import argparse
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from everstep.core.errors import Damaged
from everstep.core.health import State
from everstep.core.health_policy import DEFAULT, HealthPolicy
from everstep.core.ledger import Event
from everstep.core.log_rules import LogPolicy
from everstep.core.monitor import HISTORY_SECONDS, REMEDY, MonitorJob, offences
from everstep.host import health_policy, log_policy, outcome, policy_file
from everstep.host import ledger as ledgers
from everstep.host.exporter import Exporter
from everstep.host.gpus import GpuSampler
from everstep.host.kernel_log import open_kernel_log, place_of
from everstep.host.ledger import Ledger
from everstep.host.listener import Listener
from everstep.host.log_file import LogFiles, Source
from everstep.host.log_follower import LogFollower
from everstep.host.monitor import Hands, Monitor, Tell
from everstep.host.monitor_watch import HOST_SECONDS, HostWatch, Trainings, Watch
from everstep.host.monitor_writer import Writer, read_place
from everstep.host.telemetry import Telemetry, safe
from everstep.store import jsonl

OPTIONS: dict[str, type[str] | type[int] | type[float]] = {
    "every_seconds": float,
    "minutes": float,
    "disk_gb": float,
    "gpus": int,
    "metrics_port": int,
    **dict.fromkeys(("folder", "node", "textfile", "local", "persistent", "policy", "log_policy", "ledger"), str),
}
"""What the command line takes; a file may have all fields of a `MonitorJob`."""

REMEDIES_SECONDS = 30.0
NEWEST_BYTES = 16 << 20
JOURNAL_BYTES = 64 << 20


def watch(job: MonitorJob, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Watch this machine for as long as the job says; what was seen, as the command line prints it.

    `tell` hears every event, in a thread of its own: it may take its time, and it may fail. Ends early by whatever exception reaches it, and leaves nothing running. Raises ValueError for what a person can mend.
    """
    began = time.monotonic()
    until = began + job.minutes * 60 if job.minutes else float("inf")
    with _monitor(job, tell) as (monitor, past):
        monitor.say("everstep.monitor.started", f"the monitor of node {monitor.node} has started")
        try:
            while time.monotonic() < until:
                monitor.step()
                if found := past.found():
                    monitor.remember(found)
        finally:
            monitor.say("everstep.monitor.stopped", f"the monitor of node {monitor.node} stops")
    verdict = monitor.verdict
    final = {
        "status": "completed",
        "node": monitor.node,
        "seconds": round(time.monotonic() - began, 3),
        "sweeps": monitor.sweeps_taken,
        "events": monitor.events_told,
        "state": verdict.verdict.state.value if verdict else State.unknown.value,
        "verdict": verdict.model_dump(mode="json") if verdict else None,
    }
    outcome.deliver(final)
    return final


def asked(arguments: Sequence[str], program: str = "python -m everstep.host.monitoring") -> MonitorJob:
    """What a command line wants watched. Raises ValueError with one sentence."""
    parser = _Parser(prog=program, description="Watch the GPUs of this machine. docs/monitor.md tells more.")
    parser.add_argument("file", nargs="?", type=Path, help="a YAML file with the same fields, and a few more")
    for name, kind in OPTIONS.items():
        said = MonitorJob.model_fields[name].description or ""
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=said.replace("%", "%%"))
    given = {name: value for name, value in vars(parser.parse_args(list(arguments))).items() if value is not None}
    file = given.pop("file", None)
    fields = policy_file.read(file, "fields of a monitor and their values", "docs/monitor.md") if file else {}
    if file:
        fields = _from(file.resolve().parent, fields)
    try:
        job = MonitorJob.model_validate(fields | given)
    except ValidationError as error:
        raise ValueError(_sentence(error, str(file or "the command line"))) from None
    _checked(job)
    return job


def main(arguments: Sequence[str]) -> int:
    """The command line without Prefect: events as lines, the last line is one JSON object. 0 also when stopped."""
    try:
        job = asked(arguments)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        final = watch(job, show)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"{error.filename or job.folder}: {error.strerror}; mend that and start the monitor again.\n")
        return 1
    except KeyboardInterrupt:
        return 0
    sys.stdout.write(json.dumps(final) + "\n")
    return 0


def show(event: Event) -> None:
    """One line for people."""
    at = time.strftime("%H:%M:%S", time.localtime(event.time))
    sys.stdout.write(f"{at} {event.kind.removeprefix('everstep.')} {event.text}\n")
    sys.stdout.flush()


@contextmanager
def _monitor(job: MonitorJob, tell: Tell) -> Iterator[tuple[Monitor, "_Past"]]:
    """A monitor and its hands, which are let go of in the opposite order."""
    node = job.node or os.uname().nodename
    home = Path(job.folder, safe(node))
    home.mkdir(parents=True, exist_ok=True)
    health, logs, uri = _checked(job)
    with ExitStack() as held:
        held.enter_context(_alone(home))
        listener = Listener(tell)
        held.callback(listener.close)
        exporter = Exporter()
        held.callback(exporter.close)
        if job.metrics_port is not None:
            exporter.serve(job.metrics_port, job.metrics_address)
        kernel, why = open_kernel_log(read_place(home / "monitor.json")) if job.kernel_log else (None, "not asked for")
        patterns = [f"{job.persistent}/*/*/logs/*.log"] if job.persistent else []
        programs: list[Source] = [LogFiles((*patterns, *job.logs))] if (*patterns, *job.logs) else []
        follower = LogFollower([*([kernel] if kernel else []), *programs], logs)
        watching = Watch(follower, Trainings(Path(job.local)) if job.local else None)
        writer = Writer(
            Telemetry(Path(job.folder), node, disk_bytes=int(job.disk_gb * 1e9)),
            Ledger(uri, home / "events.jsonl", most_bytes=JOURNAL_BYTES),
            exporter,
            textfile=Path(job.textfile) if job.textfile else None,
            place_file=home / "monitor.json" if kernel else None,
            place=lambda: place_of(kernel) if kernel else "",
        )
        held.callback(writer.close)
        held.callback(watching.close)
        host = HostWatch(max(HOST_SECONDS, job.every_seconds))
        held.callback(host.close)
        past = _Past(uri, node)
        held.callback(past.close)
        gpus = held.enter_context(GpuSampler())
        watching.start()
        host.start()
        past.start()
        gpus.start()
        hands = Hands(gpus, host, watching, writer, exporter)
        monitor = Monitor(job, hands, listener.put, policy=health, past=_before(home / "events.jsonl"))
        if kernel is None:
            monitor.say("everstep.monitor.not_measured", f"the kernel's log is not measured: {why}", what="kernel_log")
        yield monitor, past


class _Past:
    """Asks the ledger now and then for remedies that others have noted, in a thread of its own, as its database may hang."""

    def __init__(self, uri: str, node: str) -> None:
        self._uri = uri
        self._node = node
        self._found: list[Event] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-past", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def found(self) -> list[Any]:
        """What came since the last time."""
        found, self._found = self._found, []
        return offences(found, self._node)

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            with suppress(SQLAlchemyError, OSError, ImportError, ValueError):  # it is asked again
                self._found = ledgers.events(self._uri, kind=REMEDY, since=time.time() - HISTORY_SECONDS)
            self._over.wait(REMEDIES_SECONDS)


def _before(journal: Path) -> list[Event]:
    """The events of earlier monitors of this node."""
    found = []
    with suppress(OSError):
        for path in (ledgers.former(journal), journal):
            for row in jsonl.read(path, NEWEST_BYTES):
                with suppress(Damaged):
                    found.append(Event.parse(json.dumps(row), str(path.parent), path.name))
    return found


def _sentence(error: ValidationError, source: str) -> str:
    """The first thing that is wrong: field, value, remedy. A field that there is not comes first."""
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        near = get_close_matches(field, list(MonitorJob.model_fields), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(MonitorJob.model_fields)}."
        return f"{source}: {field} is not known here; {hint}"
    return f"{source}: {field}: {first['input']!r:.60} does not do; {first['msg'][0].lower()}{first['msg'][1:]}."


def _checked(job: MonitorJob) -> tuple[HealthPolicy, LogPolicy | None, str]:
    """The policies, and the ledger's URL. Raises ValueError for what a person can mend."""
    health = health_policy.load_policy(Path(job.policy)) if job.policy else DEFAULT
    logs = log_policy.load_policy(Path(job.log_policy)) if job.log_policy else None
    if job.textfile and not job.textfile.endswith(".prom"):
        raise ValueError(f"textfile: {job.textfile!r} does not end in .prom; the node exporter reads no other files.")
    uri = job.ledger or f"sqlite:///{Path(job.folder, 'ledger.db').absolute()}"
    try:
        make_url(uri)
    except ArgumentError:
        raise ValueError(
            f"ledger: {job.ledger!r} is no URL of a database; give one such as sqlite:////var/lib/everstep/ledger.db."
        ) from None
    return health, logs, uri


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One monitor writes to a folder of a node. Raises ValueError where there is another one."""
    with (home / "monitor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"folder: another monitor writes to {home}; stop that one, or give another folder or node."
            ) from None
        yield


def _from(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Relative paths of a file are taken from where the file is."""
    named = {"folder", "local", "persistent", "policy", "log_policy", "textfile"}
    logs = fields.get("logs")
    if isinstance(logs, list):
        fields = fields | {"logs": [str(folder / one) if isinstance(one, str) else one for one in logs]}
    found = {
        name: str(folder / value) if name in named and isinstance(value, str) else value
        for name, value in fields.items()
    }
    return {"folder": str(folder / ".everstep" / "telemetry")} | found


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; {self.prog} --help lists what there is.")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
