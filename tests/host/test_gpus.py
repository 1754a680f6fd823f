"""The sampler of the GPUs against the stand-in NVML: every signal comes and goes, and what hangs harms nobody."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rigs import nvml

from everstep.core import gpu
from everstep.core.gpu import Answer, ClockReason, Driver, GpuSample, Sweep
from everstep.core.health import State
from everstep.host import process
from everstep.host.gpus import GpuSampler
from everstep.sim.nvml import FakeNvml, layout


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    return nvml.node(tmp_path, 4)


@pytest.fixture
def sampler(fake: FakeNvml, tmp_path: Path) -> Iterator[GpuSampler]:
    with GpuSampler(environment=fake.environment, within=5.0, log=tmp_path / "log") as made:
        yield made


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A node and its sampler, for tests that put back what they change."""
    folder = tmp_path_factory.mktemp("standing")
    fake = nvml.node(folder, 2)
    with GpuSampler(environment=fake.environment, within=5.0, log=folder / "log") as sampler:
        ready(sampler)
        yield SimpleNamespace(fake=fake, sampler=sampler)


@pytest.fixture
def node(standing: SimpleNamespace) -> Iterator[SimpleNamespace]:
    yield standing
    standing.fake.set(**layout.VALUES)
    standing.fake.fail(*layout.CALLS, error=0)


def until(sampler: GpuSampler, holds: Callable[[Sweep], bool], seconds: float = 300.0) -> Sweep:
    end = time.monotonic() + seconds
    while not holds(got := sampler.sweep()):
        assert time.monotonic() < end, got
        time.sleep(0.02)
    return got


def ready(sampler: GpuSampler) -> Sweep:
    """The first sweep in which all answer, however busy this machine is."""
    return until(sampler, lambda sweep: bool(sweep.gpus) and set(answers(sweep)) == {Answer.ok})


def answers(sweep: Sweep) -> list[Answer]:
    return [one.answer for one in sweep.gpus]


SIGNALS = {
    "utilisation": ({"utilisation": 97, "memory_utilisation": 60}, lambda g: (g.utilisation_percent, g.memory_busy_percent), (0, 0), (97, 60)),
    "memory": ({"memory_used": 5 << 30}, lambda g: g.memory_used_bytes, 0, 5 << 30),
    "temperature": ({"temperature": 91}, lambda g: g.temperature_c, 34, 91),
    "memory temperature": ({"memory_temperature": 96}, lambda g: g.memory_temperature_c, 41, 96),
    "headroom": ({"headroom": -3}, lambda g: g.headroom_c, 53, -3),
    "power": ({"power": 701_500}, lambda g: g.power_w, 72, 701.5),
    "power limit": ({"power_limit": 350_000}, lambda g: g.power_limit_w, 700, 350),
    "clocks": ({"sm_clock": 210, "memory_clock": 405}, lambda g: (g.sm_clock_mhz, g.memory_clock_mhz), (345, 2619), (210, 405)),
    "reasons": ({"reasons": 0x48}, lambda g: g.reasons, (ClockReason.idle,), (ClockReason.hw_slowdown, ClockReason.hw_thermal)),
    "ECC mode": ({"ecc_mode": 0}, lambda g: (g.ecc_enabled, g.ecc_uncorrected_volatile), (True, 0), (False, None)),
    "ECC pending": ({"ecc_pending": 0}, lambda g: g.ecc_pending, True, False),
    "ECC corrected": (
        {"ecc_corrected_volatile": 7, "ecc_corrected_aggregate": 1 << 40},
        lambda g: (g.ecc_corrected_volatile, g.ecc_corrected_aggregate),
        (0, 0),
        (7, 1 << 40),
    ),
    "ECC uncorrected": (
        {"ecc_uncorrected_volatile": 1, "ecc_uncorrected_aggregate": 4},
        lambda g: (g.ecc_uncorrected_volatile, g.ecc_uncorrected_aggregate),
        (0, 0),
        (1, 4),
    ),
    "SRAM threshold": ({"sram_threshold": 1}, lambda g: g.sram_threshold_exceeded, False, True),
    "remapped": (
        {"remapped_corrected": 2, "remapped_uncorrected": 3},
        lambda g: (g.remapped_corrected, g.remapped_uncorrected),
        (0, 0),
        (2, 3),
    ),
    "remap pending": ({"remap_pending": 1}, lambda g: g.remap_pending, False, True),
    "remap failed": ({"remap_failed": 1}, lambda g: g.remap_failed, False, True),
    "retired": (
        {"retired_single": 60, "retired_double": 3, "retired_pending": 1},
        lambda g: (g.retired_single_bit, g.retired_double_bit, g.retired_pending),
        (0, 0, False),
        (60, 3, True),
    ),
    "replays": ({"replays": 250}, lambda g: g.pcie_replays, 0, 250),
    "PCIe": ({"pcie_width": 8, "pcie_generation": 1}, lambda g: (g.pcie_width, g.pcie_generation), (16, 5), (8, 1)),
    "link state": ({"link_active_5": 0}, lambda g: g.links_down, (), (5,)),
    "link errors": (
        {"link_replay_3": 9, "link_recovery_3": 2, "link_crc_3": 912, "link_effective_3": 1},
        lambda g: g.links[3].model_dump(),
        {"number": 3, "active": True, "replay_errors": 0, "recovery_errors": 0, "crc_errors": 0, "effective_errors": 0},
        {"number": 3, "active": True, "replay_errors": 9, "recovery_errors": 2, "crc_errors": 912, "effective_errors": 1},
    ),
    "recovery action": ({"recovery": 4}, lambda g: g.recovery_action, 0, 4),
    "processes": (
        {"processes": 2, "process_pid_0": 42, "process_memory_0": 1 << 30, "process_pid_1": 43, "process_memory_1": -1},
        lambda g: [(p.pid, p.memory_bytes) for p in g.processes],
        [],
        [(42, 1 << 30), (43, None)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_comes_and_goes_on_its_gpu_alone(node, name):
    raised, read, quiet, loud = SIGNALS[name]
    assert [read(one) for one in node.sampler.sweep().gpus] == [quiet, quiet]
    node.fake.set(1, **raised)
    assert [read(one) for one in node.sampler.sweep().gpus] == [quiet, loud]
    node.fake.set(1, **{key: layout.VALUES[key] for key in raised})
    assert [read(one) for one in node.sampler.sweep().gpus] == [quiet, quiet]


UNSUPPORTED = {
    "utilisation": {"utilisation_percent", "memory_busy_percent"},
    "memory": {"memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes"},
    "temperature": {"temperature_c"},
    "memory_temperature": {"memory_temperature_c"},
    "power": {"power_w", "power_limit_w"},
    "reasons": {"clock_reasons"},
    "ecc": {"ecc_enabled", "ecc_pending", *(f"ecc_{k}_{s}" for k in ("corrected", "uncorrected") for s in ("volatile", "aggregate"))},
    "sram": {"sram_threshold_exceeded"},
    "remap": {"remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed"},
    "retired": {"retired_single_bit", "retired_double_bit", "retired_pending"},
    "replays": {"pcie_replays"},
    "processes": {"processes"},
    "mig": {"mig_enabled", "mig_pending", "instances"},
    "recovery": {"recovery_action"},
    "links": {"links"},
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_a_device_does_not_offer_is_not_measured(node, name):
    """BC-141: each in turn; the others are read, and nothing is blamed."""
    node.fake.fail(name, gpu=0)
    lacking, other = node.sampler.sweep().gpus
    assert set(lacking.not_measured) == UNSUPPORTED[name]
    assert (lacking.answer, lacking.troubles) == (Answer.ok, {})
    assert other.not_measured == ()


def test_device_that_lacks_half_of_the_counters_or_all(fake, sampler):
    """BC-141: unsupported from the start, half and all together: unknown, not bad, and the sampler starts."""
    half = list(layout.SIGNALS)[::2]
    fake.fail(*half, gpu=0)
    fake.fail(*layout.SIGNALS, gpu=1)
    got = sampler.start(300)
    assert answers(got) == [Answer.ok] * 4
    assert [one.troubles for one in got.gpus] == [{}] * 4
    assert set(got.gpus[1].not_measured) == set(gpu.READINGS)
    assert 5 < len(got.gpus[0].not_measured) < len(gpu.READINGS)
    assert got.gpus[2].not_measured == ()
    assert [gpu.answering(one) for one in got.gpus] == [State.healthy] * 4
    assert got.gpus[1].events_heard is None
    assert got.gpus[2].events_heard is True


def test_reading_that_fails_is_told_and_is_no_value(node):
    node.fake.fail("remap", gpu=0, error=999)
    node.fake.set(1, utilisation=250)
    one, other = node.sampler.sweep().gpus
    assert (one.remap_failed, list(one.troubles)) == (None, ["remapped_rows"])
    assert other.utilisation_percent is None
    assert "250" in other.troubles["utilisation"]


def test_older_drivers_are_asked_in_their_way(fake, sampler):
    fake.set(0, link_replay_2=5, temperature=77)
    missing = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons")
    fields = tuple(f"field_{number}" for number in (91, 161, 162, 163, 215, 219))
    fake.fail(*missing, *fields, gpu=0, error=13)
    got = sampler.start(300).gpus[0]
    assert (got.temperature_c, got.clock_reasons) == (77, 1)
    assert (got.memory_total_bytes, got.memory_reserved_bytes) == (80 << 30, None)
    assert len(got.links or ()) == layout.LINKS
    assert (got.links[2].replay_errors, got.links[2].effective_errors) == (5, None)


def test_limits_are_those_that_the_driver_states(fake, sampler):
    fake.set(0, slowdown=84, gpu_max=80, shutdown=90, memory_max=92)
    fake.fail("limits", gpu=1)
    fake.set(2, sm_clock_max=1410, pcie_width_max=8, pcie_generation_max=4)
    got = sampler.start(300).gpus
    assert (got[0].max_limit_c, got[0].slowdown_limit_c, got[0].shutdown_limit_c, got[0].memory_limit_c) == (
        80,
        84,
        90,
        92,
    )
    assert (got[1].slowdown_limit_c, got[1].slowdown_at_c) == (None, 34 + 53 + 2)
    assert (got[2].sm_clock_max_mhz, got[2].pcie_width_max, got[2].pcie_generation_max) == (1410, 8, 4)


def test_gpu_that_hangs_for_ever_harms_nobody(fake):
    """BC-137: GPU 3 of 4 blocks in its ECC query. The others are read, 50 times, and nothing grows."""
    fake.train()
    with GpuSampler(environment=fake.environment, within=2.0, look_anew=3600) as sampler:
        ready(sampler)
        fake.set(3, ecc_corrected_volatile=5)
        sampler.sweep()
        fake.hang("ecc", gpu=3)
        begun = time.monotonic()
        got = sampler.sweep()
        assert time.monotonic() - begun < 2.0 + 0.5 + 2.0
        assert answers(got) == [Answer.ok, Answer.ok, Answer.ok, Answer.unresponsive]
        assert got.gpus[3].why.startswith("ecc: no answer for")
        assert got.gpus[3].temperature_c == 63  # read before the query that hangs
        assert got.gpus[3].uuid == fake.uuid(3)
        pid = sampler._probe.pid
        before = threads(pid)
        for _ in range(50):
            got = sampler.sweep()
            assert answers(got)[:3] == [Answer.ok] * 3
            assert got.gpus[0].utilisation_percent == 98
        assert threads(pid) == before
        assert (got.restarts, got.left_behind) == (0, 0)
        assert gpu.answering(got.gpus[3], failed_after=60) is State.unknown
        assert gpu.answering(got.gpus[3], failed_after=got.gpus[3].silent_s) is State.failed
        assert sampler.last(fake.uuid(3)).ecc_corrected_volatile == 5
        fake.answer()
        got = until(sampler, lambda sweep: answers(sweep) == [Answer.ok] * 4)
        assert got.gpus[3].silent_s == 0
        assert got.restarts == 0


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.mark.parametrize(
    "query", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceRegisterEvents", "nvmlDeviceGetFieldValues"]
)
def test_gpu_that_hangs_from_the_start_is_told_with_its_query(fake, query):
    fake.hang(query, gpu=1)
    with GpuSampler(environment=fake.environment, within=1.0) as sampler:
        got = sampler.start(300)
        assert sorted(answers(got)) == [Answer.ok, Answer.ok, Answer.ok, Answer.unresponsive]
        assert got.gpus[1].answer is Answer.unresponsive
        assert got.gpus[1].uuid == ("unknown-1" if "Handle" in query else fake.uuid(1))
        fake.answer()
        got = until(sampler, lambda sweep: answers(sweep) == [Answer.ok] * 4)
        assert [one.uuid for one in got.gpus] == [fake.uuid(number) for number in range(4)]


def test_hang_that_holds_the_drivers_lock_is_set_aside(fake):
    """All calls of a process wait for the one that hangs: the next probe leaves that GPU alone and reads the others."""
    fake.one_at_a_time()
    with GpuSampler(environment=fake.environment, within=1.0, hold=5.0) as sampler:
        ready(sampler)
        fake.hang("power", gpu=2)
        first = sampler.sweep()
        assert first.gpus[2].answer is Answer.unresponsive
        got = until(sampler, lambda sweep: answers(sweep).count(Answer.ok) == 3)
        assert got.gpus[2].answer is Answer.unresponsive
        assert "asked again in" in got.gpus[2].why
        assert got.gpus[2].uuid == fake.uuid(2)
        assert got.restarts >= 1
        fake.answer()
        until(sampler, lambda sweep: answers(sweep) == [Answer.ok] * 4)


def test_driver_that_does_not_start_is_unknown_then_failed_and_comes_back(fake):
    """BC-140: a hang of the whole driver is told, and ends."""
    fake.system("nvmlInit", seconds=None)
    with GpuSampler(environment=fake.environment, within=0.3, start_seconds=5.0) as sampler:
        assert sampler.sweep().driver in (Driver.starting, Driver.starved)
        got = until(sampler, lambda sweep: sweep.driver is Driver.silent)
        assert "no answer from the driver within 5 s" in got.why
        assert gpu.driving(got) is State.unknown
        assert gpu.driving(got, failed_after=got.silent_s) is State.failed
        got = until(sampler, lambda sweep: sweep.restarts >= 1)
        assert got.left_behind == 0
        fake.system("nvmlInit")
        got = until(sampler, lambda sweep: sweep.driver is Driver.present and answers(sweep) == [Answer.ok] * 4)
        assert got.silent_s == 0


STAND_INS = {
    "ends": "raise SystemExit(3)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "says nothing": "import sys; sys.stdin.read()",
    "says nonsense": "import os, sys; os.write(int(sys.argv[1]), b'nonsense\\n'); sys.stdin.read()",
    "says another kind": "import os, sys; os.write(int(sys.argv[1]), b'[1, 2]\\n'); sys.stdin.read()",
}


@pytest.mark.parametrize("how", STAND_INS)
def test_probe_that_yields_nothing_is_silence_not_health(how, tmp_path):
    """BC-140: missing telemetry is itself told, whichever way the probe fails; it is tried again, later each time."""
    argv = [sys.executable, "-c", STAND_INS[how]]
    with GpuSampler(argv=argv, within=0.2, start_seconds=2.0) as sampler:
        got = until(sampler, lambda sweep: sweep.driver is Driver.silent)
        assert got.why
        assert got.gpus == ()
        assert gpu.driving(got, failed_after=0.0) is State.failed
        before = sampler._probe.starts
        until(sampler, lambda _: sampler._probe.starts > before)


def test_probe_that_gets_no_processor_is_no_sign_of_a_sick_driver(fake):
    """An overloaded machine: the probe is not killed for it, and no GPU is blamed."""
    idle = (  # a session has a share of its own where the kernel groups by sessions (sched(7), autogroup)
        "import contextlib, os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "with contextlib.suppress(OSError): open('/proc/self/autogroup', 'w').write('19')\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); os.execv(sys.executable, sys.argv[1:])"
    )
    argv = [sys.executable, "-c", idle, "-m", "everstep.host.gpu_probe"]
    argv[3:3] = [sys.executable]
    hog = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", hog]) for _ in range(2)]
    try:
        with GpuSampler(environment=fake.environment, argv=argv, within=0.3, start_seconds=0.5) as sampler:
            got = until(sampler, lambda sweep: sweep.driver is Driver.starved)
            for _ in range(5):
                got = sampler.sweep()
                assert got.driver is not Driver.silent
            assert got.restarts == 0
    finally:
        for one in hogs:
            one.kill()
            one.wait()


def test_probe_that_stops_is_replaced_and_its_gpus_are_unknown_meanwhile(fake):
    with GpuSampler(environment=fake.environment, within=1.0) as sampler:
        ready(sampler)
        os.kill(sampler._probe.pid, signal.SIGSTOP)
        got = sampler.sweep()
        assert got.driver is Driver.silent
        assert answers(got) == [Answer.unresponsive] * 4
        assert [gpu.answering(one) for one in got.gpus] == [State.unknown] * 4
        got = until(sampler, lambda sweep: sweep.driver is Driver.present)
        assert (answers(got), got.restarts) == ([Answer.ok] * 4, 1)
        os.kill(sampler._probe.pid, signal.SIGKILL)
        got = sampler.sweep()
        assert (got.driver, "signal 9" in got.why) == (Driver.silent, True)
        until(sampler, lambda sweep: sweep.driver is Driver.present)


def test_probe_that_cannot_be_killed_is_left_behind_counted_and_bounded(fake, tmp_path):
    from rigs import fuse

    why = fuse.why_not()
    if why:
        pytest.skip(why)
    with fuse.mount(tmp_path / "fuse") as tier:
        (tier.source / "device").touch()
        with GpuSampler(environment=fake.environment, within=1.0, look_anew=0.2) as sampler:
            ready(sampler)
            tier.plan(fuse.Fault("hang", "getattr", "device"))
            fake.hang_in_kernel("power", gpu=2, path=tier.path / "device")
            try:
                got = until(sampler, lambda sweep: sweep.left_behind == 1)
                for _ in range(10):
                    got = sampler.sweep()
                    assert got.gpus[2].answer is Answer.unresponsive
                assert got.left_behind == 1
                assert got.restarts <= 2
                fake.answer()
            finally:
                tier.clear()
            until(sampler, lambda sweep: sweep.left_behind == 0 and answers(sweep) == [Answer.ok] * 4)


def test_lost_gpu_is_told_by_name_and_comes_back(fake):
    with GpuSampler(environment=fake.environment, within=5.0, look_anew=0.2) as sampler:
        ready(sampler)
        fake.lose(2)
        got = sampler.sweep()
        assert answers(got) == [Answer.ok, Answer.ok, Answer.lost, Answer.ok]
        assert (got.gpus[2].uuid, got.gpus[2].bus) == (fake.uuid(2), fake.bus(2))
        assert got.gpus[2].utilisation_percent is None
        assert gpu.answering(got.gpus[2]) is State.failed
        got = until(sampler, lambda sweep: sweep.restarts >= 1 and sweep.driver is Driver.present)
        assert (got.gpus[2].uuid, got.gpus[2].answer) == (fake.uuid(2), Answer.lost)  # a new probe cannot ask its name
        fake.lose(2, lost=False)
        until(sampler, lambda sweep: answers(sweep) == [Answer.ok] * 4)


def test_gpu_that_needs_a_reset(fake, sampler):
    ready(sampler)
    fake.set(0, reset_required=1)
    got = sampler.sweep()
    assert (got.gpus[0].answer, gpu.answering(got.gpus[0])) == (Answer.reset_required, State.failed)
    assert answers(got)[1:] == [Answer.ok] * 3


def test_missing_gpu_is_missed_and_the_others_keep_their_names(fake):
    fake.set(3, temperature=77)
    with GpuSampler(environment=fake.environment, within=5.0, look_anew=0.2) as sampler:
        ready(sampler)
        fake.remove(1)
        assert sampler.sweep().gpus[1].answer is Answer.lost
        got = until(sampler, lambda sweep: Answer.missing in answers(sweep))
        by_name = {one.uuid: one for one in got.gpus}
        assert len(by_name) == 4
        gone = by_name[fake.uuid(1)]
        assert (gone.answer, gone.index, gone.bus) == (Answer.missing, None, fake.bus(1))
        assert gpu.answering(gone) is State.unknown
        assert gpu.answering(gone, failed_after=gone.silent_s) is State.failed
        assert (by_name[fake.uuid(3)].index, by_name[fake.uuid(3)].temperature_c) == (2, 77)
        fake.order(3, 1, 0, 2)
        got = until(sampler, lambda sweep: answers(sweep) == [Answer.ok] * 4)
        assert [one.uuid for one in got.gpus] == [fake.uuid(number) for number in (3, 1, 0, 2)]
        assert got.gpus[0].temperature_c == 77


def test_mig_instances_are_read_with_their_gpu(node):
    node.fake.mig(1, (3, 4))
    node.fake.set(1, instance_used_1=2 << 30)
    whole, split = node.sampler.sweep().gpus
    assert (whole.mig_enabled, whole.instances) == (False, ())
    assert (split.mig_enabled, split.utilisation_percent, split.answer) == (True, None, Answer.ok)
    assert [(one.gpu_instance, one.slices) for one in split.instances] == [(1, 3), (2, 4)]
    assert split.instances[1].memory_used_bytes == 2 << 30
    assert all(one.uuid.startswith("MIG-") for one in split.instances)
    node.fake.mig(1, ())
    assert node.sampler.sweep().gpus[1].instances == ()


def test_xid_is_heard_at_once_with_the_name_of_its_gpu(fake, sampler):
    ready(sampler)
    assert sampler.wait(0.05) == ()
    timer = threading.Timer(0.2, fake.xid, (2, 79))
    timer.start()
    (event,) = sampler.wait(30)
    timer.join()
    assert (event.uuid, event.xid, event.count, event.bus) == (fake.uuid(2), 79, 1, fake.bus(2))
    assert event.gpu_instance is None
    fake.xid(1, 94, gpu_instance=3)
    fake.xid(0, 13)
    sampler.sweep()  # what comes during a sweep is kept
    found = {(one.uuid, one.xid, one.gpu_instance) for one in gather(sampler, 2)}
    assert found == {(fake.uuid(1), 94, 3), (fake.uuid(0), 13, None)}


def test_storm_of_xids_takes_one_record(fake, sampler):
    ready(sampler)
    fake.xid(1, 31, times=10_000)
    fake.xid(0, 48)
    found = gather(sampler, 10_001)
    counts: dict[tuple[str, int], int] = {}
    for one in found:
        counts[one.uuid, one.xid] = counts.get((one.uuid, one.xid), 0) + one.count
        assert one.time <= one.last
    assert counts == {(fake.uuid(1), 31): 10_000, (fake.uuid(0), 48): 1}
    assert answers(sampler.sweep()) == [Answer.ok] * 4


def test_storm_that_nobody_reads_does_not_stop_the_sweeps(fake, sampler):
    ready(sampler)
    for _ in range(5):
        fake.xid(1, 31, times=2_000)
        assert answers(sampler.sweep()) == [Answer.ok] * 4
    assert len(sampler._events) == 1
    assert sum(one.count for one in gather(sampler, 10_000)) == 10_000


def gather(sampler: GpuSampler, count: int) -> list[gpu.XidEvent]:
    found: list[gpu.XidEvent] = []
    end = time.monotonic() + 300
    while sum(one.count for one in found) < count:
        assert time.monotonic() < end, found
        found += sampler.wait(1)
    return found


def test_wait_for_events_that_fails_is_taken_up_again(fake, sampler):
    """A GPU that fell off the bus spoils the wait of all, for as long as it lasts."""
    ready(sampler)
    fake.system("nvmlEventSetWait_v2", error=15)
    time.sleep(1.2)  # the wait that is under way ends
    fake.system("nvmlEventSetWait_v2")
    fake.xid(3, 74)
    assert [(one.uuid, one.xid) for one in gather(sampler, 1)] == [(fake.uuid(3), 74)]


def test_no_library_is_a_machine_without_gpus(tmp_path):
    if (
        subprocess.run(
            [sys.executable, "-c", "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"], capture_output=True, check=False
        ).returncode
        == 0
    ):
        pytest.skip("this machine has an NVIDIA driver")
    with GpuSampler() as sampler:
        got = sampler.start(300)
        assert (got.driver, got.gpus) == (Driver.absent, ())
        assert "Not Found" in got.why
        assert gpu.driving(got) is State.unknown
        again = sampler.sweep()
        assert (again.driver, again.restarts) == (Driver.absent, 0)  # and is not asked all the time
        assert sampler.wait(0.01) == ()


def test_driver_that_is_not_loaded_is_refused_and_its_gpus_are_missed(fake):
    with GpuSampler(environment=fake.environment, within=5.0) as sampler:
        ready(sampler)
        fake.unload()
        os.kill(sampler._probe.pid, signal.SIGKILL)
        got = until(sampler, lambda sweep: sweep.driver is Driver.refused)
        assert "Driver Not Loaded" in got.why
        assert answers(got) == [Answer.missing] * 4
        fake.load()
        until(sampler, lambda sweep: answers(sweep) == [Answer.ok] * 4)


def test_node_of_eight_in_one_sweep(tmp_path):
    fake = nvml.node(tmp_path, 8)
    fake.train()
    with GpuSampler(environment=fake.environment, within=5.0) as sampler:
        got = sampler.start(300)
        assert [one.uuid for one in got.gpus] == [fake.uuid(number) for number in range(8)]
        assert [one.index for one in got.gpus] == list(range(8))
        assert all(one.not_measured == () and one.events_heard for one in got.gpus)
        assert Sweep.model_validate_json(got.model_dump_json()) == got
        assert got.driver_version == "580.95.05"


def test_nothing_is_left_behind(fake, tmp_path):
    with GpuSampler(environment=fake.environment) as sampler:
        ready(sampler)
        pid = sampler._probe.pid
    assert not Path(f"/proc/{pid}").exists()
    code = (
        "import os\nfrom everstep.host.gpus import GpuSampler\n"
        "s = GpuSampler()\ns.start()\nprint(s._probe.pid, flush=True)\nos._exit(0)\n"
    )
    env = os.environ | fake.environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    end = time.monotonic() + 20
    while process.marked("probe/everstep.host.gpu_probe") and is_alive(int(done.stdout)):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_sample_of_a_gpu_is_a_record_that_travels(node):
    one = node.sampler.sweep().gpus[0]
    assert GpuSample.model_validate_json(one.model_dump_json()) == one
