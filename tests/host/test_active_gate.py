"""The active gate with real processes on the CPU: what it finds, how long it takes, and that nothing of it is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.core.check import Outcome
from everstep.core.exam import Part
from everstep.host import active_gate, process
from everstep.host.active_gate import ActiveGate

SMALL = {"memory_bytes": 4 << 20}
PLAYER = """
import json, os, sys, time
task = json.loads(sys.stdin.readline())
say = lambda **message: os.write(task["answer_fd"], json.dumps(message).encode() + b"\\n")
ready = lambda: say(ready=True, model="a player")
found = lambda part, **more: say(**{"part": part, "compared": 9, "wrong": 0, "greatest_error": 0.0} | more)
def parts(but=()):
    for part in ("matmul", "memory", "host_copy", "all_reduce"):
        say(at=part)
        if part not in but:
            found(part)
"""


@pytest.fixture
def token(tmp_path):
    name = f"test/{os.getpid()}-{tmp_path.name}"
    yield name
    assert process.marked(name) == [], "something was left"
    process.sweep(name, 0.0)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    def hurt(point, do, rank=1):
        (tmp_path / "plan.json").write_text(json.dumps([{"point": point, "do": do, "rank": rank}]))
        monkeypatch.setenv("EVERSTEP_FAULTS", str(tmp_path / "plan.json"))

    return hurt


@pytest.fixture
def play(tmp_path, token):
    """A gate whose ranks play what `code` says, without PyTorch."""

    def gate(code, start_seconds=30.0):
        command = (sys.executable, "-I", "-S", "-c", PLAYER + code)
        return ActiveGate(token, tmp_path / "gate.log", command=command, start_seconds=start_seconds)

    return gate


def of(report, rank):
    """What each part says of the values of a rank."""
    found = {one.name.partition(" values")[0]: one for one in report.checks if f"values, rank {rank} " in one.name}
    return {Part(name.replace(" ", "_")): one for name, one in found.items()}


def outcomes(report, rank):
    return {part.value: one.outcome for part, one in of(report, rank).items()}


ALL_PASS = {"matmul": Outcome.passed, "memory": Outcome.passed, "host_copy": Outcome.not_measured}


def test_one_healthy_rank_passes(token, tmp_path):
    report = ActiveGate(token, tmp_path / "gate.log").run(["cpu"], seconds=10, **SMALL)
    assert report.gate == "active"
    assert report.outcome is Outcome.passed, report
    assert outcomes(report, 0) == ALL_PASS | {"all_reduce": Outcome.not_measured}
    assert of(report, 0)[Part.all_reduce].why == "there is one rank only"
    speed = next(one for one in report.checks if one.name.startswith("matmul speed"))
    assert (speed.outcome, speed.figures["fp32_tflops"] > 0) == (Outcome.not_measured, True)
    assert "there is no floor for CPUs" in speed.why


def test_two_ranks_are_tested_together_and_a_flipped_element_is_laid_to_its_rank(token, tmp_path, plan):
    plan("exam.all_reduce", "errno:5")
    report = ActiveGate(token, tmp_path / "gate.log").run(["cpu", "cpu"], seconds=30, **SMALL)
    assert outcomes(report, 0) == ALL_PASS | {"all_reduce": Outcome.passed}
    assert outcomes(report, 1) == ALL_PASS | {"all_reduce": Outcome.failed}
    wrong = of(report, 1)[Part.all_reduce]
    assert (wrong.figures["rank"], wrong.figures["wrong"], wrong.figures["greatest_error"]) == (1, 1, 4096.0)
    assert report.outcome is Outcome.failed
    assert report.sentence.startswith("all reduce values, rank 1 (CPU): 1 of ")
    reduce = next(one for one in report.checks if one.name == "all reduce speed, 2 ranks")
    assert reduce.figures["all_reduce_gb_per_second"] > 0


def test_a_rank_that_is_stopped_is_not_measured_in_time_and_nothing_is_left(token, tmp_path, plan):
    plan("exam.memory", "stop")
    with ActiveGate(token, tmp_path / "gate.log") as gate:
        gate.start(["cpu", "cpu"], seconds=3, **SMALL)
        assert gate.running
        went = None
        while (report := gate.poll(0.05)) is None:
            went = went or (time.monotonic() if gate._going else None)
    assert time.monotonic() - went < 3 + active_gate.KILL_SECONDS + 1
    assert not gate.running
    assert outcomes(report, 1)["matmul"] is Outcome.passed, "what it told before counts"
    assert of(report, 1)[Part.memory].why == "no answer within 3 s, in memory"
    assert report.outcome is Outcome.passed
    assert Outcome.failed not in outcomes(report, 0).values()


def test_a_killed_rank_is_told_and_holds_up_nobody(token, tmp_path, plan):
    plan("exam.memory", "kill")
    report = ActiveGate(token, tmp_path / "gate.log").run(["cpu", "cpu"], seconds=20, **SMALL)
    assert of(report, 1)[Part.memory].why == "its process ended by itself (signal 9), in memory"
    assert outcomes(report, 0)["memory"] is Outcome.passed
    assert of(report, 0)[Part.all_reduce].why == "rank 1 ended before"


def test_nothing_outlives_its_parent(token, tmp_path):
    code = f"""
from pathlib import Path
from everstep.host.active_gate import ActiveGate
ActiveGate({token!r}, Path({str(tmp_path / "log")!r})).run(["cpu", "cpu"], seconds=600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        until = time.monotonic() + 60
        while len(process.marked(token)) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(process.marked(token)) == 2
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until = time.monotonic() + 20
    while process.marked(token) and time.monotonic() < until:
        time.sleep(0.02)


def test_all_begin_together_and_what_each_said_is_judged(play):
    report = play('time.sleep(0.3 * task["rank"]); ready(); sys.stdin.readline(); parts(); say(done=True)').run(
        ["cpu"] * 3, seconds=20
    )
    assert report.outcome is Outcome.passed
    assert all(set(outcomes(report, rank).values()) == {Outcome.passed} for rank in range(3))
    told = {one.name: one.why for one in report.checks if "speed" in one.name}
    assert told["memory speed, rank 2 (CPU)"] == "no answer", "it told no speed"
    assert set(told.values()) == {"no answer"}


def test_the_tasks_share_budget_threads_and_memory(play):
    report = play(
        'found("matmul", why="told", error=json.dumps([task["seconds"], task["threads"], task["memory_bytes"],'
        ' os.environ["CUDA_VISIBLE_DEVICES"], task["device"]])); ready(); say(done=True)'
    ).run(["cpu", "GPU-5a"], seconds=20, memory_bytes=77)
    told = {one.figures["rank"]: json.loads(one.why) for one in report.checks if one.why.startswith("[")}
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert told == {0: [4.0, threads, 77, "", "cpu"], 1: [4.0, threads, 77, "GPU-5a", "cuda:0"]}
    assert {one.figures.get("uuid") for one in report.checks if one.figures.get("rank") == 1} == {"GPU-5a"}


def test_one_that_does_not_get_ready_is_left_out_and_the_others_are_tested(play):
    code = 'time.sleep(600) if task["rank"] == 1 else ready(); sys.stdin.readline(); parts(("all_reduce",)); time.sleep(600)'
    report = play(code, start_seconds=1.0).run(["cpu", "cpu"], seconds=200)
    assert report.seconds < 60
    assert {one.why for one in of(report, 1).values()} == {"it was not ready within 1 s"}
    assert outcomes(report, 0)["matmul"] is Outcome.passed
    assert of(report, 0)[Part.all_reduce].why == "rank 1 ended before"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("time.sleep(600)", "it was not ready within 1 s"),
        ("raise SystemExit(7)", "its process ended by itself (status 7)"),
        ("os.kill(os.getpid(), 9)", "its process ended by itself (signal 9)"),
        ("os.write(task['answer_fd'], b'[]\\n{\\n\\xff\\n3\\n{}\\n')", "its process ended by itself (status 0)"),
        ("ready(); say(at='matmul'); sys.stdin.readline(); time.sleep(600)", "no answer within 1 s, in matmul"),
    ],
)
def test_whatever_a_process_does_is_no_fail_and_has_its_reason(play, code, why):
    report = play(code, start_seconds=1.0 if "600" in code else 30.0).run(["cpu"], seconds=1.0)
    assert report.outcome is Outcome.not_measured
    assert {one.why for one in report.checks} == {why}


def test_what_cannot_be_started_is_not_measured(token, tmp_path):
    gate = ActiveGate(token, tmp_path / "no" / "folder" / "gate.log")
    gate.start(["cpu"])
    assert gate.running
    report = gate.poll()
    assert report.outcome is Outcome.not_measured
    assert "the test cannot be started: No such file or directory" in report.checks[0].why
    assert not gate.running
    assert gate.poll() is None


def test_polling_returns_at_once_and_gives_the_report_once(play, token):
    gate = play("ready(); sys.stdin.readline(); time.sleep(600)")
    gate.start(["cpu", "cpu"], seconds=400)
    for _ in range(20):
        began = time.monotonic()
        assert gate.poll() is None
        assert time.monotonic() - began < 2
    with pytest.raises(RuntimeError, match="poll it to its end"):
        gate.start(["cpu"])
    assert len(process.marked(token)) == 2
    gate.close()
    assert process.marked(token) == []
    assert gate.poll() is None
    with pytest.raises(ValueError, match="devices"):
        gate.start([])
    gate.start(["cpu"], seconds=1)
    gate.close()


def test_an_exception_leaves_nothing(play, token):
    gate = play("ready(); sys.stdin.readline(); time.sleep(600)")

    def interrupted():
        with gate:
            gate.start(["cpu", "cpu"], seconds=400)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert process.marked(token) == []


def test_descriptors_are_closed(play):
    before = len(list(Path("/proc/self/fd").iterdir()))
    play("ready(); sys.stdin.readline(); parts(); say(done=True)").run(["cpu"] * 3, seconds=20)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
