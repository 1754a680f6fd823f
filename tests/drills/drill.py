"""A drill: one job in its own folder, run as a user runs it, and hurt."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import tiny
import yaml
from rigs import verdicts

from everstep.core.checkpoint import RunRecord
from everstep.host import jobs, process

ROOT = Path(__file__).parents[2]
GONE_SECONDS = 30


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Ended:
    """What a flow run left on the console."""

    code: int
    final: dict | None
    out: str
    err: str


@dataclass
class Drill:
    """One job in its own folder, run as a user runs it."""

    folder: Path
    api: str | None
    job: dict
    running: list[subprocess.Popen] = field(default_factory=list)
    faults_made: int = 0

    @property
    def home(self) -> Path:
        return self.folder / "persistent" / self.job["name"]

    @property
    def run_dir(self) -> Path:
        return max(self.home.glob("r*"))

    @property
    def local_dir(self) -> Path:
        return self.folder / "nvme" / self.job["name"] / self.run_dir.name

    def write(self) -> Path:
        file = self.folder / "job.yaml"
        file.write_text(yaml.safe_dump(self.job))
        return file

    def absolute_job(self) -> dict:
        """The job with absolute paths, as a deployment holds it."""
        return jobs.read(self.write()).model_dump(mode="json")

    @property
    def last_plan(self) -> Path | None:
        """The newest plan of faults; those that have fired do not fire again."""
        return self.folder / f"faults-{self.faults_made - 1}.json" if self.faults_made else None

    def fired(self) -> int:
        """How many faults of the plans have happened."""
        return len(list(self.folder.glob("faults-*.fired")))

    def start(
        self,
        *faults: dict,
        plan: Path | None = None,
        environment: dict[str, str] | None = None,
        arguments: tuple[str, ...] = (),
        cwd: Path = ROOT,
    ):
        """Begin a flow run; `faults` is a plan for `everstep.store.faults`, or `plan` names an older one."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "EVERSTEP_"))}
        env |= {"EVERSTEP_JOURNAL": str(self.folder / "journal"), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        if self.api:
            env["PREFECT_API_URL"] = self.api
        if faults:
            plan = self.folder / f"faults-{self.faults_made}.json"
            self.faults_made += 1
            plan.write_text(json.dumps(list(faults)))
        if plan:
            env["EVERSTEP_FAULTS"] = str(plan)
        flow = subprocess.Popen(
            [sys.executable, "-m", "flows.train", str(self.write()), *arguments],
            cwd=cwd,
            env=env | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.running.append(flow)
        return flow

    def wait(self, flow, timeout: float = 240) -> Ended:
        out, err = flow.communicate(timeout=timeout)
        lines = out.strip().splitlines()
        final = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
        return Ended(flow.returncode, final, out, err)

    def run(self, *faults: dict, **options) -> Ended:
        return self.wait(self.start(*faults, **options))

    def token(self) -> str:
        return process.token(RunRecord.model_validate_json((self.run_dir / "run.json").read_bytes()))

    @staticmethod
    def command(pid: int) -> str:
        """The command line of a process; empty if it is gone."""
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""

    @staticmethod
    def children(parent: int) -> list[int]:
        """Processes whose parent this one is."""
        return [one.pid for one in psutil.Process(parent).children(recursive=True)]

    @staticmethod
    def await_ended(pids: list[int], seconds: float = GONE_SECONDS) -> None:
        """Wait until none of these processes runs; zombies count as gone."""
        until = time.monotonic() + seconds
        running = pids
        while running and time.monotonic() < until:
            time.sleep(0.1)
            running = [pid for pid in pids if psutil.pid_exists(pid) and is_alive(pid)]
        assert not running, [Drill.command(pid) for pid in running]

    def left(self) -> list[int]:
        """Processes of this drill that still run, found by the run's mark."""
        return [
            pid
            for record in self.home.glob("r*/run.json")
            for pid in process.marked(process.token(RunRecord.model_validate_json(record.read_bytes())))
        ]

    def await_gone(self, seconds: float = GONE_SECONDS) -> None:
        until = time.monotonic() + seconds
        while self.left() and time.monotonic() < until:
            time.sleep(0.1)
        assert not self.left()

    def await_step(self, step: int, flow, seconds: float = 60, *, give_up: bool = True) -> None:
        """Wait until rank 0 of the running attempt has trained `step`. `give_up=False`: or until the flow has ended."""
        until = time.monotonic() + seconds
        beat = self.folder / "nvme" / self.job["name"]
        while time.monotonic() < until:
            for path in beat.glob("r*/heartbeat-0.json"):
                with contextlib.suppress(ValueError):
                    if json.loads(path.read_bytes())["step"] >= step:
                        return
            if flow.poll() is not None and not give_up:
                return
            assert flow.poll() is None, flow.communicate()
            time.sleep(0.02)
        raise AssertionError(f"step {step} was not reached in {seconds} s")

    def wall(self) -> float:
        """Seconds from the run's creation to its newest event."""
        events = [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]
        begin = min(event["data"].get("queued_since") or event["time"] for event in events)
        return max(event["time"] for event in events) - begin

    def accepted(self) -> dict[int, dict[int, list[dict]]]:
        """By rank and step, the micro-batches of the last process that got to the step."""
        result = {}
        for path in sorted((self.folder / "journal").glob("rank-*.jsonl")):
            steps: dict[int, list[dict]] = {}
            for row in map(json.loads, path.read_text().splitlines()):
                rows = steps.setdefault(row["step"], [])
                if rows and rows[-1]["pid"] != row["pid"]:
                    rows.clear()
                rows.append(row)
            for rows in steps.values():
                rows[:] = [{name: value for name, value in row.items() if name != "pid"} for row in rows]
            result[int(path.stem.removeprefix("rank-"))] = steps
        return result

    def close(self) -> None:
        for flow in self.running:
            if flow.poll() is None:
                os.killpg(flow.pid, signal.SIGKILL)
            flow.communicate()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def new_drill(folder: Path, api: str | None, mlflow: Path, name: str, config: dict | None = None, **changes) -> Drill:
    """TINY, 60 steps in segments of 20, a checkpoint every 10, unless said otherwise."""
    (folder / "journal").mkdir(parents=True)
    tiny.write_data(folder / "data")
    shutil.copy(mlflow, folder / "mlflow.db")
    verdicts.plant(folder / "data", folder / "nvme")
    job = {
        "name": name,
        "program": str(Path(tiny.__file__)) + ":build",
        "config": config or {},
        "data": {"source": "data"},
        "steps": 60,
        "segment_steps": 20,
        "checkpoint": {"every_steps": 10},
        "threads": 1,
        "tiers": {"local": "nvme", "persistent": "persistent"},
        "tracking": {"uri": "sqlite:///mlflow.db"},
    }
    return Drill(folder, api, job | changes)
