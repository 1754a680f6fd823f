"""From SIGKILL of a rank to the next trained step, with and without warm spares."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Self

from flow import Flow, Lab, cpu_seconds, memory_mb

STEP = 0.05
SAVE_EVERY = 10
FOREVER = 1_000_000
WARM = 0.75  # seconds for which a warm spare has been idle when it is taken for warm, about
PARTS = ("notice", "end", "decide", "claim", "start", "build", "restore", "step")


@dataclass
class Kills:
    """What the kills of one kind of job have shown. `parts` are the pieces of each recovery, in seconds."""

    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    spare_cpu: list[float] = field(default_factory=list)
    spare_memory: list[dict[str, float]] = field(default_factory=list)

    def __iadd__(self, other: "Kills") -> Self:
        self.seconds += other.seconds
        self.parts += other.parts
        self.spare_cpu += other.spare_cpu
        self.spare_memory += other.spare_memory
        return self

    def part_ms(self, name: str) -> float:
        return 1000 * median(one[name] for one in self.parts)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def kill(lab: Lab, name: str, kills: int, *, standby: bool, ranks: int, dice: random.Random) -> Iterator[Kills]:
    """Kill a rank `kills` times in one run, each time when a checkpoint is due and the spare, if any, is warm."""
    job = {
        "steps": FOREVER,
        "segment_steps": 10 * SAVE_EVERY,
        "checkpoint": {"every_steps": SAVE_EVERY},
        "standby": standby,
        "ranks": ranks,
    }
    with Flow(lab, name, {"pause": STEP}, job) as flow:
        flow.await_steps(2 * SAVE_EVERY, 0.0)
        for _ in range(kills):
            seen = Kills()
            if standby:
                for pid in flow.await_warm_spares(ranks):
                    seen.spare_cpu.append(cpu_seconds(pid))
                    seen.spare_memory.append(memory_mb(pid))
            time.sleep(dice.uniform(0, SAVE_EVERY * STEP))
            offset = time.time() - time.monotonic()
            old = flow.ranks()
            killed = time.monotonic()
            os.kill(old[dice.randrange(ranks)], signal.SIGKILL)
            fresh = flow.await_steps(SAVE_EVERY, killed)
            first = next(one for one in fresh if one.pid not in old.values())
            seen.seconds.append(first.ended - killed)
            seen.parts.append(_parts(flow, killed + offset, first.ended + offset))
            yield seen
        flow.stop()


def _parts(flow: Flow, killed: float, trained: float) -> dict[str, float]:
    """Where the time went, from the run's own events and phases, in seconds; the pieces add up to the whole."""
    events = {row["kind"]: row["time"] for row in flow.rows("events.jsonl")}
    phases = {row["phase"]: row["time"] for row in flow.rows("phases.jsonl")}
    kinds = ("attempt.noticed", "attempt.ended", "decision.made", "attempt.claimed", "attempt.started")
    moments = [killed, *(events[kind] for kind in kinds)]
    moments += [phases["restore"], phases["compile"], trained]
    return dict(zip(PARTS, (b - a for a, b in itertools.pairwise(moments)), strict=True))


def import_torch() -> float:
    """Seconds of a Python process that imports torch and does nothing else."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def spare_effect(lab: Lab, ranks: int) -> dict[str, float]:
    """How much longer the steps of `ranks` ranks that compute, each on a core, take while their spares start than after."""
    job = {"steps": FOREVER, "segment_steps": FOREVER, "checkpoint": {"every_steps": FOREVER}, "ranks": ranks}
    with Flow(lab, f"spare-{ranks}", {"products": 30}, job) as flow:
        first = flow.await_steps(1, 0.0)[0].ended
        flow.await_warm_spares(ranks)
        warm = time.monotonic()
        flow.await_steps(200, warm)
        steps = [one.ended - one.began for one in flow.stamps() if one.rank == 0 and first < one.began < warm - WARM]
        after = [one.ended - one.began for one in flow.stamps() if one.rank == 0 and one.began > warm]
        flow.stop()
    return {"slower_percent": 100 * (mean(steps) / mean(after) - 1), "seconds": warm - WARM - first}
