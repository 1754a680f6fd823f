"""The lone check, run as a newcomer runs it, on stand-in GPUs and on none."""

import json
import os
import subprocess
import sys

import pytest
from rigs import nvml


def check(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "everstep.host.check", "--seconds", "1", *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture
def fake(tmp_path):
    return nvml.node(tmp_path, 2)


def test_healthy_gpus_are_shown_and_said_to_be_healthy(fake):
    done = check("--json", **fake.environment)
    found = json.loads(done.stdout)
    assert {one["state"] for one in found["gpus"].values()} == {"healthy"}, done.stdout
    assert done.returncode in (0, 1), "the machine itself may have its faults"
    shown = check(**fake.environment).stdout
    assert shown.splitlines()[0].split() == [
        "GPU", "model", "state", "busy", "memory", "temp", "power", "PCIe", "NVLink", "ECC",
    ]  # fmt: skip
    assert "NVIDIA H100 80GB HBM3  healthy" in shown
    assert "What to do: " in shown


def test_a_sick_gpu_is_named_with_what_to_do(fake):
    fake.lose(1)
    done = check(**fake.environment)
    assert done.returncode == 1
    assert "failed" in done.stdout
    assert "GPU 1" in done.stdout or fake.uuid(1) in done.stdout
    assert "What to do: reboot the node." in done.stdout


def test_fewer_gpus_than_promised_and_what_the_log_says(fake, tmp_path):
    found = json.loads(check("--json", "--gpus", "8", **fake.environment).stdout)
    assert found["verdict"]["state"] == "failed"
    assert "2 of 8 GPUs are there" in found["verdict"]["reasons"]
    (tmp_path / "dmesg").write_text(f"[  12.3] NVRM: Xid (PCI:{fake.bus(0)}): 79, pid=1, GPU has fallen off the bus.\n")
    told = json.loads(check("--json", "--log", str(tmp_path / "dmesg"), **fake.environment).stdout)
    assert told["verdict"]["state"] == "failed"
    assert any("Xid 79" in reason for reason in told["verdict"]["reasons"])


def test_without_a_gpu_it_says_so_and_is_no_pass():
    done = check()
    if "no GPU driver here" not in done.stdout:
        pytest.skip("there is a GPU here")
    assert done.returncode in (1, 3)
    assert len(done.stdout.splitlines()) == 1
    assert not done.stderr


@pytest.mark.parametrize("wrong", [["--seconds", "-1"], ["--log", "/nowhere/log"], ["--gpus", "many"]])
def test_a_wrong_command_is_answered_in_a_sentence(wrong):
    done = check(*wrong)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
