"""How a flow run ends: exit codes, the JSON line, and what a signal at any moment leaves."""

import signal
import time
from pathlib import Path

import pytest

from everstep.host import process

STOPPED = 75


def test_completed_and_once_more(completed):
    desk, first = completed
    assert first.code == 0, first.err
    assert first.out.count("\n") == 1, "stdout holds the JSON line and nothing else"
    assert first.final["status"] == "completed"
    assert "completed: step 60, bias" in first.err
    assert first.final["metrics"]["undefined"] == "nan", "JSON has no NaN of its own"
    assert "NaN" not in first.out
    check_that_it_is_not_trained_again(desk, first)
    desk.await_gone()


def check_that_it_is_not_trained_again(desk, first):
    trained = (desk.run_dir / "metrics.jsonl").read_bytes()
    again = desk.run()
    assert again.code == 0
    assert again.out == first.out
    assert again.err.splitlines()[:2] == [
        "whole: starting",
        f"run {first.final['run']} is complete: nothing is left to train",
    ]
    assert f"report:     {first.final['report']}" in again.err, "and where to look"
    assert (desk.run_dir / "metrics.jsonl").read_bytes() == trained
    assert len(list((desk.run_dir / "attempts").glob("*.json"))) == 1


@pytest.mark.sampled
def test_a_run_that_was_stopped_in_three_ways_has_the_weights_of_an_untouched_one(make_desk, completed):
    """Each stop ends with 75 and commits the last finished step; the next flow run goes on from there."""
    desk = make_desk(config={"pause": 0.2}, steps=60, segment_steps=30)
    step = 0
    for way in ("SIGTERM", "SIGINT", "stop file"):
        flow = desk.start()
        desk.await_step(step + 4, flow)
        stop(desk, flow, way)
        ended = desk.wait(flow, timeout=30)
        check_stop(ended, step)
        assert not (desk.run_dir / "stop").exists()
        step = ended.final["step"]
        desk.await_gone()
    (desk.folder / "mine.py").write_text((desk.folder / "mine.py").read_text().replace('config.get("pause", 0.0)', "0"))
    done = desk.run()
    assert done.code == 0, done.err
    assert done.final["weights"] == completed[1].final["weights"]
    assert done.final["restarts"] == 0
    desk.await_gone()


def stop(desk, flow, way):
    if way == "stop file":
        (desk.run_dir / "stop").touch()
    else:
        flow.send_signal(signal.Signals[way])


def check_stop(ended, resumed_from):
    final = ended.final
    assert ended.code == STOPPED, ended.err
    assert final["status"] == "stopped"
    assert final["step"] > resumed_from + 3
    assert final["checkpoint"].endswith(f"step-{final['step']:08d}.a{final['attempts']}"), "and it is durable"
    assert final["resumed_from"] == (resumed_from or None)
    assert f"stopped at step {final['step']}; run the same command to go on" in ended.err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_in_the_first_moments(make_desk, name):
    """Before there is a run: nothing is committed, so the code is 1; one sentence, and nothing is left."""
    desk = make_desk(server="own")
    for delay in (0.0, 0.3, 1.0):
        flow = desk.start()
        await_handler(flow, signal.SIGTERM)
        time.sleep(delay)
        flow.send_signal(signal.Signals[name])
        ended = desk.wait(flow, timeout=20)
        assert ended.code == 1, (delay, ended)
        assert ended.err.splitlines()[-1] == "Stopped on request.", ended.err
        assert not [
            mark for _, mark in process.marks("prefect-server") if mark.split("/")[1].startswith(f"{flow.pid}-")
        ]
    assert not (desk.folder / "persistent").exists()


def await_handler(flow, number):
    """Wait until the process catches the signal, which it does in the first tenth of a second."""
    while flow.poll() is None:
        status = Path(f"/proc/{flow.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught & 1 << (number - 1):
            return
        time.sleep(0.005)


@pytest.mark.sampled
def test_a_signal_while_data_is_staged_and_while_the_model_is_built(make_desk):
    desk = make_desk(config={"build": ["time.sleep(60)"]})
    flow = desk.start(**desk.plan({"point": "stage.mid_file", "do": "sleep:60"}))
    partial = desk.folder / "nvme" / "datasets"
    until = time.monotonic() + 60
    while not list(partial.glob(".partial-*/data/.*.part")) and time.monotonic() < until:
        time.sleep(0.02)
    flow.terminate()
    ended = desk.wait(flow, timeout=20)
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == "Stopped on request."
    assert ended.final is None

    flow = desk.start()
    until = time.monotonic() + 60
    while not list((desk.folder / "nvme").glob("*/r*/heartbeat-0.json")) and time.monotonic() < until:
        time.sleep(0.02)
    flow.terminate()
    ended = desk.wait(flow, timeout=20)
    assert ended.code == 1, "nothing was committed"
    assert ended.final["status"] == "stopped"
    assert ended.final["step"] == 0
    desk.await_gone(5)


@pytest.mark.sampled
def test_changed_identity_under_an_unfinished_name(make_desk):
    desk = make_desk(config={"pause": 0.2})
    flow = desk.start()
    desk.await_step(6, flow)
    flow.terminate()
    stopped = desk.wait(flow)
    assert stopped.code == STOPPED, stopped.err

    desk.job["config"] = {"pause": 0.0}
    ended = desk.run()
    assert ended.code == 2
    line = ended.err.splitlines()[-1]
    assert all(word in line for word in ("name", "'small'", "another config", "put the old config back", "fresh: true"))
    assert ended.final is None

    desk.job["config"] = {"pause": 0.2}
    program = (desk.folder / "mine.py").read_text()
    (desk.folder / "mine.py").write_text(program.replace('"batch_size", 8', '"batch_size", 4'))
    ended = desk.run()
    assert ended.code == 2
    assert "batch_size" in ended.err.splitlines()[-1]
    assert ended.final["step"] == stopped.final["step"], "nothing committed is lost"

    (desk.folder / "mine.py").write_text(program)
    ended = desk.run()
    assert ended.code == 0
    assert ended.final["resumed_from"] == stopped.final["step"]
