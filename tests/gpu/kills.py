"""A training whose rank is killed ends with the same bits as one that was never touched, on the device that is asked for.

By `python -m flows.train`, as users run it: a rank is ended by SIGKILL once it has trained beyond a checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import yaml

from everstep.store import checkpoint

ROOT = Path(__file__).parents[2]

JOBS = {
    "digits": {
        "program": "everstep.programs.digits:build",
        "config": {"width": 128, "dropout": 0.2, "batch_size": 50},
        "steps": 300,
        "kill_at": 130,
    },
    "byte_gpt": {
        "program": "everstep.programs.byte_gpt:build",
        "config": {"layers": 6, "width": 512, "heads": 8, "context": 256, "batch_size": 16, "decay_steps": 200},
        "steps": 200,
        "kill_at": 90,
    },
}
SMALL = {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch_size": 4, "decay_steps": 200}
"""`byte_gpt` where there is no GPU."""


def data(name: str, folder: Path) -> None:
    """Make the program's data, which every machine has."""
    module = {"digits": "everstep.programs.digits", "byte_gpt": "everstep.programs.corpus"}[name]
    subprocess.run([sys.executable, "-m", module, str(folder)], cwd=ROOT, check=True, capture_output=True, timeout=120)


def train(name: str, folder: Path, device: str, until: float, *, kill: bool) -> dict[str, object]:
    """Run the job until it is complete; its last line, the digests of its last checkpoint, and its saves.

    Raises RuntimeError where it fails, TimeoutError where it takes longer than `until` (`time.monotonic`).
    """
    made = dict(JOBS[name])
    kill_at = made.pop("kill_at")
    if device == "cpu" and name == "byte_gpt":
        made["config"] = SMALL
    job = {
        "name": name.replace("_", "-"), **made, "data": {"source": str(folder.parent / f"{name}-data")},
        "standby": device != "cpu", "threads": 1, "segment_steps": made["steps"], "checkpoint": {"every_steps": made["steps"] // 5}, "device": device,
        "tiers": {"local": "nvme", "persistent": "persistent"}, "tracking": {"uri": "sqlite:///mlflow.db"},
    }  # fmt: skip
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "EVERSTEP_"))}
    flow = subprocess.Popen(
        [sys.executable, "-m", "flows.train", "job.yaml"], cwd=folder,
        env=env | {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(folder / "prefect")},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        killed = _kill(flow, folder, kill_at, until) if kill else 0
        out, err = flow.communicate(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{name}: the run has not ended in time") from None
    finally:
        if flow.poll() is None:
            os.killpg(flow.pid, signal.SIGKILL)
            flow.communicate()
    if flow.returncode != 0:
        raise RuntimeError(f"{name}: the run ended with exit code {flow.returncode}: {err.strip().splitlines()[-1:]}")
    final = json.loads(out.splitlines()[-1])
    return {"final": final, "killed_at": killed, "digests": _digests(final), "saves": _saves(final)}


def _kill(flow: subprocess.Popen, folder: Path, step: int, until: float) -> int:
    """End rank 0 by SIGKILL once it has trained so far; at which step it was seen."""
    while time.monotonic() < until and flow.poll() is None:
        for path in folder.glob("nvme/*/r*/heartbeat-0.json"):
            try:
                beat = json.loads(path.read_bytes())
            except ValueError:
                continue
            if beat["step"] >= step:
                os.kill(beat["pid"], signal.SIGKILL)
                return int(beat["step"])
        time.sleep(0.002)
    return 0


def _digests(final: dict) -> dict[str, str]:
    """BLAKE3 of every shard of the last checkpoint: model, optimizer and the generators' states."""
    manifest = checkpoint.read_manifest(checkpoint.local_path(final["checkpoint"]))
    return {one.path: one.blake3 for one in manifest.files if one.path.endswith(".safetensors")}


def _saves(final: dict) -> dict[str, float]:
    """What the saves cost: seconds are medians."""
    rows = [json.loads(line) for line in Path(final["run_dir"], "saves.jsonl").read_text().splitlines()]
    if not rows:
        return {"saves": 0}
    middle = {
        name: median(row[name] for row in rows) for name in ("bytes", "copy_seconds", "wait_seconds", "write_seconds")
    }
    return {"saves": len(rows), "overlapped": sum(row["overlapped"] for row in rows), **middle}
