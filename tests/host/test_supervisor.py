import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from everstep.core.checkpoint import AttemptClaim, RunRecord
from everstep.core.errors import Fenced, StoreUnavailable
from everstep.core.job import Limits, TrainJob
from everstep.core.segment import AttemptEnd, CauseKind, Outcome, SegmentResult
from everstep.host import process
from everstep.host.supervisor import Supervisor
from everstep.host.watch import Watch
from everstep.store import atomic
from everstep.store.layout import RunPlaces

STAND_IN = (sys.executable, "-I", "-S", str(Path(__file__).with_name("stand_in.py")))
HELPER = (sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()")


class Case:
    """A supervised run of stand-ins, and everything that was recorded of it."""

    def __init__(self, tmp_path, **job):
        limits = job.pop("limits", {"start": 20, "save": 20, "wait": 20, "train_floor": 20})
        self.config = job.pop("config", {})
        self.job = TrainJob(
            name="case", program="here:build", config=self.config, data={"source": "."}, limits=Limits(**limits),
            **({"steps": 30, "segment_steps": 10, "grace_seconds": 3, "standby": False} | job),
        )  # fmt: skip
        self.places = RunPlaces(tmp_path / "persistent", tmp_path / "local")
        for folder in ("attempts", "segments", "logs"):
            (self.places.persistent / folder).mkdir(parents=True, exist_ok=True)
        self.run = RunRecord(
            name="case", run="r001-case", fingerprint="", dataset_fingerprint="", created=time.time(),
            program="here:build", seed=0, config={}, threads=1,
        )  # fmt: skip
        self.events = []
        self.times = {}
        self.wish = self.closed = None
        self.shown = []
        watch = Watch(lambda: self.wish, lambda: self.closed, self.show, self.record)
        self.supervisor = Supervisor(self.job, self.places, self.run, tmp_path, watch, command=STAND_IN, copier=HELPER)

    def show(self, beat, lease):
        self.shown.append((beat, lease))

    def record(self, kind, *, step=None, severity=None, text="", **data):
        json.dumps(data)
        self.events.append((kind, step, text, data))
        self.times[kind] = time.monotonic()

    def claim(self, attempt=1, resumed_from=0):
        claim = AttemptClaim(attempt=attempt, resumed_from=resumed_from, host="h", pid=1, boot="b", time=time.time())
        atomic.create(self.places.claim(attempt), claim.to_json().encode())
        return claim

    def start(self, attempt=1, resumed_from=0, last_segment=0):
        self.supervisor.start(self.claim(attempt, resumed_from), None, last_segment)

    def end(self, seconds=20):
        """Run to the attempt's end; its segments and the end."""
        segments = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            news = self.supervisor.run_segment()
            if isinstance(news, AttemptEnd):
                return segments, news
            segments.append(news)
        raise AssertionError("no end")

    def kinds(self):
        return [kind for kind, *_ in self.events]

    def event(self, kind):
        return next(event for event in self.events if event[0] == kind)

    def until_step(self, step):
        """A side thread's view: wait until every rank has told of a step; rank 0's heartbeat."""
        _await(lambda: min(_step(self.places, rank) for rank in range(self.job.ranks)) >= step)
        return json.loads(self.places.heartbeat(0).read_text())


@pytest.fixture
def case(tmp_path):
    made = []

    def make(**job):
        made.append(Case(tmp_path, **job))
        return made[-1]

    yield make
    for one in made:
        one.supervisor.close()
        assert process.marked(one.supervisor.token) == []


def later(action):
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.mark.parametrize("ranks", [1, 2])
def test_segments_come_in_order_and_the_boundary_is_leased_ahead(case, ranks):
    one = case(ranks=ranks)
    one.supervisor.prepare()
    one.start()
    segments, end = one.end()
    assert [(result.segment, result.step) for result in segments] == [(1, 10), (2, 20), (3, 30)]
    assert (end.outcome, end.step, end.saved_step, end.cause.kind) == (Outcome.done, 30, 30, CauseKind.none)
    assert one.supervisor.last_end == end
    assert one.kinds().count("lease.extended") == 2
    assert "attempt.noticed" not in one.kinds()
    assert one.event("attempt.ended")[3]["committed_step"] == 30
    assert one.shown[-1][0].step > 0


def test_a_dead_rank_is_noticed_at_once_and_ends_the_attempt(case):
    one = case(ranks=2, steps=1000, segment_steps=1000, config={"bad": {"die": {"rank": 1, "step": 5}}})
    one.start()
    started = time.monotonic()
    segments, end = one.end()
    assert time.monotonic() - started < 3
    assert segments == []
    assert (end.outcome, end.cause.kind, end.cause.key, end.cause.rank) == (
        Outcome.failed,
        CauseKind.killed,
        "signal 9",
        1,
    )
    assert end.step >= 4
    assert one.event("attempt.noticed")[2] == "rank 1 was killed by signal 9"
    assert process.marked(one.supervisor.token + "/1") == []
    ended = one.event("attempt.ended")[3]
    assert ended["cause"]["kind"] == "killed"
    assert time.time() - 3 < ended["last_seen"] < time.time()


def test_detection_of_a_kill_takes_a_fraction_of_a_second(case):
    one = case(ranks=2, steps=100000, segment_steps=100000)
    one.start()
    killed_at = []

    def kill():
        beat = one.until_step(3)
        killed_at.append(time.monotonic())
        os.kill(beat["pid"], signal.SIGKILL)

    thread = later(kill)
    _, end = one.end()
    assert one.times["attempt.noticed"] - killed_at[0] < 0.5
    assert time.monotonic() - killed_at[0] < 2
    assert end.cause.kind is CauseKind.killed
    thread.join()


def test_a_rank_that_says_why_is_believed(case):
    one = case(ranks=2, config={"step_seconds": 0.05, "bad": {"raise": {"rank": 0, "step": 12}}})
    one.start()
    segments, end = one.end()
    assert [result.segment for result in segments] == [1]
    assert (end.cause.kind, end.cause.message, end.cause.step) == (CauseKind.exception, "rank 0: a bug", 12)
    assert end.saved_step == 10


def test_an_exit_without_a_word_is_named(case):
    one = case(config={"bad": {"exit": {"step": 3}}})
    one.start()
    _, end = one.end()
    assert (end.cause.kind, end.cause.key) == (CauseKind.exit, "code 3")


def test_a_hang_is_judged_by_its_phase(case):
    limits = {"start": 20, "save": 20, "wait": 20, "train_floor": 0.6}
    one = case(ranks=2, config={"bad": {"hang": {"rank": 1, "step": 5}}}, limits=limits)
    one.start()
    started = time.monotonic()
    _, end = one.end()
    assert time.monotonic() - started > 0.6
    assert (end.outcome, end.cause.kind, end.cause.key, end.cause.rank) == (Outcome.failed, CauseKind.hang, "train", 1)
    assert one.event("attempt.noticed")[3] == {"ranks": [1]}


def test_a_slow_save_is_no_hang(case):
    limits = {"start": 20, "save": 20, "wait": 20, "train_floor": 0.3}
    one = case(config={"save_seconds": 0.8}, limits=limits, steps=10)
    one.start()
    segments, end = one.end()
    assert len(segments) == 1
    assert end.outcome is Outcome.done


def test_a_rank_that_never_gives_a_sign_is_a_hang_of_the_start(case):
    one = case(config={"start_seconds": 60}, limits={"start": 0.5})
    one.start()
    _, end = one.end()
    assert (end.cause.kind, end.cause.key) == (CauseKind.hang, "start")


def test_a_heartbeat_that_cannot_be_read_is_unknown_not_failed(case):
    limits = {"start": 20, "save": 20, "wait": 20, "train_floor": 0.2}
    one = case(config={"step_seconds": 0.5}, limits=limits, steps=2, segment_steps=2)
    over = threading.Event()

    def spoil():
        while not over.is_set():
            one.places.heartbeat(0).write_text('{"torn')
            time.sleep(0.005)

    one.start()
    thread = later(spoil)
    _, end = one.end()
    over.set()
    thread.join()
    assert end.outcome is Outcome.done


def test_megabytes_of_output_go_to_the_attempts_log(case):
    one = case(config={"bad": {"noise": {"step": 3, "attempt": 1}}}, steps=4, segment_steps=4)
    one.start()
    _, end = one.end()
    assert end.outcome is Outcome.done
    assert one.places.log(1, 0).stat().st_size >= 10_000_000


def test_a_stop_file_stops_gracefully_without_limit_and_is_removed(case):
    one = case(config={"save_seconds": 1.0, "bad": {"deaf": {}}}, steps=1000, segment_steps=1000, grace_seconds=0.2)
    one.start()
    thread = later(lambda: (one.until_step(5), one.places.stop_file.write_text("anna")))
    _, end = one.end()
    thread.join()
    assert (end.outcome, end.cause.kind) == (Outcome.stopped, CauseKind.stop)
    assert end.saved_step == end.step >= 5
    assert not one.places.stop_file.exists()
    assert one.event("stop.requested")[3] == {"by": "anna"}


def test_a_wish_to_stop_signals_and_waits_for_the_save(case):
    """BC-062: nobody is killed before the one grace value is over."""
    one = case(config={"save_seconds": 1.0}, ranks=2, steps=1000, segment_steps=1000, grace_seconds=10)
    one.start()
    thread = later(lambda: (one.until_step(5), setattr(one, "wish", "cancelled in Prefect")))
    _, end = one.end()
    thread.join()
    assert (end.outcome, end.step) == (Outcome.stopped, end.saved_step)
    assert one.event("attempt.ended")[3]["committed_step"] >= 5


def test_who_does_not_obey_in_time_is_killed_and_the_kept_step_is_said(case):
    one = case(config={"save_seconds": 60}, steps=1000, segment_steps=1000, grace_seconds=0.5)
    one.start(resumed_from=7)
    thread = later(lambda: (one.until_step(9), setattr(one, "wish", "cancelled")))
    started = time.monotonic()
    _, end = one.end()
    thread.join()
    assert time.monotonic() - started < 5
    assert (end.outcome, end.cause.key, end.saved_step) == (Outcome.stopped, "unsaved", 7)
    assert end.cause.message == "cancelled: the attempt did not save in the time it was given; kept step 7"


def test_a_stop_before_the_rank_can_hear_is_a_stop_not_a_death(case):
    """BC-060: signalled while it still starts; it goes at once and leans on the last checkpoint."""
    one = case(steps=1000, segment_steps=1000)
    one.supervisor._command = (
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import sys, time; sys.stdin.readline(); time.sleep(60)",
    )
    one.start(resumed_from=7)
    one.wish = "cancelled"
    started = time.monotonic()
    _, end = one.end()
    assert time.monotonic() - started < 1.5
    assert (end.outcome, end.cause.kind, end.saved_step) == (Outcome.stopped, CauseKind.stop, 7)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_exception_in_the_main_thread_saves_first(case, number):
    """What Prefect does on SIGTERM: it raises in the main thread. More signals during the save change nothing."""

    class TerminationSignal(BaseException):
        pass

    def handler(*_):
        raise TerminationSignal

    one = case(config={"save_seconds": 0.5}, steps=1000, segment_steps=1000)
    one.start()
    before = signal.signal(number, handler)

    def interrupt():
        one.until_step(5)
        os.kill(os.getpid(), number)
        time.sleep(0.2)
        os.kill(os.getpid(), number)

    thread = later(interrupt)
    try:
        with pytest.raises(TerminationSignal):
            one.end()
        assert signal.getsignal(number) is handler
    finally:
        thread.join()
        signal.signal(number, before)
    end = one.supervisor.last_end
    assert (end.outcome, end.step) == (Outcome.stopped, end.saved_step)
    assert one.kinds()[-1] == "attempt.ended"
    assert process.marked(one.supervisor.token + "/1") == []


def test_a_closed_gate_throws_the_attempt_away(case):
    one = case(steps=1000, segment_steps=10)
    one.start()
    first = one.supervisor.run_segment()
    assert isinstance(first, SegmentResult)
    one.closed = first.checkpoint
    end = one.supervisor.run_segment()
    assert (end.outcome, end.cause.kind, end.cause.key) == (Outcome.failed, CauseKind.verification, first.checkpoint)
    assert one.event("gate.closed")[3] == {"reason": first.checkpoint}
    assert one.supervisor.run_segment() == end


def test_a_newer_claim_stops_the_old_supervisor_and_it_starts_no_more(case):
    """BC-181."""
    one = case(steps=1000, segment_steps=1000)
    first = one.claim()
    one.supervisor.start(first, None, 0)
    thread = later(lambda: (one.until_step(3), one.claim(2)))
    _, end = one.end()
    thread.join()
    assert end.cause.kind is CauseKind.fenced
    assert process.marked(one.supervisor.token + "/1") == []
    with pytest.raises(Fenced, match="Attempt 1 is not the newest claim of run r001-case; 2 is"):
        one.supervisor.start(first, None, 0)


def test_an_unreadable_claim_folder_is_no_fence(case, monkeypatch):
    monkeypatch.setattr("everstep.host.attempt.CLAIM_SECONDS", 0.0)
    one = case()
    one.start()
    one.places.claim(1).unlink()
    segments, end = one.end()
    assert (len(segments), end.outcome) == (3, Outcome.done)


def test_without_any_claim_nothing_starts(case):
    one = case()
    claim = AttemptClaim(attempt=1, resumed_from=0, host="h", pid=1, boot="b", time=0)
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        one.supervisor.start(claim, None, 0)


def test_a_restart_takes_the_warm_standby(case):
    one = case(standby=True, steps=1000, segment_steps=10, config={"bad": {"die": {"step": 25, "attempt": 1}}})
    one.start()
    _, end = one.end()
    assert end.cause.kind is CauseKind.killed
    (standby,) = process.marked(one.supervisor.token + "/2")
    one.start(attempt=2, resumed_from=20, last_segment=2)
    result = one.supervisor.run_segment()
    assert (result.attempt, result.segment, result.step) == (2, 3, 30)
    started = [data for kind, _, _, data in one.events if kind == "attempt.started"]
    assert started[1] == {"pids": [standby]}


def test_a_standby_that_died_is_replaced_by_a_cold_start(case):
    one = case(steps=10)
    one.supervisor.prepare()
    (standby,) = process.marked(one.supervisor.token + "/1")
    os.kill(standby, signal.SIGKILL)
    one.supervisor._standby.ranks[0].wait(5)
    one.start()
    segments, end = one.end()
    assert (len(segments), end.outcome) == (1, Outcome.done)


def test_news_of_older_attempts_is_no_news(case):
    one = case(steps=20)
    one.start()
    one.end()
    one.start(attempt=2, resumed_from=0)
    assert not one.places.heartbeat(0).exists() or json.loads(one.places.heartbeat(0).read_text())["attempt"] == 2
    segments, _ = one.end()
    assert [(result.attempt, result.segment) for result in segments] == [(2, 1), (2, 2)]


def test_a_grandchild_that_left_dies_with_the_attempt(case):
    """BC-069."""
    one = case(steps=1000, segment_steps=1000, config={"bad": {"grandchild": {"step": 0}, "die": {"step": 1}}})
    one.start()
    _, end = one.end()
    assert end.cause.kind is CauseKind.killed
    assert process.marked(one.supervisor.token + "/1") == []


FLOW = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_supervisor import Case
case = Case(Path(sys.argv[2]), steps=100000, segment_steps=100000, standby=True, ranks=2, grace_seconds=float(sys.argv[3]),
            config={"bad": {"grandchild": {"step": 1, "rank": 0}, "hang": {"step": 3, "rank": 1}}, "save_seconds": 0.3})
case.start()
print(case.supervisor.token, flush=True)
case.end(600)
"""


@pytest.mark.parametrize("who", ["flow", "ranks and flow"])
def test_nothing_outlives_a_killed_flow(tmp_path, who):
    """BC-069: also not a rank that hangs, nor a grandchild that nobody knows any more."""
    here = str(Path(__file__).parent)
    flow = subprocess.Popen([sys.executable, "-c", FLOW, here, str(tmp_path), "1"], stdout=subprocess.PIPE, text=True)
    token = flow.stdout.readline().strip()
    local = RunPlaces(tmp_path / "persistent", tmp_path / "local")
    _await(lambda: _step(local) >= 5 and len(process.marked(f"{token}/2")) == 2)
    ranks = process.marked(f"{token}/1")
    assert len(ranks) == 3
    for pid in ranks[:2] if who != "flow" else ():
        os.kill(pid, signal.SIGKILL)
    flow.kill()
    flow.wait()
    flow.stdout.close()
    started = time.monotonic()
    _await(lambda: process.marked(token) == [], 10)
    assert time.monotonic() - started < (1.0 + 1.0 + 0.5 + 1.0 if who == "flow" else 2.5)
    saved = json.loads(local.end(1, 0).read_text()) if who == "flow" else None
    assert saved is None or (saved["outcome"], saved["saved_step"]) == ("stopped", saved["step"])


def _step(places, rank=0):
    try:
        return json.loads(places.heartbeat(rank).read_text())["step"]
    except FileNotFoundError:
        return -1


def _await(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def test_leftovers_of_a_former_supervisor_are_ended_first(case, tmp_path):
    one = case(steps=10)
    mark = process.token(one.run) + "/former/1"
    old = process.spawn(["sleep", "600"], process.child_environment((), {}), mark, tmp_path / "old.log")
    one.start()
    try:
        assert old.wait(0) == -signal.SIGKILL
    finally:
        old.close()
    assert one.end()[1].outcome is Outcome.done


def test_ranks_that_do_not_go_after_their_last_word_are_ended(case, monkeypatch):
    monkeypatch.setattr("everstep.host.attempt.LEAVING", 0.3)
    one = case(ranks=2, steps=10, config={"bad": {"linger": {"rank": 1}}})
    one.start()
    segments, end = one.end()
    assert (len(segments), end.outcome, end.step) == (1, Outcome.done, 10)


def test_close_stops_a_running_attempt_gracefully_and_leaves_nothing(case):
    one = case(steps=1000, segment_steps=1000, standby=True)
    one.start()
    while not process.marked(one.supervisor.token + "/2"):
        one.supervisor._attempt.tick()
        one.supervisor._keep_standby(one.supervisor._attempt)
    one.supervisor.close()
    assert one.supervisor.last_end.outcome is Outcome.stopped
    assert process.marked(process.token(one.run)) == []
    assert [path.name for path in (one.places.persistent / "logs").glob("gang-*")] == []


def test_the_copier_is_started_again_and_drained(case):
    one = case(steps=100000, segment_steps=100000)
    one.start()
    first = one.supervisor._copier.pid
    os.kill(first, signal.SIGKILL)
    while one.supervisor._copier.restarts == 0:
        one.supervisor._copier.tend()
        time.sleep(0.01)
    assert one.supervisor._copier.pid not in (None, first)
    assert [kind for kind in one.kinds() if kind.startswith("copier")] == ["copier.died", "copier.restarted"]
    assert one.supervisor.drain(10)


def test_no_fault_of_the_copier_or_of_a_standby_reaches_the_training(case, tmp_path, monkeypatch):
    one = case(standby=True)
    real = process.spawn

    def spawn(argv, env, token, log, **options):
        if token.endswith(("copier", "/2")):
            raise OSError(12, "Cannot allocate memory")
        return real(argv, env, token, log, **options)

    monkeypatch.setattr(process, "spawn", spawn)
    one.start()
    _, end = one.end()
    assert end.outcome is Outcome.done
    assert {"copier.died", "standby.failed"} <= set(one.kinds())
    assert not one.supervisor.drain(0.1)
