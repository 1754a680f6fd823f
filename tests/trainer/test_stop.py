"""Stops: by signal in every phase, to any rank, by the lease. A safe save within the grace, or leave at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

GRACE = 3.0


def in_time(gang, since):
    assert gang.wait(GRACE + 5) == [0] * len(gang.pids), gang.logs()
    assert time.monotonic() - since < GRACE + 1
    return [gang.end(rank) for rank in range(len(gang.pids))]


@pytest.fixture
def finish(untouched, same):
    """Resume from what a stop left: the run ends with the same bits."""

    def resume(run):
        last = run.committed()[-1] if run.committed() else None
        for key in ("sleep", "build_sleep", "evaluate_sleep"):
            run.config.pop(key, None)
        assert run.run(2, last).wait() == [0], run.gangs[-1].logs()
        assert same(run.weights("step-00000060.a2"), untouched()[2])

    return resume


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_while_training(make_run, finish, number):
    """BC-060: the step in progress is finished and saved."""
    run = make_run(sleep=0.02)
    gang = run.start(grace_seconds=GRACE)
    run.step(13)
    since = time.monotonic()
    gang.kill(number)
    gang.kill(number)
    (end,) = in_time(gang, since)
    assert end.outcome == "stopped"
    assert end.saved_step == end.step >= 13
    assert end.cause.kind == "stop"
    assert signal.Signals(number).name in end.cause.message
    finish(run)


@pytest.mark.parametrize(
    ("config", "phase", "kept"),
    [
        ({"build_sleep": 30.0}, "start", 0),
        ({"sleep": 1.0}, "compile", 1),
        ({"sleep": 30.0}, "compile", 0),
        ({"evaluate_sleep": 30.0}, "eval", 10),
    ],
)
def test_signal_in_other_phases(make_run, finish, config, phase, kept):
    """BC-060: during the build, a slow first step, one that is too slow, and a long evaluation."""
    run = make_run(**config)
    gang = run.start(grace_seconds=GRACE)
    run.phase(phase)
    since = time.monotonic()
    gang.kill(signal.SIGTERM)
    (end,) = in_time(gang, since)
    assert (end.outcome, end.saved_step) == ("stopped", kept)
    assert f"kept step {kept}" in end.cause.message
    finish(run)


def test_signal_while_saving(make_run, finish):
    """BC-060: a save that is being written is committed."""
    run = make_run()
    gang = run.start(grace_seconds=GRACE, faults=[{"point": "save.mid_file", "hit": 2, "do": "sleep:1.0"}])
    run.until(lambda: run.fired(1))
    since = time.monotonic()
    gang.kill(signal.SIGTERM)
    (end,) = in_time(gang, since)
    assert end.outcome in ("stopped", "done")
    assert end.saved_step == end.step >= 20
    finish(run)


def test_signal_in_the_last_step(make_run, finish):
    """BC-060: at step 59 the run may end, or be stopped with a save."""
    run = make_run()
    run.lease(1, 20, 40, 60)
    gang = run.start(grace_seconds=GRACE, faults=[{"point": "train.step_end", "hit": 59, "do": "term"}])
    (end,) = in_time(gang, time.monotonic() + 20)
    assert (end.outcome, end.saved_step) == ("stopped", 59)
    finish(run)


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_one_rank_alone_hears_the_signal(make_run, ranks):
    """BC-064: all ranks save the same step and leave in order, whoever was told."""
    run = make_run(sleep=0.01)
    gang = run.start(ranks=2, grace_seconds=GRACE)
    run.step(12)
    since = time.monotonic()
    for rank in ranks:
        os.kill(gang.pids[rank], signal.SIGTERM)
        time.sleep(0.02)
    ends = in_time(gang, since)
    assert {end.outcome for end in ends} == {"stopped"}
    assert len({end.saved_step for end in ends} | {end.step for end in ends}) == 1
    assert run.has(ends[0].step)


def test_lease_says_stop(make_run, finish):
    run = make_run(sleep=0.005)
    gang = run.start()
    run.step(7)
    run.lease(1, 20, 40, 60, stop=True)
    assert gang.wait() == [0]
    assert gang.end().outcome == "stopped"
    assert gang.end().saved_step == gang.end().step < 60
    finish(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_waits_at_the_end_of_its_lease(make_run, ranks):
    run = make_run()
    gang = run.start(ranks=ranks, lease=(20,))
    run.phase("wait")
    run.until(lambda: run.places.result(1).exists())
    assert run.result(1).step == run.heartbeat()["step"] == 20
    run.lease(1, 20, 40)
    run.until(lambda: run.places.result(2).exists())
    run.phase("wait")
    gang.kill(signal.SIGTERM)
    assert gang.wait() == [0] * ranks
    assert (gang.end().outcome, gang.end().saved_step) == ("stopped", 40)
    assert run.committed()[-1] == "step-00000040.a1"


def test_extended_ahead_it_does_not_wait(make_run):
    run = make_run()
    assert run.run().wait() == [0]
    assert '"wait"' not in run.places.phases.read_text()
    assert [run.result(number).step for number in (1, 2, 3)] == [20, 40, 60]


def test_a_newer_attempt_fences_an_old_one(make_run):
    run = make_run(sleep=0.005)
    gang = run.start()
    run.step(3)
    run.lease(2, 20)
    assert gang.wait() == [1]
    assert gang.end().cause.kind == "fenced"


def test_saves_on_request_and_by_time(make_run):
    run = make_run(sleep=0.01)
    gang = run.start(save_every_steps=None, lease=(60,))
    run.step(5)
    run.lease(1, 60, saves=1)
    run.until(lambda: len(run.committed()) == 1)
    assert gang.wait() == [0]
    timed = make_run("timed", sleep=0.01)
    assert timed.run(ranks=2, save_every_steps=None, save_every_seconds=0.15, lease=(60,)).wait() == [0, 0]
    assert len(timed.committed()) >= 3


def children(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_loader_workers_leave_signals_to_their_rank_and_die_with_it(make_run):
    run = make_run(workers=2, sleep=0.02)
    gang = run.start()
    run.step(3)
    workers = children(gang.pids[0])
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
    run.step(run.heartbeat()["step"] + 10)
    gang.kill()
    gang.wait()
    run.until(lambda: not any(map(is_alive, workers)), 5.0)


def rank_process(log):
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "everstep.trainer"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
        )


def test_the_real_process_as_a_standby(make_run):
    """End of file without a line: leave with 0. A signal while importing: leave at once, with a word if there is a spec."""
    run = make_run()
    logs = [run.folder / "logs" / f"real-{number}.log" for number in range(3)]
    unneeded, early, real = (rank_process(log) for log in logs)
    spec = run.spec(1, parent_pid=os.getpid())
    try:
        early.stdin.write(spec.model_copy(update={"attempt": 9}).model_dump_json().encode() + b"\n")
        early.stdin.close()
        time.sleep(0.7)
        early.send_signal(signal.SIGTERM)
        unneeded.stdin.close()
        run.lease(1, 20, 40, 60)
        assert unneeded.wait(30) == 0
        assert early.wait(30) == 0
        assert b'"stopped"' in run.places.end(9, 0).read_bytes()
        began = time.monotonic()
        real.stdin.write(spec.model_dump_json().encode() + b"\n")
        real.stdin.close()
        assert real.wait(60) == 0, logs[2].read_text()
        assert time.monotonic() - began < 30
        assert run.committed()[-1] == "step-00000060.a1"
    finally:
        for process in (unneeded, early, real):
            process.kill()
            process.wait()
            process.stdin.close()
