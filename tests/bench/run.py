"""`make bench`: measures on this machine, prints a table, writes `build/bench/results.json` (name -> number).

All figures come from one run. Repetitions of different kinds take turns, so that a busy minute falls on all of them.
`--quick` takes few repetitions, to see that the bench itself works.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"

import agreement
import boundaries
import health
import logs
import monitor
import objects
import recovery
import saving
import staging
from flow import ROOT, Lab
from recovery import Kills

from everstep.host import server

RESULTS = ROOT / "build" / "bench" / "results.json"
STATE_100MB = {"inputs": 2048, "outputs": 4096}
STEP = {"pause": 0.02}
MOST_RANKS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument(
        "--only",
        choices=("boundaries", "agreement", "recovery", "saving", "staging", "objects", "logs", "monitor", "health"),
        help="one part; writes no results",
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwind: all that was started is ended
    parts = {
        "boundaries": _boundaries,
        "agreement": _agreement,
        "recovery": _recovery,
        "saving": _saving,
        "staging": _staging,
        "objects": _objects,
        "logs": _logs,
        "monitor": _monitor,
        "health": _health,
    }
    figures: dict[str, float] = {"cpus": os.cpu_count() or 1, "load_before": os.getloadavg()[0]}
    with _lab() as lab:
        for name, measure in parts.items():
            if arguments.only in (None, name):
                figures |= measure(lab, quick=arguments.quick)
    figures["load_after"] = os.getloadavg()[0]
    _print(figures)
    if arguments.only is None:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"written to {RESULTS}")
    return 0


@contextmanager
def _lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        place = Path(folder)
        _say("starting a Prefect server for all flow runs")
        own = server.start(place)
        try:
            mlflow = place / "mlflow.db"
            code = f"from everstep.host.mlflow_run import connect; connect('sqlite:///{mlflow}').search_experiments()"
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
            own.wait_ready(120)
            yield Lab(place, own.url, mlflow)
        finally:
            own.stop()


def _boundaries(lab: Lab, *, quick: bool) -> dict[str, float]:
    _say("segment boundaries, a state of 3 MB")
    small = boundaries.measure(lab, "boundary", 6 if quick else 40, 25, STEP)
    _say("segment boundaries, a state of 100 MB")
    large = boundaries.measure(lab, "boundary-100mb", 4 if quick else 12, 40, STEP | STATE_100MB)
    _say("the loop around an empty step")
    loop = boundaries.overhead(lab, 10 if quick else 60)
    return {
        "segment_boundary_ms": small["boundary_ms"],
        "segment_boundary_p95_ms": small["boundary_p95_ms"],
        "segment_boundary_slowdown_ms": small["slowdown_ms"],
        "segment_boundary_100mb_ms": large["boundary_ms"],
        "segment_boundary_100mb_p95_ms": large["boundary_p95_ms"],
        "segment_boundary_100mb_slowdown_ms": large["slowdown_ms"],
        "segment_boundary_waits": small["waits"] + large["waits"],
        "ordinary_gap_us": small["gap_us"],
        "loop_overhead_us": loop["overhead_us"],
        "bare_step_us": loop["bare_us"],
    }


def _agreement(lab: Lab, *, quick: bool) -> dict[str, float]:
    _say("agreement of two ranks")
    ways = agreement.measure(lab.folder, 5 if quick else 40)
    return {
        "ranks_agree_us": ways["later"],
        "ranks_agree_at_once_us": ways["at_once"],
        "ranks_agree_broadcast_us": ways["broadcast"],
        "ranks_agree_broadcast_later_us": ways["broadcast_later"],
        "ranks_agree_step_ms": ways["step_ms"],
    }


def _logs(lab: Lab, *, quick: bool) -> dict[str, float]:
    _say("lines of logs")
    return logs.measure(quick=quick)


def _health(lab: Lab, *, quick: bool) -> dict[str, float]:
    _say("the passive gate")
    return health.measure(quick=quick)


def _monitor(lab: Lab, *, quick: bool) -> dict[str, float]:
    _say("a monitor of 8 GPUs")
    return monitor.measure(lab.folder / "monitor", quick=quick)


def _objects(lab: Lab, *, quick: bool) -> dict[str, float]:
    _say("checkpoints of 10 MB to the object tier")
    return {"promote_ms": median(objects.promote_ms(lab.folder / "objects", 3 if quick else 20))}


def _recovery(lab: Lab, *, quick: bool) -> dict[str, float]:
    """Two rounds of runs with a spare, without one, and with two ranks."""
    dice = random.Random(0)
    kinds = {
        "warm": {"kills": 2 if quick else 6, "standby": True, "ranks": 1},
        "cold": {"kills": 1 if quick else 3, "standby": False, "ranks": 1},
        "2ranks": {"kills": 1 if quick else 3, "standby": True, "ranks": 2},
    }
    kills = {kind: Kills() for kind in kinds}
    imports: list[float] = []
    for turn in range(1 if quick else 2):
        for kind, how in kinds.items():
            imports += [recovery.import_torch() for _ in range(2)]
            for seen in recovery.kill(lab, f"{kind}-{turn}", **how, dice=dice):
                kills[kind] += seen
                _say(f"{kind}: a rank was killed; the next step had been trained {seen.seconds[0]:.2f} s later")
    _say("steps while spares start, with cores to spare and without")
    spare, crowded = recovery.spare_effect(lab, 1), recovery.spare_effect(lab, min(os.cpu_count() or 1, MOST_RANKS))
    warm, cold, two = kills["warm"], kills["cold"], kills["2ranks"]
    return {
        "recover_p50_s": median(warm.seconds),
        "recover_p95_s": warm.percentile(0.95),
        "recover_cold_p50_s": median(cold.seconds),
        "recover_2ranks_p50_s": median(two.seconds),
        "python_torch_start_s": median(imports),
        **{f"recover_{part}_ms": warm.part_ms(part) for part in recovery.PARTS},
        **{f"recover_cold_{part}_ms": cold.part_ms(part) for part in recovery.PARTS},
        "recover_kills": len(warm.seconds),
        "spare_start_cpu_s": median(warm.spare_cpu),
        **{f"spare_{kind}_mb": median(one[kind] for one in warm.spare_memory) for kind in ("rss", "pss", "private")},
        "spare_start_s": spare["seconds"],
        "spare_slows_step_percent": spare["slower_percent"],
        "spare_slows_step_on_full_cores_percent": crowded["slower_percent"],
    }


def _staging(_lab: Lab, *, quick: bool) -> dict[str, float]:
    _say("staging from S3 against s5cmd")
    return staging.measure(3 if quick else 7, staging.QUICK if quick else staging.SIZES)


def _saving(lab: Lab, *, quick: bool) -> dict[str, float]:
    _say("saves of states of several sizes against memcpy, torch.save, DCP and safetensors")
    return saving.measure(lab.folder, RESULTS.with_name("saving.svg"), quick=quick)


NOTES = {
    **{
        f"save_stall_{size}_over_memcpy": "training stands still for a save copied at once, over a prefaulted memcpy; aim: 1.2"
        for size in ("64mb", "256mb", "1gb", "4gb")
    },
    "save_stall_1gb_overlapped_over_memcpy": "the same, copied beside the next forward and backward; aim: under 1",
    "save_stall_4gb_overlapped_over_memcpy": "the same, copied beside the next forward and backward; aim: under 1",
    "save_stall_4gb_over_torch_save": "overlapped, over torch.save of the same state; aim: 1/20",
    "throughput_dip": "steps of one computing thread while a checkpoint is written, over those while none is",
    "write_over_disk": "rate of the writer, hashing and committing, over plain writes and a sync of the same bytes",
    "verify_over_blake3": "rate of verifying, over reading and hashing the same files from the disk; aim: 0.8",
    "load_over_torch_load": "time to load, every byte proven, over torch.load(weights_only=True), page cache warm",
    "snapshot_peak_over_state": "memory of all snapshots over the state; at most 2",
    "promote_ms": "local commit of 10 MB to its commit on the object tier: verified, copied, sent, read back",
    "load_before": "processes that wanted a processor; above 0 others were at work",
    "load_after": "the bench itself and others",
    "segment_boundary_ms": "no step runs at a boundary, median; aim: under 10",
    "segment_boundary_slowdown_ms": f"the next {boundaries.AFTER} steps are longer by, together",
    "segment_boundary_waits": "boundaries at which the lease had not been extended in time",
    "ordinary_gap_us": "between the steps of a segment",
    "loop_overhead_us": "trainer's loop less a bare one, empty step, 1 rank",
    "ranks_agree_us": "added to a step of 2 ranks: async, read one step later",
    "ranks_agree_at_once_us": "not used: all-reduce, read at once",
    "ranks_agree_broadcast_us": "not used: rank 0 broadcasts, read at once",
    "ranks_agree_broadcast_later_us": "not used: rank 0 broadcasts, read one step later",
    "recover_p50_s": "SIGKILL of the rank to the end of the next step, spare is warm",
    "recover_cold_p50_s": "the same without a spare",
    "recover_2ranks_p50_s": "SIGKILL of one of two ranks, spares are warm",
    "python_torch_start_s": "python -c 'import torch'",
    "recover_notice_ms": "of that: SIGKILL to noticed",
    "recover_end_ms": "to the attempt's end judged and its processes swept",
    "recover_decide_ms": "to the decision",
    "recover_claim_ms": "to the checkpoint chosen and the next attempt claimed",
    "recover_start_ms": "to the ranks told to go",
    "recover_build_ms": "to the program built (cold: and Python and torch started)",
    "recover_restore_ms": "to the checkpoint loaded and its probe compared",
    "recover_step_ms": "to the end of the first step (50 ms)",
    "spare_private_mb": "memory that a spare takes for itself alone",
    "spare_start_s": "from the first step to a warm spare",
    "spare_slows_step_percent": "a step that computes on one core, while the spare starts",
    "stage_over_s5cmd": "rate of staging from S3, digests proven, over that of s5cmd, which proves none; aim: 1 or more",
    "stage_cpu_over_s5cmd": "processor time of the client, the same way",
    "classify_lines_per_s": "harmless lines of logs, processor time of one core; aim: over 200,000",
    "classify_storm_lines_per_s": "10,000 Xid lines of one cause",
    "classify_fault_lines_per_s": "every line another known fault",
    "gate_ms": "the judgement of a node of 8 GPUs over all samples that are kept",
    "sweep_8gpu_ms": "all readings of 8 stand-in GPUs through pynvml and the probe; a real driver takes longer",
    "xid_detect_ms": "from the driver's event to a listener of the monitor; aim: under 1000",
    "monitor_cpu_percent": "of one core: monitor and probes, 8 GPUs, a sample a second",
    "stage_peak_mb": "memory of the staging process at most; aim: under 300",
    "spare_slows_step_on_full_cores_percent": f"the same, with a rank on each core ({MOST_RANKS} at most)",
}


def _print(figures: dict[str, float]) -> None:
    width = max(map(len, figures))
    print()
    for name, value in figures.items():
        number = f"{value:,.3f}" if name.endswith(("_s", "_s5cmd")) else f"{value:,.1f}"
        print(f"{name:<{width}}  {number:>10} {_unit(name):<3} {NOTES.get(name, '')}".rstrip())


def _unit(name: str) -> str:
    if name.endswith("_per_s"):
        return "/s"
    units = {"us": "µs", "ms": "ms", "s": "s", "mb": "MB", "percent": "%"}
    return units.get(name.rpartition("_")[2], "")


_BEGAN = time.monotonic()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:4.0f} s] {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
