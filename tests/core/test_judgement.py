"""The judgement of samples: each signal raised and cleared, by itself and by duration."""

import pytest
from rigs.telemetry import HEALTHY, LINKS, NOW, evidence, gpu, host, one, series, sweep

from everstep.core.gpu import REASON_BITS, Answer, ClockReason, Driver, GpuProcess
from everstep.core.health import Action, State
from everstep.core.health_policy import HealthPolicy, ModelLimits
from everstep.core.host import Clock, IbPort, Looked, Memory, Mount, Nic, Pressure, StuckTask
from everstep.core.judgement import judge, window


def test_a_healthy_node_is_healthy_and_says_nothing():
    found = judge(evidence(sweep(*(gpu(index) for index in range(8))), gpus_expected=8))
    assert found.verdict.state is State.healthy
    assert found.verdict.reasons == ()
    assert {verdict.state for verdict in found.gpus.values()} == {State.healthy}


DIAGNOSE = Action.diagnose_then_restart
MOMENTS = [
    ({"ecc_uncorrected_volatile": 1}, State.failed, Action.drain_then_reset_gpu),
    ({"ecc_corrected_volatile": 30_000_000}, State.suspect, Action.log_then_reset_gpu_when_idle),
    ({"sram_threshold_exceeded": True}, State.failed, Action.drain_replace),
    ({"remap_pending": True}, State.suspect, Action.log_then_reset_gpu_when_idle),
    ({"remap_failed": True}, State.failed, Action.drain_replace),
    ({"remapped_uncorrected": 513}, State.failed, Action.drain_replace),
    ({"retired_double_bit": 11}, State.suspect, Action.drain_then_reset_gpu),
    ({"retired_single_bit": 50, "retired_double_bit": 12, "retired_pending": True}, State.failed, Action.drain_replace),
    ({"retired_pending": True}, State.suspect, Action.log_then_reset_gpu_when_idle),
    ({"temperature_c": 80.0}, State.healthy, Action.ignore_log),
    ({"temperature_c": 81.0}, State.healthy, Action.ignore_log),
    ({"temperature_c": 83.0}, State.healthy, Action.ignore_log),
    ({"temperature_c": 85.0}, State.suspect, DIAGNOSE),
    ({"temperature_c": 79.0, "slowdown_limit_c": 78.0}, State.suspect, DIAGNOSE),
    ({"temperature_c": 92.0}, State.failed, Action.drain_replace),
    ({"memory_temperature_c": 95.0}, State.suspect, DIAGNOSE),
    ({"headroom_c": -2.0, "slowdown_headroom_c": -2.0, "slowdown_limit_c": None, "temperature_c": None}, State.suspect,
     DIAGNOSE),
    ({"ecc_enabled": False}, State.suspect, Action.fix_config),
    ({"ecc_pending": False}, State.suspect, Action.fix_config),
    ({"mig_pending": True}, State.suspect, Action.fix_config),
    ({"pcie_width": 8}, State.suspect, DIAGNOSE),
    ({"pcie_generation": 3}, State.suspect, DIAGNOSE),
    ({"pcie_generation": 3, "utilisation_percent": 0.0}, State.healthy, Action.ignore_log),
    ({"recovery_action": 1}, State.failed, Action.reset_gpu),
    ({"recovery_action": 2}, State.failed, Action.reboot_node),
    ({"recovery_action": 4}, State.failed, Action.drain_then_reset_gpu),
    ({"answer": Answer.lost}, State.failed, Action.reboot_node),
    ({"answer": Answer.reset_required}, State.failed, Action.drain_then_reset_gpu),
    ({"answer": Answer.unresponsive, "silent_s": 5.0}, State.unknown, DIAGNOSE),
    ({"answer": Answer.unresponsive, "silent_s": 61.0}, State.failed, Action.reboot_node),
    ({"answer": Answer.missing, "silent_s": 5.0, "index": None}, State.unknown, DIAGNOSE),
    ({"answer": Answer.missing, "silent_s": 61.0, "index": None}, State.failed, Action.reboot_node),
    ({"links": (LINKS[0].model_copy(update={"active": False}), *LINKS[1:])}, State.failed, Action.drain_then_reset_gpu),
]  # fmt: skip


@pytest.mark.parametrize(("readings", "state", "action"), MOMENTS, ids=lambda value: str(value)[:60])
def test_each_signal_of_a_moment_is_raised_and_cleared(readings, state, action):
    found = one(**readings)
    assert (found.state, found.action) == (state, action)
    hot = (readings.get("temperature_c") or 0) > 80
    assert bool(found.reasons) == (state is not State.healthy or hot)
    node = judge(evidence(sweep(gpu(**readings))))
    assert node.verdict.state is state, "a node is never better than its GPUs"
    before, after = sweep(gpu(**readings), time=NOW - 60), sweep(gpu())
    assert judge(evidence(before, after)).verdict.state is State.healthy


@pytest.mark.parametrize("name", sorted(HEALTHY.keys() - {"model"}))
def test_what_is_not_measured_speaks_for_nothing_and_is_listed(name):
    node = judge(evidence(sweep(gpu(**{name: None}))))
    assert node.gpus["GPU-0"].state is State.healthy
    assert name in node.not_measured["GPU-0"]


def test_a_device_that_measures_nothing_passes_unless_the_policy_asks_for_a_reading():
    """BC-141: unsupported is unknown, not bad; chosen readings can be required."""
    nothing = sweep(gpu(**dict.fromkeys(HEALTHY.keys() - {"model"})))
    found = judge(evidence(nothing))
    assert found.verdict.state is State.healthy
    assert {"temperature_c", "utilisation_percent", "power_w"} <= set(found.not_measured["GPU-0"])
    found = judge(evidence(nothing), HealthPolicy(required=("temperature_c",)))
    assert found.verdict.state is State.unknown
    assert found.gpus["GPU-0"].reasons == ("temperature_c is required here, and not measured",)


def test_a_query_that_fails_is_no_pass():
    """BC-149: an error that nobody expects is not taken for health."""
    assert one(ecc_uncorrected_volatile=None, troubles={"ecc": "Unknown Error"}).state is State.suspect


def test_the_last_evidence_of_a_gpu_that_falls_silent_stays():
    """BC-137: that a GPU does not answer makes nothing of what it read before any better."""
    silent = gpu(answer=Answer.unresponsive, silent_s=10.0, **dict.fromkeys(HEALTHY.keys() - {"model"}))
    found = judge(evidence(sweep(gpu(ecc_uncorrected_volatile=2), time=NOW - 10), sweep(silent))).gpus["GPU-0"]
    assert found.state is State.failed
    assert any("uncorrectable" in reason for reason in found.reasons)
    assert judge(evidence(sweep(gpu(), time=NOW - 10), sweep(silent))).gpus["GPU-0"].state is State.unknown


def busy_or_not(ago):
    return 20.0 if int(ago) % 2 else 74.0


DURATIONS = [
    ({"utilisation_percent": lambda ago: 0.0}, 121, State.suspect),
    ({"utilisation_percent": lambda ago: 0.0}, 30, State.healthy),
    ({"utilisation_percent": lambda ago: 0.0 if ago < 100 else 97.0}, 150, State.suspect),  # far below its peers
    ({"utilisation_percent": lambda ago: 0.0 if ago < 20 else 97.0}, 300, State.healthy),
    ({"utilisation_percent": lambda ago: 0.0 if ago > 20 else 97.0}, 300, State.healthy),
    ({"utilisation_percent": lambda ago: 30.0}, 59, State.suspect),
    ({"utilisation_percent": lambda ago: 30.0}, 20, State.healthy),
    ({"utilisation_percent": lambda ago: 75.0}, 601, State.suspect),
    ({"utilisation_percent": lambda ago: 75.0 if int(ago + 1) % 9 else 90.0}, 660, State.suspect),
    ({"utilisation_percent": lambda ago: 75.0}, 300, State.healthy),
    ({"utilisation_percent": busy_or_not}, 660, State.suspect),
    ({"clock_reasons": lambda ago: REASON_BITS[ClockReason.hw_slowdown]}, 601, State.suspect),
    ({"clock_reasons": lambda ago: REASON_BITS[ClockReason.power_brake]}, 601, State.suspect),
    ({"clock_reasons": lambda ago: REASON_BITS[ClockReason.hw_slowdown]}, 300, State.healthy),
    ({"clock_reasons": lambda ago: REASON_BITS[ClockReason.hw_thermal] if ago > 3 else 0}, 601, State.healthy),
    ({"clock_reasons": lambda ago: REASON_BITS[ClockReason.power_cap]}, 601, State.healthy),
    ({"memory_used_bytes": lambda ago: (10 if ago < 1 else 60) << 30}, 60, State.suspect),
    ({"memory_used_bytes": lambda ago: (10 if ago > 10 else 60) << 30}, 60, State.healthy),
    ({"pcie_replays": lambda ago: int(1000 - ago * 3)}, 120, State.suspect),
    ({"pcie_replays": lambda ago: int(100 - ago / 10)}, 120, State.healthy),
    ({"pcie_generation": lambda ago: 1 if ago < 1 else 5}, 20, State.healthy),
    ({"pcie_generation": lambda ago: 1 if ago < 2 else 5}, 20, State.suspect),
]  # fmt: skip


@pytest.mark.parametrize(("of_time", "seconds", "state"), DURATIONS)
def test_signals_of_duration(of_time, seconds, state):
    found = judge(evidence(*series(seconds, 1.0 if seconds <= 150 else 3.0, **of_time)))
    assert found.gpus["GPU-3"].state is state, found.gpus["GPU-3"]
    assert all(verdict.state is State.healthy for name, verdict in found.gpus.items() if name != "GPU-3")


def test_a_gap_in_the_samples_proves_no_duration():
    hot = {"clock_reasons": lambda ago: REASON_BITS[ClockReason.hw_slowdown]}
    sweeps = series(700, step=10, **hot)
    assert judge(evidence(*sweeps)).gpus["GPU-3"].state is State.suspect
    assert judge(evidence(sweeps[0], sweeps[-1])).gpus["GPU-3"].state is State.healthy


def test_where_nothing_is_trained_utilisation_is_not_judged():
    idle = series(700, utilisation_percent=lambda _: 0.0)
    for more in ({"training": None}, {"training": False}, {"training_since": NOW - 40}):
        assert judge(evidence(*idle, **more)).verdict.state is State.healthy


def test_gpus_that_the_training_does_not_use_are_not_blamed_for_idling():
    unused = {"utilisation_percent": 0.0, "memory_used_bytes": 4 << 20, "processes": ()}
    sweeps = [sweep(gpu(0), *(gpu(index, **unused) for index in range(1, 8)), time=NOW - ago) for ago in range(130)]
    assert judge(evidence(*sweeps)).verdict.state is State.healthy
    found = judge(evidence(*sweeps, training_gpus=("GPU-0", "GPU-1")))
    assert [uuid for uuid, verdict in found.gpus.items() if verdict.state is State.suspect] == ["GPU-1"]
    held = [sweep(gpu(0), gpu(1, **unused | {"processes": (GpuProcess(pid=7),)}), time=NOW - ago) for ago in range(130)]
    assert judge(evidence(*held)).gpus["GPU-1"].state is State.suspect


def test_a_gpu_in_parts_has_no_utilisation_to_judge():
    split = {"mig_enabled": True, "mig_pending": True}
    for utilisation in (None, 0.0):
        idle = [sweep(gpu(0, utilisation_percent=utilisation, **split), gpu(1), time=NOW - ago) for ago in range(700)]
        assert judge(evidence(*idle)).verdict.state is State.healthy
    assert judge(evidence(sweep(gpu(ecc_uncorrected_volatile=1, **split)))).verdict.state is State.failed


def test_links_that_recover_or_err():
    def with_errors(**counts):
        links = (*LINKS[:5], LINKS[5].model_copy(update=counts), *LINKS[6:])
        return judge(evidence(sweep(gpu(), time=NOW - 60), sweep(gpu(links=links)))).gpus["GPU-0"]

    assert with_errors(recovery_errors=1).state is State.suspect
    assert with_errors(crc_errors=100).state is State.suspect
    assert with_errors(crc_errors=3).state is State.healthy


def links_up(*up):
    return tuple(link.model_copy(update={"active": link.number in up}) for link in LINKS)


def test_links_that_nobody_connected_are_no_fault():
    pcie = {"model": "NVIDIA H100 PCIe", "links": links_up(0, 1, 2, 3)}
    assert judge(evidence(sweep(gpu(0, **pcie), gpu(1, **pcie)))).verdict.state is State.healthy
    assert judge(evidence(sweep(gpu(0, links=links_up())))).verdict.state is State.healthy, "rented out alone"


def test_links_that_went_down_or_never_came_up():
    pcie = {"model": "NVIDIA H100 PCIe"}
    fell = (sweep(gpu(links=links_up(0, 1), **pcie), time=NOW - 9), sweep(gpu(links=links_up(0), **pcie)))
    assert judge(evidence(*fell)).verdict.state is State.failed
    found = judge(evidence(sweep(gpu(0, links=links_up()), gpu(1, links=links_up())))).verdict
    assert found.state is State.failed
    assert "fabric manager" in found.reasons[0]


NODES = [
    ({"mounts": (Mount(path="/data", kind="ext4", read_only=True),)}, State.healthy, Action.ignore_log),  # noted
    ({"mounts": (Mount(path="/data", kind="nfs4", read_only=True),)}, State.healthy, Action.ignore_log),
    ({"mounts": (Mount(path="/data", total_bytes=100, free_bytes=4),)}, State.suspect, Action.free_space),
    ({"mounts": (Mount(path="/data", total_bytes=100, free_bytes=6),)}, State.healthy, Action.ignore_log),
    ({"mounts": (Mount(path="/data", files_total=1000, files_free=1),)}, State.suspect, Action.free_space),
    ({"mounts": (Mount(path="/data", looked=Looked.hung),)}, State.suspect, Action.check_storage),
    ({"memory": Memory(pressure=Pressure(some_10s=9, some_60s=80, full_60s=40))}, State.suspect, Action.fix_app),
    ({"memory": Memory(total_bytes=1000, available_bytes=5)}, State.suspect, Action.fix_app),
    ({"stuck": (StuckTask(pid=1, task=1, name="nvidia-smi", kernel=False, seconds=301),)}, State.failed, Action.reboot_node),
    ({"stuck": (StuckTask(pid=1, task=1, name="python", kernel=False, seconds=301),)}, State.suspect, Action.check_storage),
    ({"stuck": (StuckTask(pid=1, task=1, name="python", kernel=False, seconds=20),)}, State.healthy, Action.ignore_log),
    ({"clock": Clock(source="chrony", offset_s=-0.6)}, State.suspect, Action.fix_config),
    ({"clock": Clock(source="chrony", offset_s=0.06)}, State.healthy, Action.ignore_log),  # noted
    ({"nics": (Nic(name="eth0", carrier=False),)}, State.healthy, Action.ignore_log),  # it was never up
    ({"pci_gpus": tuple(f"0000:0{number}:00.0" for number in range(8))}, State.healthy, Action.ignore_log),  # a container
]  # fmt: skip


@pytest.mark.parametrize(("readings", "state", "action"), NODES, ids=lambda value: str(value)[:60])
def test_each_signal_of_a_node(readings, state, action):
    found = judge(evidence(sweep(gpu()), hosts=(host(**readings),))).verdict
    assert (found.state, found.action) == (state, action)
    cleared = judge(evidence(sweep(gpu()), hosts=(host(**readings | {"time": NOW - 60}), host()))).verdict
    assert cleared.state is State.healthy


def test_a_mount_that_turns_read_only():
    def mounted(time, read_only):
        return host(time=time, mounts=(Mount(path="/shared", kind="nfs4", read_only=read_only),))

    found = judge(evidence(sweep(gpu()), hosts=(mounted(NOW - 60, False), mounted(NOW, True)))).verdict
    assert (found.state, found.action) == (State.suspect, Action.remount_then_restart)
    assert found.reasons == ("/shared has become read-only",)


def test_a_port_that_was_up_and_counters_that_grow():
    def port(time, state="ACTIVE", rate=400.0, **counters):
        counted = IbPort(device="mlx5_0", port=1, state=state, rate_gbit=rate, counters=counters)
        return host(time=time, ports=(counted,))

    def nic(time, **values):
        return host(time=time, nics=(Nic(name="eth0", **values),))

    def found(*hosts):
        return judge(evidence(sweep(gpu()), hosts=hosts)).verdict

    assert found(port(NOW - 60), port(NOW, "DOWN")).action is Action.check_network
    assert found(port(NOW - 60), port(NOW, "DOWN")).state is State.suspect
    assert (
        found(port(NOW - 300), port(NOW - 250, "DOWN"), port(NOW - 100, "DOWN"), port(NOW, "DOWN")).state
        is State.failed
    )
    assert found(port(NOW, "DOWN")).state is State.healthy
    assert found(port(NOW - 60), port(NOW, rate=200.0)).state is State.suspect
    assert found(port(NOW - 60, link_downed=1), port(NOW, link_downed=2)).state is State.suspect
    assert found(port(NOW - 60, link_downed=7), port(NOW, link_downed=7)).state is State.healthy
    for counter, few, many in (
        ("symbol_error", 100, 1000),
        ("port_xmit_discards", 5000, 7000),
        ("local_ack_timeout_err", 30, 100),
        ("link_error_recovery", 4, 9),
    ):
        assert found(port(NOW - 60, **{counter: 0}), port(NOW, **{counter: few})).state is State.healthy, counter
        assert found(port(NOW - 60, **{counter: 0}), port(NOW, **{counter: many})).state is State.suspect, counter
    assert found(nic(NOW - 60, carrier=True), nic(NOW, carrier=False)).state is State.suspect
    assert found(nic(NOW - 60, carrier_changes=4), nic(NOW, carrier_changes=8)).state is State.suspect
    assert found(nic(NOW - 60, carrier_changes=4), nic(NOW, carrier_changes=6)).state is State.healthy


def test_the_driver_and_the_count():
    assert judge(evidence()).verdict.state is State.unknown
    assert judge(evidence(sweep(driver=Driver.absent))).verdict.state is State.unknown
    assert judge(evidence(sweep(driver=Driver.absent), gpus_expected=0)).verdict.state is State.healthy
    assert judge(evidence(sweep(driver=Driver.starved, silent_s=900))).verdict.state is State.unknown
    assert judge(evidence(sweep(driver=Driver.silent, silent_s=10))).verdict.state is State.unknown
    assert judge(evidence(sweep(driver=Driver.silent, silent_s=61))).verdict.state is State.failed
    short = evidence(sweep(gpu(0), gpu(1)), gpus_expected=8)
    assert (judge(short).verdict.state, judge(short).verdict.action) == (State.failed, Action.reboot_node)
    assert judge(evidence(sweep(gpu(0), gpu(1)), gpus_expected=2)).verdict.state is State.healthy
    gone = gpu(1, index=None, answer=Answer.missing, silent_s=3.0)
    assert judge(evidence(sweep(gpu(0), gone), gpus_expected=2)).verdict.state is State.unknown, "it may come back"


def test_a_gpu_of_which_the_newest_sweep_says_nothing():
    both, alone = (gpu(0), gpu(1)), (gpu(0),)
    found = judge(evidence(sweep(*both, time=NOW - 5), sweep(*alone)))
    assert found.gpus["GPU-1"].state is State.unknown
    found = judge(evidence(sweep(*both, time=NOW - 61), sweep(*alone)))
    assert found.gpus["GPU-1"].state is State.failed
    starved = judge(evidence(sweep(*both, time=NOW - 61), sweep(driver=Driver.starved)))
    assert {one.state for one in starved.gpus.values()} == {State.unknown}
    nameless = gpu(1, uuid="unknown-1", answer=Answer.lost)
    assert set(judge(evidence(sweep(gpu(0), nameless, time=NOW - 61), sweep(*both))).gpus) == {"GPU-0", "GPU-1"}


def test_telemetry_that_is_silent_is_an_alarm_and_no_failure():
    """BC-140: missing telemetry is itself an alarm, within three periods."""
    sweeps = series(30, step=5.0)
    for ago, state in ((14.0, State.healthy), (16.0, State.unknown), (1e6, State.unknown)):
        found = judge(evidence(*sweeps, now=NOW + ago)).verdict
        assert found.state is state
        assert (state is State.healthy) or "telemetry is silent on this node" in found.reasons[0]
    assert judge(evidence(sweeps[0], now=NOW + 149)).verdict.state is State.healthy, "the period is not known"


def test_thresholds_of_a_user_hold_and_those_of_a_model_for_that_model_alone():
    rows = (ModelLimits(pattern="A100", alarm_c=90.0),)
    policy = HealthPolicy(alarm_c=70.0, logged_c=50.0, models=rows)
    a100 = {"model": "NVIDIA A100-SXM4-80GB", "links": None}
    states = [judge(evidence(sweep(gpu(temperature_c=75.0, **more))), policy).verdict.state for more in ({}, a100)]
    assert states == [State.suspect, State.healthy]


def test_a_window_is_small_and_proves_every_duration():
    sweeps = [sweep(gpu(utilisation_percent=30.0), time=NOW - ago) for ago in range(900)]
    kept = window(sweeps)
    assert len(kept) <= 130
    assert kept == window(kept) == tuple(sorted(kept, key=lambda one: one.time))
    assert kept[-1].time - kept[0].time >= 600
    assert judge(evidence(*kept)).verdict.reasons == judge(evidence(*sweeps[:621])).verdict.reasons
    assert window([]) == ()
