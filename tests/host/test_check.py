"""The lone check, run as a newcomer runs it, on stand-in GPUs and on none."""

import json
import os
import re
import subprocess
import sys

import pytest
from rigs import nvml

from everstep.core.floors import Speed
from everstep.host.floors import load_floors


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


def test_the_active_test_runs_on_the_cpu_where_there_is_no_gpu_and_says_so(tmp_path):
    done = check("--seconds", "0", "--active", "--active-seconds", "12")
    if "no GPU driver here" not in done.stdout:
        pytest.skip("there is a GPU here")
    assert done.returncode in (1, 3), "a CPU that passes makes nobody's GPU healthy"
    title, _, head, *rows = done.stdout.split("\n\n", 1)[1].splitlines()
    assert title.startswith("Active test of the CPU, as there is no GPU, ")
    assert title.endswith(": pass.")
    assert head.split() == ["check", "says", "because"]
    assert any(row.startswith("matmul values, rank 0 (CPU)") and "  pass  " in row for row in rows)
    assert any("speed" in row and "there is no floor for CPUs" in row for row in rows)


def test_an_active_test_that_fails_is_exit_1_and_in_the_json(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"point": "exam.matmul", "do": "errno:5", "rank": 0}]))
    done = check("--seconds", "0", "--active", "--active-seconds", "4", "--json", EVERSTEP_FAULTS=str(plan))
    assert done.returncode == 1
    found = json.loads(done.stdout)["active"]
    assert found["outcome"] == "fail"
    failed = [one for one in found["checks"] if one["outcome"] == "fail"]
    assert [one["name"] for one in failed] == ["matmul values, rank 0 (CPU)"]
    assert failed[0]["figures"]["wrong"] == 1


def test_gpus_that_the_active_test_cannot_reach_are_not_measured(fake):
    done = check("--seconds", "0", "--active", "--active-seconds", "4", "--json", **fake.environment)
    found = json.loads(done.stdout)["active"]
    assert found["outcome"] == "not measured", "the stand-in computes nothing"
    assert {one["figures"]["uuid"] for one in found["checks"] if "uuid" in one["figures"]} == {
        fake.uuid(0),
        fake.uuid(1),
    }
    assert "torch sees no such GPU here" in {one["why"] for one in found["checks"]}


def test_gpus_that_do_not_answer_are_not_tested_nor_is_the_cpu_in_their_place(tmp_path):
    lost = nvml.node(tmp_path, 1)
    lost.lose(0)
    done = check("--active", **lost.environment)
    assert done.returncode == 1
    assert done.stdout.endswith("No GPU answers, so none was put to the test.\n")


def test_floors_of_a_users_own(tmp_path):
    file = tmp_path / "floors.yaml"
    file.write_text("peer_fraction: 0.8\nmodels:\n  - {pattern: H100, memory_gb_per_second: 2000, source: ours}\n")
    floors = load_floors(file)
    assert floors.peer_fraction == 0.8
    assert floors.of("NVIDIA H100 80GB HBM3")[Speed.memory] == 2000
    for text, words in (
        (
            "models: [{pattern: H100, memory_gb: 3}]",
            "models.0.memory_gb is not known here; did you mean memory_gb_per_second?",
        ),
        ("models: [{memory_gb_per_second: 3}]", "models.0.pattern is missing; give a part of the model's name."),
        ("models: [{pattern: '('}]", "models.0.pattern: '(' is no regular expression"),
        ("peer_fraction: 7", "peer_fraction: 7 does not do; input should be less than or equal to 1."),
        ("- 3", "holds no groups; write peer_fraction or models at its top."),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=re.escape(words)):
            load_floors(file)
    done = check("--active", "--floors", str(file))
    assert done.returncode == 2
    assert "--floors: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "wrong", [["--seconds", "-1"], ["--log", "/nowhere/log"], ["--gpus", "many"], ["--active-seconds", "0"]]
)
def test_a_wrong_command_is_answered_in_a_sentence(wrong):
    done = check(*wrong)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
