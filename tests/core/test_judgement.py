"""The judgement: each signal raised and cleared, history, and what must hold for any samples."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.concern import ORDER
from everstep.core.gpu import REASON_BITS, Answer, ClockReason, Driver, GpuSample, NvLink, Sweep, XidEvent
from everstep.core.health import Action, Finding, Severity, State
from everstep.core.health_policy import HealthPolicy
from everstep.core.host import Clock, HostSample, IbPort, Looked, Memory, Mount, Nic, Pressure, StuckTask
from everstep.core.judgement import Evidence, Offence, judge

NOW = 1_000_000.0
LINKS = tuple(
    NvLink(number=number, active=True, replay_errors=0, recovery_errors=0, crc_errors=0) for number in range(18)
)


def gpu(index=0, **readings) -> GpuSample:
    values = {
        "time": NOW, "uuid": f"GPU-{index}", "index": index, "bus": f"00000000:{index + 1:02X}:00.0",
        "model": "NVIDIA H100 80GB HBM3", "utilisation_percent": 97.0, "memory_total_bytes": 80 << 30,
        "memory_used_bytes": 60 << 30, "temperature_c": 55.0, "memory_temperature_c": 65.0, "slowdown_limit_c": 89.0,
        "shutdown_limit_c": 92.0, "memory_limit_c": 95.0, "power_w": 600.0, "power_limit_w": 700.0, "clock_reasons": 0,
        "ecc_enabled": True, "ecc_pending": True, "ecc_corrected_volatile": 3, "ecc_uncorrected_volatile": 0,
        "sram_threshold_exceeded": False, "remapped_uncorrected": 0, "remap_pending": False, "remap_failed": False,
        "pcie_replays": 0, "pcie_width": 16, "pcie_width_max": 16, "pcie_generation": 5, "pcie_generation_max": 5,
        "recovery_action": 0, "links": LINKS, "mig_enabled": False, "mig_pending": False,
    }  # fmt: skip
    return GpuSample(**values | readings)


def sweep(*gpus, time=NOW, **more) -> Sweep:
    dated = tuple(one.model_copy(update={"time": time}) for one in gpus)
    return Sweep(**{"time": time, "seconds": 0.01, "driver": Driver.present, "gpus": dated} | more)


def host(**more) -> HostSample:
    mount = Mount(path="/data", kind="ext4", read_only=False, total_bytes=1000, free_bytes=600)
    values = {"time": NOW, "node": "n1", "seconds": 0.01, "mounts": (mount,), "memory": Memory(oom_kills=0)}
    return HostSample(**values | more)


def evidence(*sweeps, **more) -> Evidence:
    return Evidence(**{"now": NOW, "node": "n1", "sweeps": sweeps, "hosts": (host(),), "training": True} | more)


def one(**readings):
    """The verdict on a GPU with such readings at one moment."""
    return judge(evidence(sweep(gpu(**readings)))).gpus["GPU-0"]


def test_a_healthy_node_is_healthy_and_says_nothing():
    found = judge(evidence(sweep(*(gpu(index) for index in range(8))), gpus_expected=8))
    assert found.verdict.state is State.healthy
    assert found.verdict.reasons == ()
    assert {verdict.state for verdict in found.gpus.values()} == {State.healthy}


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
    ({"temperature_c": 81.0}, State.healthy, Action.ignore_log),
    ({"temperature_c": 84.0}, State.healthy, Action.ignore_log),
    ({"temperature_c": 85.0}, State.suspect, Action.diagnose_then_restart),
    ({"temperature_c": 79.0, "slowdown_limit_c": 78.0}, State.suspect, Action.diagnose_then_restart),
    ({"temperature_c": 92.0}, State.failed, Action.drain_replace),
    ({"memory_temperature_c": 95.0}, State.suspect, Action.diagnose_then_restart),
    ({"ecc_enabled": False}, State.suspect, Action.fix_config),
    ({"ecc_pending": False}, State.suspect, Action.fix_config),
    ({"mig_pending": True}, State.suspect, Action.fix_config),
    ({"pcie_width": 8}, State.suspect, Action.drain_replace),
    ({"pcie_generation": 3}, State.suspect, Action.drain_replace),
    ({"pcie_generation": 3, "utilisation_percent": 0.0}, State.healthy, Action.ignore_log),
    ({"recovery_action": 1}, State.failed, Action.reset_gpu),
    ({"recovery_action": 2}, State.failed, Action.reboot_node),
    ({"answer": Answer.lost}, State.failed, Action.reboot_node),
    ({"answer": Answer.reset_required}, State.failed, Action.drain_then_reset_gpu),
    ({"answer": Answer.unresponsive, "silent_s": 5.0}, State.unknown, Action.diagnose_then_restart),
    ({"answer": Answer.unresponsive, "silent_s": 61.0}, State.failed, Action.reboot_node),
    ({"links": (LINKS[0].model_copy(update={"active": False}), *LINKS[1:])}, State.failed, Action.drain_then_reset_gpu),
]  # fmt: skip


@pytest.mark.parametrize(("readings", "state", "action"), MOMENTS, ids=lambda value: str(value)[:60])
def test_each_signal_of_a_moment_is_raised_and_cleared(readings, state, action):
    found = one(**readings)
    assert (found.state, found.action) == (state, action)
    hot = readings.get("temperature_c", 0) > 80
    assert bool(found.reasons) == (state is not State.healthy or hot)
    node = judge(evidence(sweep(gpu(**readings))))
    assert node.verdict.state is state, "a node is never better than its GPUs"
    assert one().state is State.healthy


@pytest.mark.parametrize(
    "name", [name for readings, _, _ in MOMENTS for name in readings if name not in ("answer", "silent_s")]
)
def test_what_is_not_measured_speaks_for_nothing_and_is_listed(name):
    node = judge(evidence(sweep(gpu(**{name: None}))))
    assert node.gpus["GPU-0"].state is State.healthy
    assert name in node.not_measured["GPU-0"]


def test_what_a_device_lacks_is_neutral_and_what_the_driver_fails_to_read_is_not():
    """BC-141, BC-149: unsupported is not measured; an error in place of a reading is no pass; a policy may ask for readings."""
    lacking = dict.fromkeys(("temperature_c", "ecc_uncorrected_volatile", "utilisation_percent", "power_w"))
    assert one(**lacking).state is State.healthy
    failing = one(ecc_uncorrected_volatile=None, troubles={"ecc_uncorrected_volatile": "Unknown Error"})
    assert failing.state is State.suspect
    assert failing.reasons == ("ecc_uncorrected_volatile could not be read: Unknown Error",)
    strict = HealthPolicy(required=("temperature_c",))
    assert judge(evidence(sweep(gpu(**lacking))), strict).gpus["GPU-0"].state is State.unknown
    assert judge(evidence(sweep(gpu())), strict).gpus["GPU-0"].state is State.healthy
    with pytest.raises(ValueError, match="colour is no reading"):
        HealthPolicy(required=("colour",))


@pytest.mark.parametrize("number", [13, 31, 43, 45])
def test_what_programs_cause_condemns_no_gpu(number):
    """BC-146."""
    assert after(xid(number)).state is State.healthy
    assert after(xid(number), xid(number, 400.0)).state is (State.failed if number == 31 else State.healthy)


def series(seconds, step=1.0, **of_time):
    """Sweeps of 8 GPUs, one each `step` seconds until now; `of_time` gives readings of GPU 3 by seconds ago."""
    found = []
    for at in range(int(seconds / step) + 1):
        ago = seconds - at * step
        readings = {name: value(ago) for name, value in of_time.items()}
        found.append(sweep(*(gpu(index, **(readings if index == 3 else {})) for index in range(8)), time=NOW - ago))
    return tuple(found)


DURATIONS = [
    ({"utilisation_percent": lambda ago: 0.0}, 121, State.suspect),
    ({"utilisation_percent": lambda ago: 0.0}, 30, State.healthy),
    ({"utilisation_percent": lambda ago: 0.0 if ago < 100 else 97.0}, 50 + 100, State.suspect),  # far below its peers
    ({"utilisation_percent": lambda ago: 0.0 if ago < 20 else 97.0}, 300, State.healthy),
    ({"utilisation_percent": lambda ago: 30.0}, 60, State.suspect),
    ({"utilisation_percent": lambda ago: 75.0}, 601, State.suspect),
    ({"utilisation_percent": lambda ago: 75.0}, 300, State.healthy),
    ({"clock_reasons": lambda ago: REASON_BITS[ClockReason.hw_slowdown]}, 601, State.suspect),
    ({"clock_reasons": lambda ago: REASON_BITS[ClockReason.hw_slowdown]}, 300, State.healthy),
    ({"clock_reasons": lambda ago: REASON_BITS[ClockReason.power_cap]}, 601, State.healthy),
    ({"memory_used_bytes": lambda ago: (10 if ago < 1 else 60) << 30}, 60, State.suspect),
    ({"pcie_replays": lambda ago: int(1000 - ago * 3)}, 120, State.suspect),
    ({"pcie_replays": lambda ago: int(100 - ago / 10)}, 120, State.healthy),
]  # fmt: skip


@pytest.mark.parametrize(("of_time", "seconds", "state"), DURATIONS, ids=lambda value: str(value)[:40])
def test_signals_of_duration(of_time, seconds, state):
    found = judge(evidence(*series(seconds, **of_time)))
    assert found.gpus["GPU-3"].state is state, found.gpus["GPU-3"]
    assert all(verdict.state is State.healthy for name, verdict in found.gpus.items() if name != "GPU-3")


def test_where_nothing_is_trained_utilisation_is_not_judged():
    for training in (None, False):
        assert (
            judge(evidence(*series(700, utilisation_percent=lambda _: 0.0), training=training)).verdict.state
            is State.healthy
        )


def test_a_gpu_in_parts_has_no_utilisation_to_judge():
    idle = tuple(
        sweep(gpu(mig_enabled=True, mig_pending=True, utilisation_percent=None), time=NOW - ago)
        for ago in range(700, -1, -1)
    )
    assert judge(evidence(*idle)).verdict.state is State.healthy


def test_links_that_recover_or_err():
    def with_errors(**counts):
        before, after = LINKS[5], LINKS[5].model_copy(update=counts)
        links = lambda link: (*LINKS[:5], link, *LINKS[6:])  # noqa: E731
        sweeps = (sweep(gpu(links=links(before)), time=NOW - 60), sweep(gpu(links=links(after))))
        return judge(evidence(*sweeps)).gpus["GPU-0"]

    assert with_errors(recovery_errors=1).state is State.suspect
    assert with_errors(crc_errors=100).state is State.suspect
    assert with_errors(crc_errors=3).state is State.healthy


def test_links_that_nobody_connected_are_no_fault():
    pcie = {
        "model": "NVIDIA H100 PCIe",
        "links": tuple(link.model_copy(update={"active": link.number < 4}) for link in LINKS),
    }
    assert judge(evidence(sweep(gpu(0, **pcie), gpu(1, **pcie)))).verdict.state is State.healthy


NODES = [
    ({"mounts": (Mount(path="/data", read_only=True),)}, State.healthy),  # it may be meant so
    ({"mounts": (Mount(path="/data", total_bytes=100, free_bytes=4),)}, State.suspect),
    ({"mounts": (Mount(path="/data", looked=Looked.hung),)}, State.suspect),
    ({"memory": Memory(pressure=Pressure(some_10s=90, some_60s=80, full_60s=40))}, State.suspect),
    ({"stuck": (StuckTask(pid=1, task=1, name="nvidia-smi", kernel=False, seconds=301),)}, State.failed),
    ({"stuck": (StuckTask(pid=1, task=1, name="python", kernel=False, seconds=301),)}, State.suspect),
    ({"stuck": (StuckTask(pid=1, task=1, name="python", kernel=False, seconds=20),)}, State.healthy),
    ({"clock": Clock(source="chrony", offset_s=-0.6)}, State.suspect),
    ({"clock": Clock(source="chrony", offset_s=0.06)}, State.healthy),
    ({"nics": (Nic(name="eth0", carrier=False),)}, State.healthy),  # it was never up
    ({"pci_gpus": tuple(f"0000:0{number}:00.0" for number in range(2))}, State.failed),
]


@pytest.mark.parametrize(("readings", "state"), NODES, ids=lambda value: str(value)[:60])
def test_each_signal_of_a_node(readings, state):
    assert judge(evidence(sweep(gpu()), hosts=(host(**readings),))).verdict.state is state


def test_a_mount_that_becomes_read_only():
    before, after = host(time=NOW - 60), host(mounts=(Mount(path="/data", read_only=True),))
    found = judge(evidence(sweep(gpu()), hosts=(before, after))).verdict
    assert (found.state, found.action) == (State.suspect, Action.remount_then_restart)


def test_a_port_that_was_up_and_counters_that_grow():
    def port(time, state="ACTIVE", **counters):
        return host(time=time, ports=(IbPort(device="mlx5_0", port=1, state=state, counters=counters),))

    def found(*hosts):
        return judge(evidence(sweep(gpu()), hosts=hosts)).verdict

    assert found(port(NOW - 60), port(NOW, "DOWN")).action is Action.check_network
    assert found(port(NOW, "DOWN")).state is State.healthy
    assert found(port(NOW - 60, link_downed=1), port(NOW, link_downed=2)).state is State.suspect
    assert found(port(NOW - 60, symbol_error=0), port(NOW, symbol_error=100)).state is State.healthy
    assert found(port(NOW - 60, symbol_error=0), port(NOW, symbol_error=1000)).state is State.suspect
    assert found(host(time=NOW - 60, nics=(Nic(name="eth0", carrier=True),)),
                 host(nics=(Nic(name="eth0", carrier=False),))).state is State.suspect  # fmt: skip


def test_the_driver_and_the_count():
    assert judge(evidence()).verdict.state is State.unknown
    assert judge(evidence(sweep(driver=Driver.absent))).verdict.state is State.unknown
    assert judge(evidence(sweep(driver=Driver.starved, silent_s=900))).verdict.state is State.unknown
    assert judge(evidence(sweep(driver=Driver.silent, silent_s=10))).verdict.state is State.unknown
    assert judge(evidence(sweep(driver=Driver.silent, silent_s=61))).verdict.state is State.failed
    found = judge(evidence(sweep(gpu(0), gpu(1)), gpus_expected=8)).verdict
    assert (found.state, found.action) == (State.failed, Action.reboot_node)


# -- Xids and history -------------------------------------------------------------------------------------------------


def xid(number, ago=1.0, index=0):
    return XidEvent(time=NOW - ago, last=NOW - ago, uuid=f"GPU-{index}", xid=number, index=index)


def past(number, ago, part="", index=0):
    return Offence(time=NOW - ago, node="n1", uuid=f"GPU-{index}", cause=f"xid-{number}", part=part)


def remedy(action, ago, index=None):
    return Offence(time=NOW - ago, node="n1", uuid="" if index is None else f"GPU-{index}", remedy=action)


def after(*xids, history=(), findings=()):
    found = judge(evidence(sweep(gpu(0), gpu(1)), xids=xids, history=history, findings=findings))
    return found.gpus["GPU-0"]


@pytest.mark.parametrize(
    ("number", "state", "action"),
    [
        (13, State.healthy, Action.ignore_log),
        (31, State.healthy, Action.ignore_log),
        (43, State.healthy, Action.ignore_log),
        (48, State.failed, None),
        (64, State.failed, None),
        (79, State.failed, Action.reboot_node),
        (95, State.failed, None),
        (119, State.failed, None),
        (9999, State.suspect, Action.diagnose_then_restart),
    ],
)
def test_an_xid_is_judged_by_the_catalogue(number, state, action):
    found = after(xid(number))
    assert found.state is state, found
    assert action in (None, found.action)
    assert f"Xid {number}" in found.reasons[0]


def test_program_faults_that_repeat_are_hardware():
    assert after(xid(31), history=[past(31, 3600)]).state is State.failed
    assert after(xid(31), history=[past(31, 3600, index=1)]).state is State.healthy, "on another GPU: the program"
    assert after(xid(31), history=[past(31, 90_000)]).state is State.healthy, "more than a day ago"
    assert after(xid(31), xid(31, 3.0)).state is State.healthy, "one cause within seconds counts once"
    assert after(xid(13), history=[past(13, 3600)]).state is State.healthy, "nobody knows on which part"


def test_an_xid_that_is_back_after_two_reboots_is_a_replacement():
    history = [past(119, 9000), remedy("reboot_node", 8000), past(119, 7000), remedy("reboot_node", 6000)]
    found = after(xid(119), history=history)
    assert (found.state, found.action, found.severity) == (State.failed, Action.drain_replace, Severity.critical)
    assert after(xid(119), history=history[:2]).action is not Action.drain_replace


def test_a_remedy_clears_what_was_before_it():
    assert after(xid(95, 100)).state is State.failed
    assert after(xid(95, 100), history=[remedy("drain_then_reset_gpu", 50)]).state is State.healthy
    assert after(xid(95, 100), history=[remedy("drain_then_reset_gpu", 50, index=1)]).state is State.failed
    assert after(xid(95, 100), history=[remedy("drain_then_reset_gpu", 200)]).state is State.failed


def test_the_primary_is_blamed_and_not_its_echo():
    found = after(xid(79, 5), xid(45, 4))
    assert any("Xid 79" in reason for reason in found.reasons)
    assert not any("Xid 45" in reason for reason in found.reasons)
    switch = Finding(
        kind="sxid", component="nvswitch", severity=Severity.critical, action=Action.drain_then_reset_gpu,
        why="SXid 20034: a link to a GPU", time=NOW - 2,
    )  # fmt: skip
    node = judge(evidence(sweep(gpu(0), gpu(1)), xids=(xid(79, 5),), findings=(switch,)))
    assert "it follows from" in " ".join(node.verdict.reasons)
    assert node.gpus["GPU-1"].state is State.healthy


def test_five_faults_in_a_day_and_a_lemon():
    history = [past(95, ago) for ago in (4000, 8000, 12000, 16000)]
    assert after(xid(95), history=history).action is Action.drain_replace
    lemon = judge(evidence(sweep(gpu()), history=[remedy("reboot_node", 86_400.0 * day) for day in range(1, 6)]))
    assert (lemon.verdict.state, lemon.verdict.action) == (State.failed, Action.drain_replace)
    tired = judge(evidence(sweep(gpu()), history=[remedy("reboot_node", 86_400.0 * day) for day in range(4, 9)]))
    assert tired.verdict.state is State.healthy


def test_a_finding_of_a_log_is_laid_to_the_gpu_that_it_names():
    seen = Finding(
        kind="xid", xid=95, component="gpu/memory", severity=Severity.high, action=Action.drain_then_reset_gpu,
        why="uncontained", time=NOW - 5, device="PCI:0000:02:00",
    )  # fmt: skip
    node = judge(evidence(sweep(gpu(0), gpu(1)), findings=(seen,), xids=(xid(95, 5, index=1),)))
    assert node.gpus["GPU-1"].state is State.failed
    assert len(node.gpus["GPU-1"].reasons) == 1, "heard by two ways, it is one"
    assert node.gpus["GPU-0"].state is State.healthy


# -- for any samples --------------------------------------------------------------------------------------------------

WORSE = {
    "ecc_uncorrected_volatile": st.integers(0, 5),
    "ecc_corrected_volatile": st.integers(0, 40_000_000),
    "remapped_uncorrected": st.integers(0, 1000),
    "retired_double_bit": st.integers(0, 80),
    "temperature_c": st.floats(20, 110),
    "memory_temperature_c": st.floats(20, 110),
    "silent_s": st.floats(0, 200),
}


@given(name=st.sampled_from(sorted(WORSE)), data=st.data(), rest=st.fixed_dictionaries({}, optional=WORSE))
@settings(max_examples=300, deadline=None)
def test_a_verdict_never_gets_better_when_a_signal_gets_worse(name, data, rest):
    low, high = sorted([data.draw(WORSE[name]), data.draw(WORSE[name])])
    answer = {"answer": Answer.unresponsive} if name == "silent_s" else {}
    better, worse = one(**rest | answer | {name: low}), one(**rest | answer | {name: high})
    assert ORDER.index(worse.state) >= ORDER.index(better.state)
    assert worse.severity.rank <= better.severity.rank


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_order_of_samples_does_not_matter(seed):
    dice = random.Random(seed)
    sweeps = list(
        series(30, step=5.0, temperature_c=lambda _: dice.uniform(60, 95), pcie_replays=lambda _: dice.randint(0, 500))
    )
    xids = [xid(dice.choice([13, 31, 45, 79, 95]), dice.uniform(0, 500), dice.randrange(8)) for _ in range(4)]
    history = [past(dice.choice([13, 31, 95]), dice.uniform(0, 90_000), index=dice.randrange(8)) for _ in range(4)]
    first = judge(evidence(*sweeps, xids=tuple(xids), history=tuple(history)))
    for values in (sweeps, xids, history):
        dice.shuffle(values)
    assert judge(evidence(*sweeps, xids=tuple(xids), history=tuple(history))) == first


@given(silent=st.floats(0, 1e5), driver=st.sampled_from([Driver.silent, Driver.refused, Driver.starting]))
@settings(max_examples=100, deadline=None)
def test_unknown_never_turns_into_failed_without_time(silent, driver):
    found = judge(evidence(sweep(driver=driver, silent_s=silent))).verdict.state
    assert found is (State.failed if silent >= 60 else State.unknown)


def test_an_hour_of_healthy_telemetry_has_no_false_verdict():
    """Noise, saves each few minutes, an idle phase, hot and cold GPUs: a sweep each 5 s, judged over ten minutes each 30 s."""
    dice = random.Random(7)
    window: list[Sweep] = []
    for at in range(0, 3600, 5):
        saving, idle = at % 300 < 20, 1800 <= at < 2100
        gpus = [
            gpu(
                index,
                utilisation_percent=0.0 if saving or idle else min(100.0, dice.gauss(95, 2)),
                temperature_c=dice.gauss(62 + index, 2), power_w=dice.gauss(600, 40),
                memory_used_bytes=int(dice.gauss(60e9, 2e8)),
                clock_reasons=dice.choice([0, 1, 4]) if not idle else 1,
                ecc_corrected_volatile=at // 100, pcie_replays=at // 900,
                pcie_generation=1 if idle else 5,
            )
            for index in range(8)
        ]  # fmt: skip
        window = [*window, sweep(*gpus, time=NOW + at)][-120:]
        if at % 30 == 0:
            found = judge(
                Evidence(
                    now=NOW + at,
                    node="n1",
                    sweeps=tuple(window),
                    hosts=(host(),),
                    training=not idle,
                    training_since=NOW + 2100 if at >= 2100 else None,
                )
            )
            assert found.verdict.state is State.healthy, (at, found.verdict)
