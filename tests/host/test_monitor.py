"""A monitor whose time is passed in: each signal is raised and cleared, told once, and a healthy hour blames nobody."""

import math
import random

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rigs import telemetry as rig
from rigs.stage import Stage

from everstep.core.gpu import Answer, Driver, GpuSample, NvLink, XidEvent
from everstep.core.health import Action, Finding, Severity, State
from everstep.core.host import Clock, IbPort, Memory, Mount, Nic, Pressure, StuckTask
from everstep.core.ledger import Event
from everstep.host import monitor_memory
from everstep.host.monitor_watch import Training

SETTLE = 11.0
HOUR = 3600.0
ONE = ("GPU-0", "GPU-1")


def metrics(stage):
    families = text_string_to_metric_families(stage.exporter.text().decode())
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def links(number=3, **values):
    """All links of an H100, one of which reads otherwise."""
    healthy = {"active": True, "replay_errors": 0, "recovery_errors": 0, "crc_errors": 0}
    return tuple(NvLink(number=at, **healthy | (values if at == number else {})) for at in range(18))


def mount(**values):
    return (
        Mount(**{"path": "/data", "kind": "ext4", "read_only": False, "total_bytes": 1000, "free_bytes": 600} | values),
    )


def port(**values):
    return (
        IbPort(
            **{"device": "mlx5_0", "port": 1, "state": "ACTIVE", "physical": "LinkUp", "layer": "InfiniBand"} | values
        ),
    )


def growing(name, per_second):
    """A counter of a port that grows."""
    return lambda wall: port(counters={name: int((wall - rig.NOW) * per_second)})


# readings of GPU 1, the state that they bring, and a word of the reason; `period` where it takes minutes
GPU_SIGNALS = {
    "hot": ({"temperature_c": 86.0}, "suspect", "86 C: the alarm is at 85 C"),
    "throttled by heat": ({"temperature_c": 84.0}, "note", "clocks are held back from about 83 C"),
    "warm": ({"temperature_c": 81.0}, "note", "81 C"),
    "at its driver's limit": ({"temperature_c": 79.0, "slowdown_limit_c": 78.0}, "suspect", "alarm is at 78 C"),
    "about to shut down": ({"temperature_c": 92.0}, "failed", "shuts it down"),
    "hot memory": ({"memory_temperature_c": 96.0}, "suspect", "memory 96 C"),
    "no headroom": ({"headroom_c": -3.0, "slowdown_headroom_c": -2.0}, "suspect", "of headroom"),
    "uncorrectable errors": ({"ecc_uncorrected_volatile": 1}, "failed", "uncorrectable memory errors"),
    "too many corrected errors": ({"ecc_corrected_volatile": 30_000_000}, "suspect", "corrected memory errors"),
    "SRAM threshold": ({"sram_threshold_exceeded": True}, "failed", "threshold of SRAM errors"),
    "remap pending": ({"remap_pending": True}, "suspect", "waits to be remapped"),
    "remap failed": ({"remap_failed": True}, "failed", "could not be remapped"),
    "no spare rows": ({"remapped_uncorrected": 513}, "failed", "513 memory rows"),
    "retired pages": ({"retired_single_bit": 11}, "suspect", "11 memory pages"),
    "ECC off": ({"ecc_enabled": False}, "suspect", "is off"),
    "MIG pending": ({"mig_pending": True}, "suspect", "MIG mode changes"),
    "lanes": ({"pcie_width": 8}, "suspect", "8 of 16 lanes"),
    "generation": ({"pcie_generation": 1}, "suspect", "generation 1 of 5 under load"),
    "link down": ({"links": links(active=False)}, "failed", "NVLink 3 is down"),
    "link recovery": ({"links": links(recovery_errors=1)}, "suspect", "NVLink 3 had to recover"),
    "link errors": ({"links": links(crc_errors=100_000)}, "suspect", "errors a minute"),
    "replays": ({"pcie_replays": 100_000}, "suspect", "PCIe repeats"),
    "advice": ({"recovery_action": 2}, "failed", "has to be rebooted"),
    "clocks held back": ({"clock_reasons": 0x8}, "note", "held back: hw slowdown"),
    "a reading that fails": ({"troubles": {"ecc": "Unknown Error"}}, "suspect", "ecc cannot be read"),
    "lost": ({"answer": Answer.lost}, "failed", "fell off the bus"),
    "to be reset": ({"answer": Answer.reset_required}, "failed", "has to be reset"),
    "missing": ({"answer": Answer.missing, "index": None, "silent_s": 61.0}, "failed", "is missing"),
    "silent": ({"answer": Answer.unresponsive, "silent_s": 2.0, "why": "ecc"}, "unknown", "does not answer"),
    "memory drop": ({"memory_used_bytes": 1 << 30}, "suspect", "memory in use fell"),
}  # fmt: skip


@pytest.mark.parametrize("name", GPU_SIGNALS)
def test_a_signal_of_a_gpu_is_told_once_and_its_end_when_it_has_settled(name):
    raised, state, why = GPU_SIGNALS[name]
    stage = Stage(period=5.0)
    stage.watch.training = Training(computes=True, since=rig.NOW, job="gpt")
    stage.run(70)
    assert stage.told == []
    stage.gpus[1] = raised
    stage.run(30)
    of_gpu = [one for one in stage.told if one.data.get("uuid") == "GPU-1"]
    assert [one.kind for one in of_gpu] == [f"everstep.gpu.{state}"]
    assert why in of_gpu[0].text
    assert of_gpu[0].text.startswith("GPU")
    assert not [one for one in stage.told if one.data.get("uuid") == "GPU-0"]
    on_node = [one.kind for one in stage.told if not one.data.get("uuid")]
    assert on_node == ([] if state == "note" else [f"everstep.node.{state}"])
    if state != "note":
        assert metrics(stage)["everstep_gpu_state", ("state", state), ("uuid", "GPU-1")] == 1
    before = len(stage.told)
    stage.gpus[1] = {}
    stage.run(900, lambda: "node.healthy" in stage.kinds(before))
    stage.run(30)
    assert stage.kinds(before) == ([] if state == "note" else ["gpu.healthy", "node.healthy"])
    assert metrics(stage)["everstep_gpu_state", ("state", "healthy"), ("uuid", "GPU-1")] == 1


LASTING = {
    "idle": ({"utilisation_percent": 0.0}, 120, "has computed nothing for 1"),
    "low": ({"utilisation_percent": 60.0}, 600, "less than 80 % of the time"),
    "far below its peers": ({"utilisation_percent": 30.0}, 50, "its peers for 97 %"),
    "clocks held back": ({"clock_reasons": 0x40}, 600, "held back for 10 minutes"),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_signal_that_lasts_is_judged_by_its_duration_alone(name):
    raised, seconds, why = LASTING[name]
    stage = Stage(gpus=1 if name in ("idle", "low") else 3, period=5.0)
    stage.watch.training = Training(computes=True, since=rig.NOW, job="gpt")
    stage.run(100)
    stage.gpus[0] = raised
    began = stage.now
    assert not stage.run(seconds - 15, lambda: "gpu.suspect" in stage.kinds())
    assert stage.run(100, lambda: "gpu.suspect" in stage.kinds())
    assert stage.now - began >= seconds - 6
    assert why in next(one.text for one in stage.told if one.kind == "everstep.gpu.suspect")
    stage.gpus[0] = {}
    assert stage.run(HOUR, lambda: "gpu.healthy" in stage.kinds())


def test_a_gpu_that_idles_is_no_fault_without_a_training_or_while_one_begins():
    stage = Stage(period=5.0)
    stage.gpus = [{"utilisation_percent": 0.0}, {"utilisation_percent": 0.0}]
    stage.run(HOUR / 2)
    assert stage.told == []
    stage.watch.training = Training(computes=True, since=stage.wall(), job="gpt")
    stage.run(100)
    assert stage.told == []
    assert stage.run(60, lambda: "gpu.suspect" in stage.kinds())
    stage.watch.silent_s = 61.0
    assert stage.run(60, lambda: "gpu.healthy" in stage.kinds()), "heartbeats that nobody can read accuse nobody"


NODE_SIGNALS = {
    "full disk": ({"mounts": mount(free_bytes=40)}, "full to 96 %"),
    "no files left": ({"mounts": mount(files_total=1000, files_free=5)}, "5 files left"),
    "read-only": ({"mounts": mount(read_only=True)}, "has become read-only"),
    "mount that hangs": ({"mounts": mount(looked="hung", why="statfs: no answer for 3.0 s")}, "no answer"),
    "memory pressure": ({"memory": Memory(oom_kills=0, pressure=Pressure(some_10s=50.0, some_60s=50.0, full_10s=30.0, full_60s=30.0))}, "waited for memory"),
    "no memory": ({"memory": Memory(oom_kills=0, total_bytes=1000, available_bytes=5)}, "memory"),
    "stuck task": ({"stuck": (StuckTask(pid=7, task=7, name="python", kernel=False, seconds=301.0),)}, "python"),
    "clock": ({"clock": Clock(source="chrony", synchronised=True, offset_s=0.6)}, "clock"),
    "cable": ({"nics": (Nic(name="eth0", up=True, carrier=False, carrier_changes=4),)}, "eth0"),
    "symbol errors": ({"ports": growing("symbol_error", 20)}, "symbol_error"),
    "link downed": ({"ports": growing("link_downed", 0.1)}, "link_downed"),
}  # fmt: skip
USUAL = {
    "nics": (Nic(name="eth0", up=True, carrier=True, carrier_changes=1),),
    "ports": lambda wall: port(counters={"symbol_error": 0, "link_downed": 0}),
    "stuck": (),
    "clock": Clock(source="chrony", synchronised=True, offset_s=0.0001),
}


@pytest.mark.parametrize("name", NODE_SIGNALS)
def test_a_signal_of_the_node_is_told_once_and_its_end(name):
    raised, why = NODE_SIGNALS[name]
    stage = Stage(gpus=1, period=5.0)
    stage.node = dict(USUAL)
    stage.run(60)
    assert stage.told == []
    stage.node = USUAL | raised
    assert stage.run(90, lambda: bool(stage.told)), name
    stage.run(40)
    (one,) = stage.told
    assert one.kind in ("everstep.node.suspect", "everstep.node.failed")
    assert why in one.text
    stage.node = dict(USUAL)
    stage.run(2000, lambda: len(stage.told) > 1)
    assert stage.kinds() == [one.kind.removeprefix("everstep."), "node.healthy"]


def test_a_port_that_is_down_has_failed_after_four_minutes():
    stage = Stage(gpus=1, period=5.0)
    stage.node = dict(USUAL)
    stage.run(60)
    stage.node = USUAL | {"ports": port(state="DOWN", physical="Polling")}
    stage.run(220)
    assert stage.kinds() == ["node.suspect"]
    assert "mlx5_0:1 is DOWN" in stage.told[0].text
    assert stage.run(60, lambda: "node.failed" in stage.kinds())


def driver(stage, kind, **more):
    return lambda: rig.sweep(time=stage.wall(), driver=kind, **more)


def test_a_driver_that_hangs_is_unknown_and_then_failed_by_time_alone():
    stage = Stage(period=2.0)
    stage.run(20)
    began = stage.now

    def hung():
        silent = stage.now - began
        gpus = [rig.gpu(at, answer=Answer.unresponsive, silent_s=silent) for at in range(2)]
        return rig.sweep(*gpus, time=stage.wall(), driver=Driver.silent, silent_s=silent, why="no answer")

    stage.sweeper = hung
    stage.run(50)
    assert sorted(stage.kinds()) == ["gpu.unknown", "gpu.unknown", "node.unknown"]
    stage.lines.append(finding(kind="oom", xid=None, component="host", device="", why="out of memory"))
    stage.run(1)
    assert stage.kinds()[3] == "node.finding", "logs are read on"
    stage.run(20)
    assert stage.kinds(4).count("gpu.failed") == 2
    assert set(stage.kinds(4)) - {"node.note"} == {"gpu.failed", "node.failed"}
    told = len(stage.told)
    stage.run(600)
    assert len(stage.told) == told
    stage.sweeper = stage._sweep
    stage.run(20)
    assert sorted(stage.kinds(told))[:2] == ["gpu.healthy", "gpu.healthy"]


def test_a_machine_without_a_driver_and_a_starved_probe_are_unknown_for_ever():
    for kind in (Driver.absent, Driver.starved):
        stage = Stage(gpus=0, period=10.0)
        stage.sweeper = driver(stage, kind, silent_s=HOUR)
        stage.run(HOUR)
        assert stage.kinds() == ["node.unknown"]
    stage = Stage(gpus=0, period=10.0)
    stage.job = stage.job.model_copy(update={"gpus": 0})
    stage.monitor = stage.open()
    stage.sweeper = driver(stage, Driver.absent)
    stage.run(HOUR)
    assert stage.told == [], "none was to be here"


def test_a_sampler_that_cannot_start_a_process_is_told_and_the_logs_are_read_on():
    stage = Stage(period=1.0)
    stage.run(10)

    def full():
        raise OSError(11, "Resource temporarily unavailable")

    stage.sweeper = full
    stage.lines.append(finding())
    stage.run(3)
    assert "gpu.xid" in stage.kinds()
    assert any("no probe can be started" in one.text for one in stage.told)


def finding(**values):
    """An Xid 79 of GPU 1, as the kernel prints it."""
    whole = {"kind": "fallen_off_bus", "xid": 79, "component": "gpu", "severity": Severity.critical,
             "action": Action.reboot_node, "why": "Xid 79: it fell off the bus", "time": rig.NOW + 15.0,
             "device": "0000:02:00"} | values  # fmt: skip
    return Finding(**whole)


def event(stage, code=79, gpu=1, **values):
    at = stage.wall()
    return XidEvent(**{"time": at, "last": at, "uuid": f"GPU-{gpu}", "xid": code, "index": gpu} | values)


@pytest.mark.parametrize("first", ["driver", "log"])
def test_an_xid_is_one_cause_by_whichever_way_it_comes_first(first):
    stage = Stage(period=60.0)
    stage.run(15)
    for way in ("driver", "log") if first == "driver" else ("log", "driver"):
        if way == "driver":
            stage.queue.append(event(stage))
        else:
            stage.lines.append(finding(why="Xid 79: (the kernel's words)"))
        stage.run(0.5, step=0.1)
    xids = [one for one in stage.told if one.kind == "everstep.gpu.xid"]
    assert [(one.data["uuid"], one.data["xid"], one.data["index"]) for one in xids] == [
        ("GPU-1", 79, 1 if first == "driver" else None)
    ]
    assert sorted(stage.kinds()) == ["gpu.failed", "gpu.xid", "node.failed"], "at once, not at the next sample"
    assert stage.now < 23, "at the first of two samples"
    stage.run(120)
    assert len(stage.told) == 3
    assert stage.told[0].data["node"] == "n1"
    assert stage.told[0].severity is Severity.critical


def test_lines_that_were_there_before_the_first_sample_find_their_gpu():
    stage = Stage(period=60.0)
    stage.lines.append(finding(time=rig.NOW - 100.0))
    stage.run(1.0)
    assert [one.data["uuid"] for one in stage.told if one.kind == "everstep.gpu.xid"] == ["GPU-1"]


def test_an_xid_is_told_again_after_three_quiet_minutes_and_not_before():
    stage = Stage(period=10.0)
    for pause in (30, 60, 170, 200):
        stage.run(pause)
        stage.queue.append(event(stage, 31, 0))
    stage.run(1)
    assert stage.kinds().count("gpu.xid") == 2
    assert metrics(stage)["everstep_gpu_xid_total", ("uuid", "GPU-0"), ("xid", "31")] == 4


def test_a_storm_is_one_cause_and_bounded():
    stage = Stage(period=1.0)
    stage.run(5)
    stage.queue += [event(stage, 31, 0, gpu_instance=number % 7) for number in range(10)] * 1000
    stage.lines += [finding(xid=31, kind="mmu_fault", why="Xid 31: x", device="0000:01:00", time=stage.wall())] * 10_000
    steps = 0
    while stage.queue or stage.lines:
        stage.monitor.step(1.0)
        steps += 1
    stage.run(5)
    assert stage.kinds().count("gpu.xid") == 1
    memory = stage.monitor._memory
    assert len(memory.xids) == 7
    assert len(memory.findings) == 1
    assert memory.counts["GPU-0", 31] == 10_000
    assert steps < 10, "events that wait are heard together"


def test_memory_is_bounded_whatever_comes(monkeypatch):
    monkeypatch.setattr(monitor_memory, "MOST_KEPT", 200)
    stage = Stage(period=10.0)
    stage.run(5)
    most = monitor_memory.MOST_KEPT
    for number in range(most + 100):
        stage.queue.append(event(stage, number, number))
        stage.lines.append(finding(kind=f"kind-{number}", xid=None, component="storage", time=stage.wall()))
    stage.run(20)
    memory = stage.monitor._memory
    assert max(len(memory.xids), len(memory.findings), len(memory.counts), len(memory.history)) <= most
    assert len(memory._seen) <= most


def test_a_remedy_that_somebody_noted_clears_the_fault():
    stage = Stage(period=1.0)
    stage.run(10)
    stage.queue.append(event(stage))
    stage.run(10)
    assert "gpu.failed" in stage.kinds()
    before = len(stage.told)
    stage.run(300)
    assert stage.kinds(before) == [], "it stands"
    stage.monitor.remember([rig.remedy("reboot_node", -stage.now)])
    stage.run(SETTLE + 2)
    assert stage.kinds(before) == ["gpu.healthy", "node.healthy"]


def test_a_monitor_that_is_started_again_does_not_tell_the_same_again_and_the_fault_stands():
    stage = Stage(period=1.0)
    stage.run(10)
    stage.queue.append(event(stage))
    stage.gpus[0] = {"remap_pending": True}
    stage.run(10)
    past = [Event.model_validate_json(one.model_dump_json()) for one in stage.kept]
    assert past == stage.told, "the ledger has all that was told"
    stage.monitor = stage.open(past)
    before = len(stage.told)
    stage.lines.append(finding(time=rig.NOW + 11.0))  # the kernel's log is read once more
    stage.run(120)
    assert stage.kinds(before) == []
    assert stage.monitor.verdict.gpus["GPU-1"].state is State.failed
    assert stage.monitor.verdict.gpus["GPU-0"].state is State.suspect


def test_a_device_that_lacks_half_of_the_counters_is_blamed_for_nothing():
    stage = Stage(gpus=2)
    stage.watch.training = Training(computes=True, since=rig.NOW, job="gpt")
    lacking = sorted(set(rig.HEALTHY) - {"model"})
    stage.gpus[0] = dict.fromkeys(lacking[::2])
    stage.gpus[1] = dict.fromkeys(lacking)
    stage.run(600)
    assert stage.told == []
    found = metrics(stage)
    assert {"everstep_gpu_info", "everstep_gpu_answers", "everstep_gpu_state"} == {
        name for name, *labels in found if ("uuid", "GPU-1") in labels
    }
    assert set(lacking) <= set(stage.monitor.verdict.not_measured["GPU-1"])


def test_a_gpu_that_mig_splits_is_not_judged_by_utilisation():
    stage = Stage(period=5.0)
    stage.watch.training = Training(computes=True, since=rig.NOW, job="gpt")
    stage.gpus[1] = {"mig_enabled": True, "mig_pending": True, "utilisation_percent": None}
    stage.run(HOUR / 2)
    assert stage.told == []
    assert metrics(stage)["everstep_gpu_mig_enabled", ("uuid", "GPU-1")] == 1


def test_what_keeps_the_monitor_from_its_work_is_told_once_and_when_it_goes_on():
    stage = Stage(period=1.0)
    stage.run(5)
    stage.writer.troubles = ("telemetry is not written: No space left on device",)
    stage.watch.silent_s = 70.0
    stage.run(30)
    assert stage.kinds() == ["monitor.trouble", "monitor.trouble"]
    assert "No space left" in stage.told[0].text
    assert "have not been read for 70 s" in stage.told[1].text
    assert metrics(stage)["everstep_monitor_writes",] == 0
    assert metrics(stage)["everstep_monitor_logs_read",] == 0
    stage.writer.troubles, stage.watch.silent_s = (), 0.1
    stage.run(30)
    assert stage.kinds(2) == ["monitor.mended", "monitor.mended"]
    assert metrics(stage)["everstep_monitor_writes",] == 1


def test_a_clock_that_is_set_back_or_far_ahead_blames_nobody():
    stage = Stage(period=1.0)
    stage.watch.training = Training(computes=True, since=rig.NOW, job="gpt")
    stage.run(60)
    shift, true_wall = [0.0], stage.wall
    stage.wall = lambda: true_wall() + shift[0]
    stage.monitor._wall = stage.wall
    for moved in (-7200.0, 3600.0, 0.0):
        shift[0] = moved
        stage.run(60)
    assert stage.told == []


def test_samples_come_in_their_period_whatever_was_late():
    stage = Stage(period=5.0)
    times = []

    def slow():
        times.append(stage.now)
        stage.now += 12.0 if len(times) == 3 else 0.1
        return stage._sweep()

    stage.sweeper = slow
    stage.run(50)
    assert [round(one) for one in times][:9] == [0, 5, 10, 22, 25, 30, 35, 40, 45], "what was missed is not made up for"


def healthy(dice, at, second):
    """Readings of a GPU that trains, saves every ten minutes, is evaluated, and idles for a while between two jobs."""
    phase = second % 600
    idle = 1200 <= second < 1500
    saves, evaluates = phase < 12, 300 <= phase < 330
    busy = 0.0 if idle or saves else dice.uniform(20, 70) if evaluates else min(100.0, max(81.0, dice.gauss(96, 2)))
    load = busy / 100
    return {
        "utilisation_percent": round(busy),
        "memory_used_bytes": int((0.5 if idle else 60 + dice.uniform(-2, 2)) * (1 << 30)),
        "temperature_c": round(40 + 30 * load + 4 * math.sin(second / 400 + at) + dice.gauss(0, 1)),
        "memory_temperature_c": round(48 + 34 * load + dice.gauss(0, 1)),
        "power_w": 80 + 580 * load + dice.gauss(0, 20),
        "clock_reasons": 0x1 if busy < 5 else dice.choice((0, 0, 0x4)),
        "pcie_generation": 1 if busy < 5 else 5,
        "pcie_replays": second // 900,
        "ecc_corrected_volatile": 3 + second // 600,
        "links": links(at % 18, crc_errors=second // 120),
    }


def test_a_healthy_hour_with_noise_idle_phases_and_saves_gets_no_false_verdict():
    dice = random.Random(5)
    stage = Stage(gpus=3)

    def sweep():
        second = int(stage.now)
        computes = not 1200 <= second < 1500
        since = rig.NOW if second < 1200 else rig.NOW + 1500
        stage.watch.training = Training(computes, since, "gpt") if computes else Training()
        gpus = [rig.gpu(at, **healthy(dice, at, second)) for at in range(3)]
        return rig.sweep(*gpus, time=stage.wall())

    stage.sweeper = sweep
    states = set()
    while stage.monitor.sweeps_taken < 3600:
        stage.monitor.step(1.0)
        if stage.monitor.verdict:
            states |= {stage.monitor.verdict.verdict.state, *(one.state for one in stage.monitor.verdict.gpus.values())}
    assert states == {State.healthy}
    assert [one for one in stage.told if not one.kind.endswith(".note")] == []
    assert stage.told == []


def test_a_placeholder_that_is_listed_no_more_is_forgotten():
    stage = Stage(gpus=1, period=1.0)
    stage.sweeper = lambda: rig.sweep(
        rig.gpu(0), GpuSample(time=stage.wall(), uuid="unknown-1", answer=Answer.unresponsive), time=stage.wall()
    )
    stage.run(10)
    stage.sweeper = stage._sweep
    stage.run(30)
    assert stage.kinds()[-1] == "node.healthy"
    assert "unknown-1" not in stage.monitor.verdict.gpus
