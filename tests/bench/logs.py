"""How many lines of a log are read in a second: harmless ones, a storm of one fault, and a mix of all known faults.

Processor time of one thread, the best of some tries. `python tests/bench/logs.py` prints the figures by itself.
"""

import json
import random
import time
from pathlib import Path

from everstep.core.logs import classify_log

DATA = Path(__file__).parents[1] / "core" / "data"
HARMLESS = (
    "[12345.{i:06d}] docker0: port 3(veth{i}) entered blocking state",
    "2026-01-02T03:04:05.{i:06d}Z INFO step {i} loss 2.31 grad_norm 0.93 tokens/s 120345 memory 71.2 GiB lr 3e-4",
    "Aug 17 06:18:06 node-e systemd[1]: Started Session {i} of user root.",
    "node1:{i}:3905 [4] NCCL INFO Channel 15/0 : 1[c5000] -> 0[29000] via P2P/IPC/read",
    "[ 18.617069] mlx5_core 0000:9c:00.0: Port: 1 Link ACTIVE",
    "epoch {i}: 100%|##########| 500/500 [00:12<00:00, 41.2it/s]",
)


def measure(*, quick: bool) -> dict[str, float]:
    """Lines in a second of one core."""
    rng = random.Random(1)
    count = 20_000 if quick else 300_000
    harmless = [rng.choice(HARMLESS).format(i=i) for i in range(count)]
    storm = [
        f"[{i / 1000:12.6f}] NVRM: Xid (PCI:0000:a1:00): 31, pid={i}, name=python3, MMU Fault" for i in range(10_000)
    ]
    rows = [json.loads(line) for line in (DATA / "more_lines.jsonl").read_text().splitlines()]
    faults = [row["line"] for row in rows if "\n" not in row["line"]] * 20
    return {
        "classify_lines_per_s": _rate(harmless),
        "classify_storm_lines_per_s": _rate(storm),
        "classify_fault_lines_per_s": _rate(faults),
    }


def _rate(lines: list[str]) -> float:
    text = "\n".join(lines)
    spent = []
    for _ in range(5):
        started = time.process_time()
        classify_log(text)
        spent.append(time.process_time() - started)
    return len(lines) / min(spent)


if __name__ == "__main__":
    for name, rate in measure(quick=False).items():
        print(f"{name:28} {rate:12,.0f}")
