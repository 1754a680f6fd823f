"""One flow run, started as a user starts it, and watched from outside while it trains."""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import yaml

from everstep.core.checkpoint import RunRecord
from everstep.host import process
from everstep.store import jsonl

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRAINER = b"everstep.trainer"
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Lab:
    """Where flow runs work: a folder, a Prefect API for all of them, and a migrated MLflow database to copy."""

    folder: Path
    api: str
    mlflow: Path


class Stamp(NamedTuple):
    """A finished step, in monotonic seconds."""

    rank: int
    pid: int
    step: int
    began: float
    ended: float


@dataclass
class Flow:
    """A job of the bench and its flow run; leaves nothing behind as a context."""

    lab: Lab
    name: str
    config: dict
    changes: dict
    build: str = "build"
    running: process.Process | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        (self.folder / "data").mkdir()
        (self.folder / "data" / "rows").write_text("none are read\n")
        shutil.copy(self.lab.mlflow, self.folder / "mlflow.db")
        job = {
            "name": self.name,
            "program": f"{HERE / 'program.py'}:{self.build}",
            "config": {"stamps": str(self._stamps), **self.config},
            "data": {"source": "data"},
            "threads": 1,
            "tiers": {"local": "nvme", "persistent": "persistent"},
            "tracking": {"uri": "sqlite:///mlflow.db"},
        }
        (self.folder / "job.yaml").write_text(yaml.safe_dump(job | self.changes))
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "EVERSTEP_"))}
        argv = [sys.executable, "-m", "flows.train", str(self.folder / "job.yaml")]
        env |= {"PREFECT_API_URL": self.lab.api}
        self.running = process.spawn(argv, env, f"bench/{self.name}", self.folder / "console.log", cwd=ROOT)
        return self

    def __exit__(self, *_: object) -> None:
        """End it, however it went."""
        self.running.kill_group()
        self.running.wait(5.0)
        self.running.close()
        for record in self.folder.glob(f"persistent/{self.name}/r*/run.json"):
            process.sweep(_token(record), 0.0)
        shutil.rmtree(self.folder)

    @property
    def folder(self) -> Path:
        return self.lab.folder / self.name

    @property
    def _stamps(self) -> Path:
        return self.folder / "stamps"

    @property
    def run_dir(self) -> Path:
        return next(self.folder.glob(f"persistent/{self.name}/r*/run.json")).parent

    def lines(self) -> list[list[str]]:
        """What the program has noted, as words; a line that is being written is left out."""
        text = self._stamps.read_text() if self._stamps.exists() else ""
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def stamps(self) -> list[Stamp]:
        return [Stamp(int(rank), int(pid), int(step), float(b), float(e)) for rank, pid, step, b, e in self.lines()]

    def await_completion(self, seconds: float) -> None:
        code = self.running.wait(seconds)
        if code != 0:
            raise RuntimeError(f"{self.name} ended with code {code} (None: not in time):\n{self.console()}")

    def await_steps(self, count: int, after: float, seconds: float = 90.0) -> list[Stamp]:
        """The first `count` steps of rank 0 that began after the moment `after`, as soon as they are stamped."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            fresh = [one for one in self.stamps() if one.began > after and one.rank == 0]
            if len(fresh) >= count:
                return fresh[:count]
            if self.running.status() is not None:
                raise RuntimeError(f"{self.name} ended early:\n{self.console()}")
            time.sleep(0.05)
        raise TimeoutError(f"{self.name}: no {count} steps in {seconds:.0f} s:\n{self.console()}")

    def stop(self) -> None:
        """Ask by the stop file for an orderly end."""
        (self.run_dir / "stop").write_text("the bench has seen enough\n")
        self.running.wait(60.0)

    def ranks(self) -> dict[int, int]:
        """The pids of the ranks that train now, by rank."""
        beats = [json.loads(path.read_bytes()) for path in self.folder.glob("nvme/*/r*/heartbeat-*.json")]
        return {beat["rank"]: beat["pid"] for beat in beats}

    def spares(self) -> list[int]:
        """The pids of spare ranks: they run the trainer, and are none of the ranks that train."""
        mine = process.marked(_token(self.run_dir / "run.json"))
        return [pid for pid in mine if pid not in self.ranks().values() and TRAINER in _command(pid)]

    def await_warm_spares(self, count: int, seconds: float = 60.0) -> list[int]:
        """Wait until spares are there and have not used the processor for a while: they have imported all they need."""
        until = time.monotonic() + seconds
        before: dict[int, float] = {}
        while time.monotonic() < until:
            now = {pid: cpu_seconds(pid) for pid in self.spares()}
            idle = [pid for pid, used in now.items() if used > 0.5 and used - before.get(pid, -1.0) < 1.5 * TICK]
            if len(idle) == count:
                return idle
            before = now
            time.sleep(0.5)
        raise TimeoutError(f"{self.name}: spares did not warm up in {seconds:.0f} s:\n{self.console()}")

    def rows(self, file: str) -> list[dict]:
        """The rows of a file of the run directory."""
        return list(jsonl.read(self.run_dir / file))

    def console(self) -> str:
        return "\n".join((self.folder / "console.log").read_text().splitlines()[-15:])


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, all its threads together; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * TICK


def memory_mb(pid: int) -> dict[str, float]:
    """Resident, proportional and private memory of a process in MB (10^6 bytes)."""
    sizes: dict[str, float] = {"Rss": 0.0, "Pss": 0.0, "Private_Clean": 0.0, "Private_Dirty": 0.0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in sizes:
            sizes[name] = int(rest.split()[0]) * 1024 / 1e6
    return {"rss": sizes["Rss"], "pss": sizes["Pss"], "private": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def _token(record: Path) -> str:
    return process.token(RunRecord.model_validate_json(record.read_bytes()))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
