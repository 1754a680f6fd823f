"""What tests of the flow's face share: one Prefect server, and desks, which are folders with a job and a program."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import yaml
from rigs import verdicts

from everstep.core.checkpoint import RunRecord
from everstep.host import process, server

ROOT = Path(__file__).parents[2]

PROGRAM = """
import time

import numpy as np
import torch
from everstep.trainer import Program

calls = 0


def build(config, data):
    for what in config.get("build", []):
        exec(what)
    table = torch.from_numpy(np.load(data / "table.npy"))[: config.get("rows", 64)]
    model = torch.nn.Sequential(torch.nn.Linear(8, config.get("width", 16)), torch.nn.Dropout(0.1), torch.nn.LazyLinear(1))
    model(table[:1, :8] if len(table) else torch.zeros(1, 8))

    def loss(batch):
        global calls
        calls += model.training
        for what in config.get("loss", []):
            exec(what)
        time.sleep(config.get("pause", 0.0))
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    return Program(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        dataset=torch.utils.data.TensorDataset(table[:, :8], table[:, 8:]),
        batch_size=config.get("batch_size", 8),
        loss=loss,
        evaluate=lambda: {"bias": model[2].bias.item(), "undefined": float("nan")},
    )
"""


@dataclass
class Ended:
    """What a command left: `final` is the JSON line, if the last line of stdout is one."""

    code: int
    out: str
    err: str

    @property
    def final(self) -> dict | None:
        lines = self.out.strip().splitlines()
        return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None


@dataclass
class Desk:
    """A folder with a job, worked on as a user does. `api` is the Prefect server, None for an embedded one."""

    folder: Path
    api: str | None
    job: dict
    running: list[subprocess.Popen] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return max((self.folder / "persistent" / self.job["name"]).glob("r*"))

    def environment(self, **more: str) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "EVERSTEP_"))}
        env |= {"OMP_NUM_THREADS": "1", "PREFECT_HOME": str(self.folder / "prefect"), "PYTHONPATH": str(ROOT)}
        return env | ({"PREFECT_API_URL": self.api} if self.api else {}) | more

    def write(self) -> Path:
        file = self.folder / "job.yaml"
        file.write_text(yaml.safe_dump(self.job))
        return file

    def start(
        self, arguments=None, *, options: tuple[str, ...] = (), module: str = "flows.train", **environment: str
    ) -> subprocess.Popen:
        """Begin `python -m flows.train job.yaml`, or with `arguments` in place of the job, or another `module`."""
        given = (str(self.write()),) if arguments is None else arguments
        command = [sys.executable, *options, "-m", module, *given]
        one = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running.append(one)
        return one

    def wait(self, one: subprocess.Popen, timeout: float = 120) -> Ended:
        out, err = one.communicate(timeout=timeout)
        assert "Traceback" not in out + err, err
        return Ended(one.returncode, out, err)

    def run(self, arguments=None, **more) -> Ended:
        return self.wait(self.start(arguments, **more))

    def plan(self, *faults: dict) -> dict[str, str]:
        """The environment for a plan of faults; see everstep.store.faults."""
        path = self.folder / f"faults-{len(self.running)}.json"
        path.write_text(json.dumps(faults))
        return {"EVERSTEP_FAULTS": str(path)}

    def await_step(self, step: int, one: subprocess.Popen, seconds: float = 60) -> None:
        """Wait until rank 0 has trained `step`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for beat in (self.folder / "nvme").glob("*/r*/heartbeat-0.json"):
                with contextlib.suppress(ValueError):
                    if json.loads(beat.read_bytes())["step"] >= step:
                        return
            assert one.poll() is None, one.communicate()
            time.sleep(0.02)
        raise AssertionError(f"step {step} was not reached in {seconds} s")

    def left(self) -> list[int]:
        """Processes of this desk's runs that still live."""
        records = (self.folder / "persistent").glob("*/r*/run.json")
        tokens = [process.token(RunRecord.model_validate_json(record.read_bytes())) for record in records]
        return [pid for token in tokens for pid in process.marked(token)]

    def await_gone(self, seconds: float = 30) -> None:
        until = time.monotonic() + seconds
        while self.left() and time.monotonic() < until:
            time.sleep(0.05)
        assert not self.left()

    def close(self) -> None:
        for one in self.running:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.communicate()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory) -> Iterator[str]:
    """One embedded Prefect server for every flow run of the session."""
    own = server.start(tmp_path_factory.mktemp("prefect"))
    own.wait_ready(120)
    yield own.url
    own.stop()


@pytest.fixture(scope="session")
def table(tmp_path_factory) -> Path:
    """A folder with `table.npy`, 64 rows of 9 floats."""
    folder = tmp_path_factory.mktemp("table")
    np.save(folder / "table.npy", np.random.Generator(np.random.PCG64(1)).standard_normal((64, 9)).astype(np.float32))
    return folder


def new_desk(folder: Path, api: str | None, table: Path, mlflow: Path | None, name: str = "small", **changes) -> Desk:
    """20 steps in segments of 10, a checkpoint every 5, unless said otherwise."""
    shutil.copytree(table, folder / "data")
    (folder / "mine.py").write_text(PROGRAM)
    if mlflow:
        shutil.copy(mlflow, folder / "mlflow.db")
        verdicts.plant(folder / "data", folder / "nvme")
    job = {
        "name": name,
        "program": "mine.py:build",
        "data": {"source": "data"},
        "steps": 20,
        "segment_steps": 10,
        "checkpoint": {"every_steps": 5},
        "threads": 1,
        "standby": False,
        "tiers": {"local": "nvme", "persistent": "persistent"},
        "tracking": {"uri": "sqlite:///mlflow.db"},
    }
    return Desk(folder, api, job | changes)


@pytest.fixture
def make_desk(tmp_path, request, table):
    """Make desks in folders of their own. `server` is "shared", "own" (embedded), or "none" where none is reached."""
    made: list[Desk] = []

    def make(name: str = "small", *, server: str = "shared", **changes) -> Desk:
        api = request.getfixturevalue("prefect_api") if server == "shared" else None
        mlflow = request.getfixturevalue("mlflow_template") if server != "none" else None
        made.append(new_desk(tmp_path / f"{name}-{len(made)}", api, table, mlflow, name, **changes))
        return made[-1]

    yield make
    for desk in made:
        desk.close()


@pytest.fixture(scope="session")
def completed(tmp_path_factory, prefect_api, table, mlflow_template) -> tuple[Desk, Ended]:
    """An untouched run of 60 steps named `whole`, and what it left on the console. Change nothing in it."""
    folder = tmp_path_factory.mktemp("whole") / "desk"
    desk = new_desk(folder, prefect_api, table, mlflow_template, "whole", steps=60, segment_steps=30)
    try:
        return desk, desk.run()
    finally:
        desk.close()


@pytest.fixture
def ask(prefect_api):
    """Ask the Prefect server: `ask("flow_runs/filter", {...})`."""

    def post(path: str, body: dict):
        request = urllib.request.Request(
            f"{prefect_api}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    return post
