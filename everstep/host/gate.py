"""The data gate as the flow sees it: asked when the data is staged, answered before the first step is leased.

The verdict comes from a process of its own (`everstep.host.expectations`), beside the ranks that import torch meanwhile.
It is remembered in the run (`gate.json`) and, for other runs on the same data, on the local tier (`gates/<key>/`): a
restart does not pay for it again. The Data Docs are built after the verdict, beside the training.
"""

import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from everstep.core.errors import Damaged, TrainingFailed
from everstep.core.gate import GateResult, GateTask, Suite
from everstep.core.health import Severity
from everstep.core.job import DataGate, TrainJob
from everstep.host import process
from everstep.host.process import Process
from everstep.host.staging import Staged
from everstep.store import atomic
from everstep.store.layout import RunPlaces

TASK, RESULT, DOCS = "task.json", "result.json", "data-docs"
COMMAND = (sys.executable, "-m", "everstep.host.expectations")
VERSION = 1
"""Grows when the defaults judge otherwise: what was remembered before does not count any more."""

LOOK = 0.02
TRIES = 2
DOCS_SECONDS = 20.0
KEPT = 20
STALE_SECONDS = 86_400.0


class Gatekeeper:
    """Asks for the verdict on a run's data. `record` hears of it as the event `gate.data`."""

    def __init__(
        self,
        job: TrainJob,
        places: RunPlaces,
        staged: Staged,
        token: str,
        record: Callable[..., None],
        *,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._gate = job.data.gate
        self._seconds = job.limits.gate
        self._places = places
        self._staged = staged
        self._token = f"{token}/gate"
        self._record = record
        self._command = tuple(command)
        self._home = Path(job.tiers.local).absolute() / "gates"
        self._suite: str | None = None
        self._key = ""
        self._known: GateResult | None = None
        self._process: Process | None = None
        self._folder: Path | None = None

    def ask(self) -> None:
        """Begin, unless the answer is known. Returns at once. Raises ValueError for a suite that is none."""
        self._suite = read_suite(self._gate)
        self._key = key(self._staged.manifest.fingerprint, self._gate, self._suite)
        self._known = _opened(verdict(self._places), self._key) or self._from_tier()
        if self._known is None or not docs(self._places).exists():
            self._spawn()

    def answer(self) -> GateResult:
        """The verdict, waited for. Raises ValueError with one plain sentence when the gate stays closed.

        TrainingFailed when there is no verdict: the gate stays closed then too.
        """
        if self._known is None:
            self._record("gate.waiting")
            self._known = self._wait()
            atomic.write(verdict(self._places), self._known.to_json().encode())
            self._tell(self._known)
        if self._known.trouble and not self._known.great_expectations:
            raise TrainingFailed(self._known.reason)
        if not self._known.ok:
            self.settle()
            raise ValueError(self._known.reason)
        return self._known

    def settle(self) -> None:
        """Let the Data Docs come to their end, which they have long since unless the run was a short one."""
        if self._process is not None:
            self._process.wait(DOCS_SECONDS)
        self.close()

    def close(self) -> None:
        """End what still runs and leave no scratch behind."""
        if self._process is not None:
            if self._process.status() is None:
                self._process.kill_group()
                self._process.wait(2.0)
            self._process.close()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _from_tier(self) -> GateResult | None:
        """A verdict that another run on this machine has paid for, with its Data Docs."""
        kept = self._home / self._key
        result = _opened(kept / RESULT, self._key)
        if result is None:
            return None
        try:
            publish(kept / DOCS, docs(self._places))
        except OSError:  # another run has tidied it away meanwhile
            return None
        atomic.write(verdict(self._places), result.to_json().encode())
        self._tell(result, kept=True)
        return result

    def _spawn(self) -> None:
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        _tidy(self._home)
        self._folder = self._home / f".{self._key[:16]}.{secrets.token_hex(4)}"
        (self._folder / "tmp").mkdir(parents=True, mode=0o700)
        task = GateTask(
            key=self._key,
            manifest=self._staged.manifest,
            data=str(self._staged.data.absolute()),
            gate=self._gate,
            suite=self._suite,
            docs=str(docs(self._places).absolute()),
            keep=str(self._home / self._key),
            seconds=self._seconds,
        )
        atomic.write(self._folder / TASK, task.to_json().encode(), sync=False)
        quiet = {"GX_ANALYTICS_ENABLED": "False", "TQDM_DISABLE": "1", "TMPDIR": str(self._folder / "tmp")}
        env = process.child_environment((), quiet | {"OMP_NUM_THREADS": "1"})
        argv = [*self._command, str(self._folder)]
        self._process = process.spawn(argv, env, self._token, self._log)

    def _wait(self) -> GateResult:
        until = time.monotonic() + self._seconds
        tries = 1
        while True:
            found = self._look()
            if found is not None:
                return found
            if time.monotonic() >= until:
                return self._no_verdict(
                    f"timed out after {self._seconds:g} s; raise limits.gate, or lower data.gate.sample_rows."
                )
            if self._process is None or self._process.status() is not None:
                status = self._process.status() if self._process else None
                if (found := self._look()) is not None:
                    return found
                if tries == TRIES:
                    return self._no_verdict(f"its process ended with status {status}; {self._log} tells why.")
                self.close()
                time.sleep(secrets.randbelow(1000) / 1000)
                self._spawn()
                tries += 1
            else:
                self._process.wait(LOOK)

    def _look(self) -> GateResult | None:
        return _read(self._folder / RESULT, self._key) if self._folder else None

    def _no_verdict(self, trouble: str) -> GateResult:
        self.close()
        suite = "the job's own" if self._suite else "defaults"
        return GateResult(
            key=self._key, dataset=self._staged.manifest.fingerprint, suite=suite, time=time.time(), trouble=trouble
        )

    def _tell(self, result: GateResult, *, kept: bool = False) -> None:
        told: dict[str, Any] = result.model_dump(
            mode="json", include={"key", "dataset", "suite", "seconds", "validations", "trouble", "great_expectations"}
        )
        findings = [one.model_dump(mode="json") for one in result.findings[:20]]
        severity = Severity.low if result.ok else Severity.high
        self._record(
            "gate.data",
            severity=severity,
            text=result.reason,
            ok=result.ok,
            checked=result.checked,
            findings=findings,
            kept=kept,
            docs=f"{docs(self._places).name}/index.html",
            **told,
        )

    @property
    def _log(self) -> Path:
        return self._places.persistent / "logs" / "gate.log"


def verdict(places: RunPlaces) -> Path:
    """The file with the verdict on a run's data."""
    return places.persistent / "gate.json"


def docs(places: RunPlaces) -> Path:
    """The folder with a run's Data Docs; its `index.html` is the first page."""
    return places.persistent / DOCS


def read_suite(gate: DataGate) -> str | None:
    """The text of the suite that a job names, None if it names none. Raises ValueError for one that cannot be used."""
    if gate.suite is None:
        return None
    try:
        text = Path(gate.suite).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(
            f"data.gate.suite: {gate.suite!r} cannot be read ({why}); give a Great Expectations suite as JSON."
        ) from None
    Suite.read(text, gate.suite)
    return text


def key(fingerprint: str, gate: DataGate, suite: str | None) -> str:
    """What a verdict depends on, as 64 hex digits: the data, what is asked of it, and who answers."""
    parts = {
        "data": fingerprint,
        "gate": gate.model_dump(mode="json", exclude={"suite"}),
        "suite": suite,
        "great_expectations": metadata.version("great_expectations"),
        "version": VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def publish(built: Path, place: Path) -> None:
    """Give the run its Data Docs, whole or not at all."""
    if not built.exists():
        return
    beside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(built, beside)
        if place.exists():
            shutil.rmtree(place)
        beside.rename(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _read(path: Path, wanted: str) -> GateResult | None:
    """The verdict in a file, if it is one on just this."""
    try:
        result = GateResult.parse(path.read_bytes(), str(path.parent), path.name)
    except (FileNotFoundError, NotADirectoryError, Damaged):
        return None
    return result if result.key == wanted else None


def _opened(path: Path, wanted: str) -> GateResult | None:
    """A verdict that counts once more: a gate that stayed closed is asked again."""
    result = _read(path, wanted)
    return result if result is not None and result.ok else None


def _tidy(home: Path) -> None:
    """Forget the oldest verdicts, and scratch that a killed process left."""
    kept = sorted((path for path in home.iterdir() if not path.name.startswith(".")), key=_age)
    stale = [path for path in home.glob(".*") if time.time() - _age(path) > STALE_SECONDS]
    for path in [*kept[: max(0, len(kept) - KEPT)], *stale]:
        shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
