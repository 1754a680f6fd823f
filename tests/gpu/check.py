"""`make gpu-check`: what only a machine with a GPU can show, in under five minutes.

A sweep of the real NVML is recorded as a trace; the driver's structures are held against the stand-in's; digits and byte_gpt
are trained on CUDA, once untouched and once with a rank killed, and must end with the same bits; what the saves cost there.

Leaves `results.json`, `report.txt` and `trace.jsonl`. Exit code 0: all of it was measured and is right; 1: something is
not; 3: not measured, as without a GPU: then nothing has passed. `--device cpu` runs the trainings where there is no GPU.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

import kills
import layouts

from everstep.core.check import Check, Outcome, failed, not_measured, passed
from everstep.core.gpu import Answer, Driver
from everstep.host.gpus import GpuSampler
from everstep.sim.nvml import FakeNvml, build
from everstep.sim.trace import Recorder

ROOT = Path(__file__).parents[2]
SECONDS = 285.0
"""For all of it; what has not been reached by then is not measured."""

SWEEPS = 20
EXITS = {Outcome.passed: 0, Outcome.failed: 1, Outcome.not_measured: 3}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT") or ROOT / "build" / "gpu-check")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to train")
    parser.add_argument("--only", choices=tuple(kills.JOBS), help="one training")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it; a slow machine wants more")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    checks = list(_checks(given.out, given.device, given.only, began + given.seconds))
    outcome = _overall(checks)
    results = {
        "schema_version": 1, "outcome": outcome.value, "device": given.device, "time": time.time(),
        "seconds": round(time.monotonic() - began, 1), "checks": [one.model_dump(mode="json") for one in checks],
    }  # fmt: skip
    (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = _text(checks, outcome)
    (given.out / "report.txt").write_text(text)
    sys.stdout.write(text)
    return EXITS[outcome]


def _checks(out: Path, device: str, only: str | None, until: float) -> Iterator[Check]:
    there, why = yield from _sweeps(out / "trace.jsonl")
    yield _layouts() if there else not_measured("layouts", LAYOUTS, why)
    if not there and device == "cuda":
        for name in kills.JOBS:
            yield not_measured(f"{name} killed", KILLED, why)
        yield not_measured("saves", SAVES, why)
        return
    if device == "cpu":
        yield not_measured("cuda", "the trainings run on CUDA", "they ran on the CPU, as was asked for")
    yield from _trainings(device, only, until)


LAYOUTS = "every structure and field type that the sampler asks for is as the stand-in has it"
KILLED = "a rank killed in mid-run costs no bit: the same digests as the untouched run"
SAVES = "saves on this device are timed"
SWEPT = f"{SWEEPS} sweeps in which every GPU answers and no query fails"


def _sweeps(trace: Path) -> Iterator[Check]:
    """Yields the check; returns whether there is a GPU, and why not."""
    trace.unlink(missing_ok=True)
    with GpuSampler() as sampler:
        first = sampler.start()
        if first.driver is not Driver.present or not first.gpus:
            why = first.why or "the driver lists no GPU"
            if first.driver is Driver.absent:
                why = "there is no GPU driver here"
            yield not_measured("sweeps", SWEPT, why)
            return False, why
        found = [first]
        with Recorder(trace) as recorder:
            recorder.sweep(first)
            for _ in range(SWEEPS - 1):
                recorder.events(sampler.wait(0.25))
                found.append(sampler.sweep())
                recorder.sweep(found[-1])
    silent = sorted({one.uuid for sweep in found for one in sweep.gpus if one.answer is not Answer.ok})
    troubles = sorted(
        {f"{name}: {said}" for sweep in found for one in sweep.gpus for name, said in one.troubles.items()}
    )
    figures = {
        "gpus": len(first.gpus), "model": first.gpus[0].model, "driver": first.driver_version,
        "sweep_ms": round(1000 * median(one.seconds for one in found[1:]), 2),
        "first_sweep_ms": round(1000 * first.seconds, 1),
        "events_heard": str(first.gpus[0].events_heard), "not_measured": ", ".join(found[-1].gpus[0].not_measured),
    }  # fmt: skip
    wrong = [f"{uuid} did not answer" for uuid in silent] + troubles
    yield failed("sweeps", SWEPT, "; ".join(wrong), **figures) if wrong else passed("sweeps", SWEPT, **figures)
    return True, ""


def _layouts() -> Check:
    try:
        real = _look({})
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return failed("layouts", LAYOUTS, f"the driver cannot be asked: {error}")
    if why := build.why_not():
        return not_measured("layouts", LAYOUTS, why)
    with tempfile.TemporaryDirectory() as folder:
        stand_in = _look(FakeNvml(Path(folder) / "nvml", 1).environment)
    wrong = layouts.differences(real, stand_in)
    answered = sum(one["code"] == 0 for one in real["structures"].values())
    figures = {"structures": len(real["structures"]), "answered": answered, "fields": len(real["fields"]),
               "answered_fields": sum(one["code"] == 0 for one in real["fields"].values()),
               "real": json.dumps(real), "stand_in": json.dumps(stand_in)}  # fmt: skip
    return failed("layouts", LAYOUTS, "; ".join(wrong), **figures) if wrong else passed("layouts", LAYOUTS, **figures)


def _look(environment: dict[str, str]) -> dict:
    done = subprocess.run(
        [sys.executable, str(Path(layouts.__file__))], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def _trainings(device: str, only: str | None, until: float) -> Iterator[Check]:
    """Each program untouched and killed; then what the saves of the largest one cost."""
    saves: dict[str, float] = {}
    place = Path(tempfile.mkdtemp(prefix="everstep-gpu-check-"))
    try:
        for name in kills.JOBS:
            if only in (None, name):
                check, saves = _training(name, device, place, until)
                yield check
        yield (
            passed("saves", SAVES, device=device, **saves)
            if saves
            else not_measured("saves", SAVES, "no run was whole")
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _training(name: str, device: str, place: Path, until: float) -> tuple[Check, dict[str, float]]:
    label = f"{name} killed"
    began = time.monotonic()
    try:
        kills.data(name, place / f"{name}-data")
        whole = kills.train(name, place / f"{name}-whole", device, until, kill=False)
        killed = kills.train(name, place / f"{name}-killed", device, until, kill=True)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        return not_measured(label, KILLED, str(error)), {}
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return failed(label, KILLED, str(error)), {}
    final = killed["final"]
    figures = {"device": device, "seconds": round(time.monotonic() - began, 1), "killed_at_step": killed["killed_at"],
               "restarts": final["restarts"], "resumed": final["attempts"] > 1, "steps": final["step"],
               "weights_untouched": whole["final"]["weights"], "weights_killed": final["weights"],
               "shards": len(whole["digests"])}  # fmt: skip
    if not final["restarts"]:
        return not_measured(label, KILLED, "the run was over before its rank could be killed", **figures), whole[
            "saves"
        ]
    same = final["weights"] == whole["final"]["weights"] and killed["digests"] == whole["digests"]
    wrong = sorted(path for path, digest in whole["digests"].items() if killed["digests"].get(path) != digest)
    if not same:
        return failed(label, KILLED, f"other bits in {', '.join(wrong) or 'the weights'}", **figures), whole["saves"]
    return passed(label, KILLED, **figures), whole["saves"]


def _overall(checks: list[Check]) -> Outcome:
    """Failed if any has; passed only if all were measured."""
    found = {one.outcome for one in checks}
    if Outcome.failed in found:
        return Outcome.failed
    return Outcome.not_measured if Outcome.not_measured in found else Outcome.passed


def _text(checks: list[Check], outcome: Outcome) -> str:
    """One sentence where nothing could be measured, else a line for each check."""
    whys = {one.why for one in checks}
    if all(one.outcome is Outcome.not_measured for one in checks) and len(whys) == 1:
        return f"GPU check: not measured, as {whys.pop()}.\n"
    lines = [f"GPU check: {outcome.value}"]
    for one in checks:
        figures = ", ".join(f"{name} {value}" for name, value in one.figures.items() if len(str(value)) < 80)
        lines.append(f"  {one.name}: {one.outcome.value}" + "".join(f"; {part}" for part in (one.why, figures) if part))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
