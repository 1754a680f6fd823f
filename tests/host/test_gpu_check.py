"""`make gpu-check` without a GPU: it says so and passes nothing; what does not need one is run on the CPU, on a stand-in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs import nvml

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import layouts

from everstep.sim.trace import TraceSampler

ROOT = Path(__file__).parents[2]

PATIENCE = 900.0
"""Two flow runs on a machine that may have much else to do."""


def check(out, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "tests/gpu/check.py", "--out", str(out), *arguments],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=PATIENCE + 60, check=False,
    )  # fmt: skip


def results(out):
    found = json.loads((out / "results.json").read_text())
    return found["outcome"], {one["name"]: one for one in found["checks"]}


def test_without_a_gpu_it_says_so_in_a_sentence_and_nothing_has_passed(tmp_path):
    done = check(tmp_path)
    if "no GPU driver here" not in done.stdout:
        pytest.skip("there is a GPU here")
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "GPU check: not measured, as there is no GPU driver here.\n"
    assert (tmp_path / "report.txt").read_text() == done.stdout
    outcome, checks = results(tmp_path)
    assert outcome == "not measured"
    assert {one["outcome"] for one in checks.values()} == {"not measured"}
    assert set(checks) == {"sweeps", "layouts", "digits killed", "byte_gpt killed", "saves"}


@pytest.mark.sampled
@pytest.mark.timeout(PATIENCE + 120)
def test_on_a_stand_in_and_the_cpu_all_is_measured_but_cuda(tmp_path):
    fake = nvml.node(tmp_path, 2)
    fake.fail("nvmlDeviceGetMarginTemperature")
    done = check(
        tmp_path / "out", "--device", "cpu", "--only", "digits", "--seconds", str(PATIENCE), **fake.environment
    )
    outcome, checks = results(tmp_path / "out")
    assert {name: one["outcome"] for name, one in checks.items()} == {
        "sweeps": "pass", "layouts": "pass", "cuda": "not measured", "digits killed": "pass", "saves": "pass",
    }, done.stdout + done.stderr  # fmt: skip
    assert (outcome, done.returncode) == ("not measured", 3)
    killed = checks["digits killed"]["figures"]
    assert killed["weights_untouched"] == killed["weights_killed"]
    assert (killed["restarts"], killed["steps"]) == (1, 300)
    assert 130 <= killed["killed_at_step"] < 300
    assert checks["saves"]["figures"]["copy_seconds"] > 0
    assert checks["sweeps"]["figures"]["gpus"] == 2
    trace = TraceSampler(tmp_path / "out" / "trace.jsonl")
    assert [len(trace.sweep().gpus) for _ in range(20)] == [2] * 20
    trace.close()


@pytest.mark.sampled
def test_a_driver_that_differs_from_the_stand_in_is_told(tmp_path):
    fake = nvml.node(tmp_path, 1)
    code = f"import json, sys; sys.path.insert(0, {str(ROOT / 'tests' / 'gpu')!r})\n"
    code += f"sys.path.insert(0, {str(ROOT)!r})\nimport layouts\nprint(json.dumps(layouts.look()))"
    ours = nvml.tell(fake, code)
    assert layouts.differences(ours, ours) == []
    assert {one["code"] for one in ours["structures"].values()} == {0}
    fills = [one["written"] for one in ours["structures"].values()]
    assert all(size > 0 for size in fills)
    assert ours["structures"]["nvmlDeviceGetMemoryInfo_v2"]["unknown_version"] == 25
    real = json.loads(json.dumps(ours))
    real["structures"]["nvmlDeviceGetMemoryInfo_v2"]["code"] = 25
    real["structures"]["nvmlDeviceGetPciInfo_v3"]["beyond"] = True
    real["fields"]["193"]["type"] = 1
    told = layouts.differences(real, ours)
    assert len(told) == 3
    assert "does not know version 0x2000028" in told[0]
    assert "beyond" in told[1]
    assert told[2] == "field 193 (shutdown_headroom): the driver's type is 1, the stand-in's 5"
