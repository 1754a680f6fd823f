"""The gate on GPU health of a run: the real sampler on stand-in GPUs, a run directory, and ranks that say they use a GPU."""

import time

import pytest
from rigs import nvml

from everstep.core import check
from everstep.core.check import GateReport, Outcome
from everstep.core.gating import Door
from everstep.core.health import Action, State
from everstep.core.job import TrainJob
from everstep.core.segment import Heartbeat, Phase
from everstep.host.gpus import GpuSampler
from everstep.host.health_gate import HealthGate
from everstep.store.layout import RunPlaces


class Test:
    """An active test whose answer a test gives."""

    __test__ = False

    def __init__(self, *_):
        self.asked = []
        self.answer = None
        self.closed = self.running = False

    def start(self, devices, *, seconds):
        self.running = True
        self.asked.append((list(devices), seconds))

    def poll(self):
        answer, self.answer = self.answer, None
        self.running = self.running and answer is None
        return answer

    def close(self):
        self.closed = True


class Desk:
    """A gate with all that hangs on it."""

    def __init__(self, folder, environment, device="auto", **health):
        for place in ("persistent/logs", "local"):
            (folder / place).mkdir(parents=True)
        self.events, self.reports, self.test = [], [], Test()
        settings = {"every_seconds": 1.0, "test_seconds": 7.0} | health
        job = TrainJob(name="j", program="m:build", data={"source": "d"}, steps=10, device=device, health=settings)
        self.gate = HealthGate(
            job,
            RunPlaces(folder / "persistent", folder / "local"),
            "t/x",
            lambda kind, **more: self.events.append((kind, more)),
            self.reports.append,
            f"sqlite:///{folder}/ledger.db",
            make=lambda: GpuSampler(environment=environment),
            test=lambda *_: self.test,
        )
        self.beats = []

    def beat(self, *gpus, phase=Phase.train, step=5):
        self.beats = [
            Heartbeat(attempt=1, rank=rank, pid=1, time=0.0, phase=phase, step=step, progress=step, gpu=gpu)
            for rank, gpu in enumerate(gpus)
        ]

    def await_(self, what, seconds=20.0):
        """What is asked at each tick, until it is so."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            word = self.gate.ask(self.beats)
            if found := what(word):
                return found
            time.sleep(0.02)
        raise AssertionError((self.gate.ask(self.beats), self.events))

    def kinds(self):
        return [kind for kind, _ in self.events]

    def looked(self):
        return self.gate.look(5, 1)


@pytest.fixture
def fake(tmp_path):
    node = nvml.node(tmp_path, 3)
    node.train()
    return node


@pytest.fixture
def open_desk(tmp_path, fake):
    made = []

    def make(environment=None, **health):
        made.append(Desk(tmp_path / f"run-{len(made)}", environment or fake.environment, **health))
        made[-1].gate.start()
        return made[-1]

    yield make
    for desk in made:
        desk.gate.close()


def test_healthy_gpus_leave_the_door_open_and_the_passive_gate_passes_in_milliseconds(open_desk, fake):
    desk = open_desk()
    desk.beat(fake.uuid(0), fake.uuid(1))
    desk.await_(lambda _: desk.looked().outcome is Outcome.passed)
    report = desk.looked()
    assert [one.name for one in report.checks] == ["GPU 0", "GPU 1", "node"], "GPU 2 is not used"
    assert report.seconds < 0.05
    assert report.verdict.state is State.healthy
    assert desk.gate.ask(desk.beats).door is Door.open
    assert desk.gate.verdict().state is State.healthy


def test_an_xid_of_a_gpu_in_use_closes_the_door_at_once_and_another_gpus_does_not(open_desk, fake):
    desk = open_desk()
    desk.beat(fake.uuid(0))
    desk.await_(lambda _: desk.looked().outcome is Outcome.passed)
    fake.xid(2, 79)
    fake.xid(0, 79)
    word = desk.await_(lambda word: word if word.door is Door.closed else None)
    assert word.verdict.action is Action.reboot_node
    assert "Xid 79" in word.why
    assert fake.uuid(2) not in word.why
    assert desk.kinds().count("gate.health_closed") == 1
    assert {more["uuid"] for kind, more in desk.events if kind == "everstep.gpu.xid"} == {fake.uuid(0)}
    assert desk.gate.verdict().state is State.failed


def test_a_suspect_gpu_is_tested_when_the_ranks_wait_and_not_before(open_desk, fake):
    desk = open_desk()
    desk.beat(fake.uuid(0), fake.uuid(1))
    fake.set(1, temperature=88)
    desk.await_(lambda word: word.door is Door.hold)
    desk.await_(lambda _: desk.looked().outcome is Outcome.failed)
    assert not desk.test.asked, "training goes on to the segment's end"
    desk.beat(fake.uuid(0), fake.uuid(1), phase=Phase.wait)
    desk.await_(lambda _: desk.test.asked)
    assert desk.test.asked == [([fake.uuid(0), fake.uuid(1)], 7.0)]
    fine = check.passed("matmul", "exact", uuid=fake.uuid(1))
    desk.test.answer = GateReport(gate="active", time=time.time(), checks=(fine,))
    desk.await_(lambda word: word.door is Door.open)
    assert [one.gate for one in desk.reports] == ["active"]
    desk.beat(fake.uuid(0), fake.uuid(1))
    fake.set(1, temperature=89)
    time.sleep(1.5)
    assert desk.gate.ask(desk.beats).door is Door.open, "the same cause is not tested again"


def test_a_gpu_that_fails_the_test_closes_the_door(open_desk, fake):
    desk = open_desk()
    desk.beat(fake.uuid(0), phase=Phase.wait)
    fake.set(0, temperature=88)
    desk.await_(lambda _: desk.test.asked)
    wrong = check.failed("matmul", "exact", "3 of 1,024 values are wrong", uuid=fake.uuid(0), wrong=3)
    desk.test.answer = GateReport(gate="active", time=time.time(), checks=(wrong,))
    word = desk.await_(lambda word: word if word.door is Door.closed else None)
    assert word.verdict.action is Action.drain_replace
    assert desk.gate.verdict(settled=False).state is State.failed


def test_never_tested_is_told_and_goes_on(open_desk, fake):
    desk = open_desk(test="never")
    desk.beat(fake.uuid(0), phase=Phase.wait)
    fake.set(0, temperature=88)
    desk.await_(lambda _: desk.looked().outcome is Outcome.failed)
    assert desk.gate.ask(desk.beats).door is Door.open
    assert not desk.test.asked


def test_a_driver_that_hangs_is_an_alarm_and_the_gpus_are_tested_before_training_goes_on(open_desk, fake):
    """BC-140. Nothing is stopped for silence, whatever the test can see."""
    desk = open_desk()
    desk.beat(fake.uuid(0), phase=Phase.wait)
    desk.await_(lambda _: desk.looked().outcome is Outcome.passed)
    fake.hang("temperature")
    desk.await_(lambda _: desk.looked().checks[0].outcome is Outcome.not_measured)
    assert desk.gate.ask(desk.beats).door is Door.open, "unknown at first"
    desk.await_(lambda _: desk.test.asked, seconds=40)
    unknown = check.not_measured("matmul", "exact", "no answer in 20 s", uuid=fake.uuid(0))
    desk.test.answer = GateReport(gate="active", time=time.time(), checks=(unknown,))
    desk.await_(lambda word: word.door is Door.open)
    assert len(desk.test.asked) == 1
    assert "gate.health_closed" not in desk.kinds()


def test_a_busy_test_is_tried_again_and_in_the_end_inconclusive(open_desk, fake):
    """BC-151: busy is not unhealthy."""
    desk = open_desk()
    desk.beat(fake.uuid(0), phase=Phase.wait)
    fake.set(0, temperature=88)
    busy = check.not_measured("matmul", "exact", "no memory is free", uuid=fake.uuid(0))
    for tries in range(1, 5):
        desk.await_(lambda _, tries=tries: len(desk.test.asked) == tries)
        assert desk.gate.ask(desk.beats).door is Door.hold
        desk.test.answer = GateReport(gate="active", time=time.time(), checks=(busy,))
    desk.await_(lambda word: word.door is Door.open)
    assert "gate.health_closed" not in desk.kinds()
    assert [one.outcome for one in desk.reports] == [Outcome.not_measured] * 4


def test_without_a_gpu_or_a_driver_nothing_is_measured(open_desk, fake, tmp_path):
    desk = open_desk()
    desk.beat("")
    desk.await_(lambda _: "no GPU" in desk.looked().sentence or desk.looked().checks[0].why)
    assert desk.looked().outcome is Outcome.not_measured or desk.looked().checks[0].outcome is Outcome.not_measured
    assert desk.gate.verdict() is None
    bare = open_desk({"LD_LIBRARY_PATH": str(tmp_path)})
    bare.beat("")
    bare.await_(lambda _: bare.looked().checks[0].why != "the gates have not begun")
    assert bare.looked().outcome is Outcome.not_measured
    assert bare.gate.ask(bare.beats).door is Door.open


def test_a_slow_rank_has_its_gpu_tested_before_training_goes_on(open_desk, fake):
    desk = open_desk()
    desk.beat(fake.uuid(0), fake.uuid(1), phase=Phase.wait)
    desk.await_(lambda _: desk.looked().outcome is Outcome.passed)
    slow = check.failed("slow_rank", "no slower than 1/0.7 of its peers", "rank 1 needs 900 ms", rank=1)
    desk.gate.doubt(GateReport(gate="training", time=time.time(), checks=(slow,)))
    word = desk.await_(lambda word: word if word.door is Door.hold else None)
    assert fake.uuid(1) in word.why
    assert fake.uuid(0) not in word.why
    desk.await_(lambda _: desk.test.asked)
    desk.test.answer = GateReport(gate="active", time=time.time(), checks=(check.passed("matmul", "exact"),))
    desk.await_(lambda word: word.door is Door.open)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_the_ranks_own_logs_are_followed_always(open_desk, tmp_path, device):
    desk = open_desk({"LD_LIBRARY_PATH": str(tmp_path)}, device=device)
    log = tmp_path / "run-0" / "persistent" / "logs" / "attempt-000001-rank-0.log"
    log.write_text("begun\n")
    time.sleep(0.5)  # who opens a log later begins at its end
    with log.open("a") as file:
        file.write("RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    desk.await_(lambda _: any("finding" in kind for kind in desk.kinds()))


def test_what_a_log_says_of_the_time_before_the_run_is_no_news_of_it(open_desk, tmp_path):
    desk = open_desk({"LD_LIBRARY_PATH": str(tmp_path)}, device="cpu")
    log = tmp_path / "run-0" / "persistent" / "logs" / "attempt-000001-rank-0.log"
    log.write_text("begun\n")
    time.sleep(0.5)  # who opens a log later begins at its end
    with log.open("a") as file:
        file.write("2020-01-01T00:00:00Z kernel: Out of memory: Killed process 7 (python)\n")
        file.write("RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    desk.await_(lambda _: any("finding" in kind for kind in desk.kinds()))
    assert len([kind for kind in desk.kinds() if "finding" in kind]) == 1


def test_nothing_is_left_when_it_is_closed(open_desk, fake):
    desk = open_desk()
    desk.beat(fake.uuid(0))
    desk.await_(lambda _: desk.looked().outcome is Outcome.passed)
    desk.gate.close()
    assert desk.test.closed
    assert not desk.gate._thread.is_alive()
