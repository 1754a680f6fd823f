"""How long the passive gate takes in line: the judgement of a healthy node of eight GPUs that trains.

The window is as full as the policy lets it be. `python tests/bench/health.py` prints the figure by itself.
"""

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from rigs.telemetry import NOW, evidence, series

from everstep.core.health import State
from everstep.core.judgement import judge, window


def measure(*, quick: bool) -> dict[str, float]:
    """Milliseconds, the median of 20 judgements."""
    kept = window(series(700.0, 1.0))
    told = evidence(*kept, gpus_expected=8, training_since=NOW - 700.0)
    spent = []
    for _ in range(5 if quick else 20):
        began = time.perf_counter()
        found = judge(told)
        spent.append((time.perf_counter() - began) * 1e3)
        assert found.verdict.state is State.healthy
    return {"gate_ms": median(spent)}


if __name__ == "__main__":
    for name, value in measure(quick=False).items():
        print(f"{name:12} {value:8.2f}")
