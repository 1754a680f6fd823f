"""What a monitor costs and how soon it sees something, on 8 stand-in GPUs under the real pynvml.

The stand-in answers in microseconds; a real driver takes longer for each query. `python tests/bench/monitor.py` prints the
figures by itself.
"""

import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from flow import ROOT, cpu_seconds
from rigs import nvml

from everstep.core.monitor import XID, MonitorJob
from everstep.host import monitoring, process
from everstep.host.gpus import GpuSampler
from everstep.sim.nvml import FakeNvml

GPUS = 8
READY_SECONDS = 60.0
CODES = (13, 31, 43, 69)
"""Xids that are told and blame nobody; each on each GPU is a cause of its own."""


def measure(folder: Path, *, quick: bool) -> dict[str, float]:
    """Milliseconds, and percent of one core."""
    folder.mkdir(exist_ok=True)
    fake = nvml.node(folder, GPUS)
    fake.train()
    return {
        "sweep_8gpu_ms": 1000 * median(_sweeps(fake, 10 if quick else 50)),
        "xid_detect_ms": 1000 * median(_detections(fake, folder / "detect", 5 if quick else 20)),
        "monitor_cpu_percent": _cpu(fake, folder / "cpu", 5.0 if quick else 20.0),
    }


def _sweeps(fake: FakeNvml, times: int) -> list[float]:
    with GpuSampler(environment=fake.environment) as sampler:
        sampler.start(READY_SECONDS)
        return [sampler.sweep().seconds for _ in range(times)]


def _detections(fake: FakeNvml, folder: Path, times: int) -> list[float]:
    """Seconds from the driver's event until a listener of the monitor is told, at moments that no sample chooses."""
    told: queue.Queue[tuple[str, float]] = queue.Queue()

    def tell(event):
        told.put((event.kind, time.monotonic()))

    os.environ |= fake.environment
    job = MonitorJob(folder=str(folder), node="bench", kernel_log=False, minutes=(times + 8) / 60)
    monitor = threading.Thread(target=monitoring.watch, args=(job, tell), daemon=True)
    monitor.start()
    _await(told, "everstep.monitor.started")
    dice, found = random.Random(0), []
    for number in range(times):
        time.sleep(dice.uniform(0.2, 0.8))
        began = time.monotonic()
        fake.xid(number % GPUS, CODES[number // GPUS])
        found.append(_await(told, XID) - began)
    monitor.join(READY_SECONDS)
    return found


def _await(told: "queue.Queue[tuple[str, float]]", kind: str) -> float:
    until = time.monotonic() + READY_SECONDS
    while (got := told.get(timeout=max(0.0, until - time.monotonic())))[0] != kind:
        pass
    return got[1]


def _cpu(fake: FakeNvml, folder: Path, seconds: float) -> float:
    """Processor time of a monitor and its probes at a sample a second, all that it writes included."""
    one = subprocess.Popen(
        [sys.executable, "-m", "everstep.host.monitoring", "--folder", str(folder), "--node", "bench",
         "--textfile", str(folder / "x.prom")],
        cwd=ROOT, env=os.environ | fake.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert one.stdout is not None
    try:
        for line in one.stdout:
            if "monitor.started" in line:
                break
        time.sleep(5.0)
        before, began = _spent(one.pid), time.monotonic()
        time.sleep(seconds)
        return 100 * (_spent(one.pid) - before) / (time.monotonic() - began)
    finally:
        one.terminate()
        one.communicate(timeout=READY_SECONDS)


def _spent(pid: int) -> float:
    probes = [process.marked(f"probe/everstep.host.{name}/{pid}") for name in ("gpu_probe", "host_probe")]
    return cpu_seconds(pid) + sum(cpu_seconds(probe) for found in probes for probe in found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for name, value in measure(Path(place), quick="--quick" in sys.argv).items():
            print(f"{name:24} {value:10,.2f}")
