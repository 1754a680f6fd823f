"""The test of a device, on the CPU: what is right passes, one element that is not is found."""

import json
import os
import subprocess
import sys

import pytest
import torch

from everstep.core.exam import Measured, Part, Task
from everstep.core.floors import Speed
from everstep.store import faults
from everstep.trainer import exam, exam_device, examiner

SMALL = Task(seconds=0.2, memory_bytes=8 << 20)


def examined(task=SMALL, begin=None):
    said = []
    exam.examine(task, said.append, begin)
    return said


def found(said):
    return {one["part"]: Measured.model_validate(one) for one in said if "part" in one}


@pytest.fixture
def drill(tmp_path, monkeypatch):
    """Hurt the exam at a named point."""

    def plan(point, **more):
        file = tmp_path / "plan.json"
        file.write_text(json.dumps([{"point": point, "do": "errno:5"} | more]))
        monkeypatch.setattr(faults, "_PLAN", str(file))
        faults._hits.clear()

    return plan


def test_a_healthy_cpu_measures_what_it_can_and_says_what_it_cannot():
    said = examined()
    assert said[0]["ready"]
    assert said[-1] == {"done": True}
    assert [one["at"] for one in said if "at" in one] == [part.value for part in Part]
    parts = found(said)
    assert all(one.wrong == 0 and not one.error for one in parts.values())
    assert set(parts["matmul"].speeds) == {Speed.bf16, Speed.fp32}
    assert parts["memory"].speeds[Speed.memory] > 0
    least = 2 * examiner.SIZES_CPU[0] ** 2
    assert all(parts[name].compared >= least for name in ("matmul", "memory"))
    assert (parts["host_copy"].compared, parts["host_copy"].why) == (0, "a CPU has no way to its host")
    assert parts["all_reduce"].why == "there is one rank only"


@pytest.mark.parametrize("part", ["matmul", "memory"])
def test_one_flipped_element_is_found_with_its_error(drill, part):
    drill(f"exam.{part}")
    parts = found(examined())
    assert parts[part].wrong == 1
    assert parts[part].greatest_error == pytest.approx(4096, abs=512), "as far as its type can tell"
    assert parts[part].compared > 1
    assert sum(one.wrong for one in parts.values()) == 1


@pytest.mark.parametrize("kind", list(examiner.ENTRIES))
def test_the_closed_form_is_the_product(kind):
    left, right, expected = examiner.problem(96, kind, torch.device("cpu"))
    exact = left.double() @ right.double()
    assert torch.equal(exact.to(torch.float32).to(kind), expected)
    assert len(left.unique()) > 20, "its entries are many"
    assert not torch.equal(left, left.T.flip(0))


@pytest.mark.parametrize("kind", list(examiner.ENTRIES))
@pytest.mark.parametrize("n", [4096, max(examiner.SIZES)])
def test_the_largest_products_are_exact_and_finite(kind, n):
    """All that is added up stays below 2**24, where float32 is exact."""
    most = examiner.ENTRIES[kind]
    dice = torch.Generator().manual_seed(n)
    a, b = (torch.randint(-most, most + 1, (n,), generator=dice).double() for _ in range(2))
    greatest = float(torch.fft.ifft(torch.fft.fft(a) * torch.fft.fft(b.flip(0))).real.abs().max())
    assert greatest < 2**24
    assert greatest < torch.finfo(kind).max
    assert float(torch.cumsum(a * b, 0).abs().max()) < 2**24


def test_no_number_is_wrong_and_its_error_none():
    tally = exam_device.Tally()
    tally.compare(torch.tensor([1.0, float("nan"), -0.0]), torch.tensor([1.0, 2.0, 0.0]))
    told = tally.measured(Part.matmul, {})
    assert (told.compared, told.wrong, told.greatest_error) == (3, 1, None)
    json.dumps(told.model_dump(mode="json"), allow_nan=False)


def test_a_cuda_error_is_the_devices_fault_and_ends_the_test(monkeypatch):
    def fails(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    monkeypatch.setattr(examiner, "memory", fails)
    said = examined()
    assert found(said)["memory"].error == "CUDA error: an illegal memory access was encountered"
    assert found(said)["matmul"].compared
    assert set(found(said)) == {"matmul", "memory"}
    assert said[-1] == {"done": True}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "no memory is free on it"),
        (RuntimeError("CUDA error: out of memory"), "no memory is free on it"),
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), "busy or unavailable"),
        (RuntimeError("the weather"), "the weather"),
        (ImportError("No module named 'torch'"), "there is no torch"),
    ],
)
def test_what_is_not_the_devices_fault_is_not_measured(monkeypatch, error, words):
    def fails(*_):
        raise error

    monkeypatch.setattr(examiner, "memory", fails)
    told = found(examined())
    assert words in told["memory"].why
    assert not told["memory"].error
    assert told["memory"].compared == 0
    assert "all_reduce" in told, "the other parts go on"


def test_a_gpu_that_torch_does_not_see_is_not_measured():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    said = examined(SMALL.model_copy(update={"device": "cuda:0"}))
    assert found(said)["matmul"].why == "torch sees no such GPU here"
    assert said[-1] == {"done": True}


def test_it_leaves_when_nobody_lets_it_begin():
    assert [set(one) for one in examined(begin=lambda: "")] == [{"ready", "model"}]


def test_as_a_program_it_answers_on_its_output_and_leaves():
    done = subprocess.run(
        [sys.executable, "-m", "everstep.trainer.exam"],
        input=SMALL.model_dump_json() + "\n", env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert found(said)["matmul"].compared
    assert said[-1] == {"done": True}
