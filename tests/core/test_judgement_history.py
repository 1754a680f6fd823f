"""The judgement of Xid events, findings of logs and history: what counts once, who is blamed, what climbs to the next remedy."""

import pytest
from rigs.telemetry import NOW, evidence, gpu, host, past, remedy, sweep, xid

from everstep.core.gpu import XidEvent
from everstep.core.health import Action, Finding, Severity, State
from everstep.core.health_policy import HealthPolicy
from everstep.core.judgement import judge
from everstep.core.log_rules import Override
from everstep.core.log_stamps import Clock
from everstep.core.logs import classify_log

DAY = 86_400.0


def node(*xids, **more):
    return judge(evidence(sweep(gpu(0), gpu(1)), xids=xids, **more))


def after(*xids, **more):
    return node(*xids, **more).gpus["GPU-0"]


def lines(*texts, ago=5.0):
    """Findings of kernel lines, printed so many seconds ago."""
    return tuple(classify_log("\n".join(f"[{100 + at}.0] NVRM: {text}" for at, text in enumerate(texts)),
                              clock=Clock(boot=NOW - ago - 100, now=NOW)))  # fmt: skip


def finding(kind, component, action, severity=Severity.high, ago=5.0, device=""):
    return Finding(
        kind=kind, component=component, severity=severity, action=action, why=kind, time=NOW - ago, device=device
    )


@pytest.mark.parametrize(
    ("number", "state", "action"),
    [
        (13, State.healthy, Action.ignore_log),
        (31, State.healthy, Action.ignore_log),
        (43, State.healthy, Action.ignore_log),
        (45, State.healthy, Action.ignore_log),
        (48, State.failed, Action.reset_gpu),
        (63, State.suspect, Action.log_then_reset_gpu_when_idle),
        (64, State.failed, Action.reset_gpu),
        (74, State.failed, Action.reset_gpu),
        (79, State.failed, Action.reboot_node),
        (92, State.healthy, Action.ignore_log),
        (94, State.suspect, Action.restart_app),
        (95, State.failed, Action.reset_gpu),
        (119, State.failed, Action.reset_gpu),
        (999, State.suspect, Action.diagnose_then_restart),
    ],
)
def test_an_xid_is_judged_by_the_catalogue(number, state, action):
    """BC-146: faults of programs leave the node in, an unknown number holds the GPU for inspection, without a drain."""
    found = node(xid(number))
    assert (found.gpus["GPU-0"].state, found.gpus["GPU-0"].action) == (state, action), found
    assert f"Xid {number}" in found.gpus["GPU-0"].reasons[0]
    assert found.verdict.state is state
    assert found.gpus["GPU-1"].state is State.healthy


def test_a_user_has_the_last_word_on_an_xid():
    policy = HealthPolicy(xids={63: Override(action=Action.reboot_node), 48: Override(ignore=True)})
    seen = judge(evidence(sweep(gpu()), xids=(xid(63), xid(48))), policy).verdict
    assert (seen.state, seen.action) == (State.failed, Action.reboot_node)
    assert not any("Xid 48" in reason for reason in seen.reasons)


def test_an_xid_31_twice_on_one_gpu_in_a_day_is_hardware():
    assert after(xid(31), history=(past(31, 3600),)).state is State.failed
    assert after(xid(31), history=(past(31, 3600, index=1),)).state is State.healthy, "on another GPU: the program"
    assert after(xid(31), history=(past(31, DAY + 60),)).state is State.healthy, "more than a day ago"
    assert after(xid(31), xid(31, 3.0)).state is State.healthy, "one cause within seconds counts once"
    assert after(history=(past(31, 4000), past(31, 3000))).state is State.failed, "it stands for a day"
    assert after(history=(past(31, 4000), past(31, 3000), remedy("reset_gpu", 2000, 0))).state is State.healthy


def test_an_xid_of_all_gpus_at_once_is_the_programs_however_often():
    crash = [past(31, ago, index=index) for ago in (3600, 1800) for index in (0, 1)]
    assert node(xid(31, index=0), xid(31, index=1), history=tuple(crash)).verdict.state is State.healthy


def test_an_xid_13_twice_on_one_tpc_in_a_day_is_hardware():
    warp = "Xid (PCI:0000:01:00): 13, pid=7, Graphics SM Warp Exception on (GPC {}, TPC {}, SM 0): Out Of Range Address"
    here = lines(warp.format(2, 1))
    assert after(findings=here, history=(past(13, 3600, part="GPC 2, TPC 1"),)).state is State.failed
    assert after(findings=here, history=(past(13, 3600, part="GPC 2, TPC 3"),)).state is State.healthy
    assert after(xid(13), history=(past(13, 3600),)).state is State.healthy, "nobody knows on which part"
    both = after(xid(13, 5), findings=here, history=(past(13, 3600, part="GPC 2, TPC 1"),))
    assert "2 times in a day on GPC 2, TPC 1: hardware" in both.reasons[0]
    two_parts = lines(warp.format(2, 1), warp.format(0, 0))
    assert after(xid(13, 5), findings=two_parts).state is State.healthy, "one cause, heard by two ways, on two parts"


def test_one_code_under_three_jobs_on_one_gpu_escalates():
    """BC-146: a program's fault that follows the GPU and not the program."""
    two = (past(43, 3 * DAY, job="a"), past(43, 2 * DAY, job="b"))
    assert after(xid(43), history=two, job="b").state is State.healthy
    found = after(xid(43), history=two, job="c")
    assert (found.state, found.severity) == (State.suspect, Severity.high)
    assert found.reasons[0] == "Xid 43 under 3 different jobs"


def test_an_xid_that_is_back_after_two_reboots_is_a_replacement():
    history = (past(119, 9000), remedy("reboot_node", 8000), past(119, 7000), remedy("reboot_node", 6000))
    found = after(xid(119), history=history)
    assert (found.state, found.action, found.severity) == (State.failed, Action.drain_replace, Severity.critical)
    assert after(xid(119), history=history[:2]).action is Action.reset_gpu
    assert after(xid(95), history=history).action is Action.reset_gpu, "another Xid"
    replaced = (*history, remedy("drain_replace", 5000))
    assert after(xid(119), history=replaced).action is Action.reset_gpu, "another machine"
    long_ago = tuple(one.model_copy(update={"time": one.time - 40 * DAY}) for one in history)
    assert after(xid(119), history=long_ago).action is Action.reset_gpu


def test_nvlink_three_times_on_one_link_is_a_replacement():
    history = (past(74, 5 * DAY, part="link 3"), past(74, 3 * DAY, part="link 3"))
    link = "Xid (PCI:0000:01:00): 74, pid='<unknown>', NVLink: fatal error detected on link {}(0x10000, 0x0)"
    assert after(findings=lines(link.format(3)), history=history).action is Action.drain_replace
    assert after(findings=lines(link.format(4)), history=history).action is not Action.drain_replace


def test_a_remedy_or_a_boot_clears_what_was_before_it():
    assert after(xid(95, 100)).state is State.failed
    assert after(xid(95, 100), history=(remedy("drain_then_reset_gpu", 50),)).state is State.healthy
    assert after(xid(95, 100), history=(remedy("drain_then_reset_gpu", 50, index=1),)).state is State.failed
    assert after(xid(95, 100), history=(remedy("drain_then_reset_gpu", 200),)).state is State.failed
    assert after(xid(95, 100), history=(remedy("restart_app", 50),)).state is State.failed, "that cures no GPU"
    assert after(xid(95, 100), hosts=(host(uptime_s=50.0),)).state is State.healthy
    assert after(xid(95, 100), hosts=(host(uptime_s=500.0),)).state is State.failed


def test_a_fault_of_the_ledger_stands_for_a_day():
    assert after(history=(past(79, 3600),)).state is State.failed
    assert after(history=(past(79, DAY + 60),)).state is State.healthy


def test_what_a_restart_settles_passes_after_minutes():
    assert after(xid(94, 60)).state is State.suspect
    assert after(xid(94, 1000)).state is State.healthy


def test_the_primary_is_blamed_and_not_its_echo():
    found = after(xid(79, 5), xid(45, 4))
    assert any("Xid 79" in reason for reason in found.reasons)
    assert not any("Xid 45" in reason for reason in found.reasons)
    switch = finding("sxid_fatal", "nvswitch", Action.drain_then_reset_gpu, Severity.critical, 2)
    seen = node(xid(79, 5), xid(74, 3, index=1), findings=(switch,))
    assert seen.gpus["GPU-1"].state is State.healthy, "its link to the GPU that left"
    assert any("it follows from the GPU that left the bus" in reason for reason in seen.verdict.reasons)
    assert [reason for reason in seen.verdict.reasons if reason.startswith("GPU ")] == [f"GPU 0: {found.reasons[0]}"]
    alone = node(findings=(switch,))
    assert alone.verdict.state is State.failed, "by itself it is the switch"
    late = node(xid(79, 500), xid(74, 3, index=1))
    assert late.gpus["GPU-1"].state is State.failed


def test_a_teardown_that_names_its_cause_is_laid_to_it():
    seen = lines("Xid (PCI:0000:01:00): 45, pid=7, name=python, Ch 00000008, caused by previous Xid 95")
    found = after(findings=seen)
    assert found.state is State.failed
    assert "Xid 95" in found.reasons[0]


def test_the_drivers_advice_is_taken_by_its_last_number():
    said = "Xid (PCI:0000:01:00): 154, GPU recovery action changed from {} to {}"
    reset, none = ("0x0 (None)", "0x1 (GPU Reset Required)"), ("0x1 (GPU Reset Required)", "0x0 (None)")
    found = after(xid(154, 5), findings=lines(said.format(*reset)))
    assert (found.state, found.action) == (State.failed, Action.reset_gpu)
    assert after(xid(154, 5), findings=lines(said.format(*reset), said.format(*none))).state is State.healthy
    assert after(findings=(*lines(said.format(*reset), ago=2000), *lines(said.format(*none)))).state is State.healthy
    assert after(xid(154, 5)).state is State.healthy, "the GPU itself reads that nothing is to be done"
    unread = judge(evidence(sweep(gpu(recovery_action=None)), xids=(xid(154, 5),)))
    assert unread.verdict.state is State.suspect


def test_what_the_line_says_goes_before_the_catalogue():
    spent = lines("Xid (PCI:0000:01:00): 64, pid='<unknown>', Row Remapper: no spare rows are left")
    assert after(xid(64, 5), findings=spent).action is Action.drain_replace


def test_an_xid_storm_is_one_cause():
    storm = XidEvent(time=NOW - 300, last=NOW, uuid="GPU-0", xid=31, count=10_000)
    found = after(storm, findings=lines(*["Xid (PCI:0000:01:00): 31, pid=7, MMU Fault"] * 100))
    assert found.state is State.healthy
    assert len(found.reasons) == 1


def test_five_faults_in_a_day_are_a_replacement():
    history = tuple(past(95, ago) for ago in (4000, 8000, 12000, 16000))
    assert after(xid(95), history=history).action is Action.drain_replace
    assert after(xid(95), history=history[1:]).action is Action.reset_gpu
    at_once = tuple(past(number, 4000) for number in (48, 64, 95, 119))
    assert after(xid(95), history=at_once).action is Action.reset_gpu, "one cause in many words"
    cured = (*history, past(95, 600), remedy("reset_gpu", 300, 0))
    assert after(history=cured).action is Action.drain_replace, "resets do not help it"


def test_a_node_with_five_remedies_in_a_week_is_a_lemon():
    weekly = tuple(remedy("reboot_node", DAY * day) for day in range(1, 6))
    found = judge(evidence(sweep(gpu()), history=weekly)).verdict
    assert (found.state, found.action) == (State.failed, Action.drain_replace)
    assert judge(evidence(sweep(gpu()), history=(*weekly, remedy("drain_replace", 60)))).verdict.state is State.healthy
    of_all = tuple(remedy("reset_gpu", 3600, index) for index in range(8))
    assert judge(evidence(sweep(gpu()), history=of_all)).verdict.state is State.healthy, "one reset of eight GPUs"
    assert judge(evidence(sweep(gpu()), history=(remedy("restart_app", 60),) * 9)).verdict.state is State.healthy


def test_a_node_with_several_signals_in_four_weeks_is_a_lemon():
    """After Meta (arXiv 2410.21680): no signal by itself says so."""
    remedies = tuple(remedy("reset_gpu", DAY * day) for day in (10, 14, 18))
    faults = tuple(past(number, DAY * day, index=1) for number, day in ((48, 18.1), (74, 14.1), (119, 10.1)))
    found = judge(evidence(sweep(gpu(0), gpu(1)), history=(*remedies, *faults))).verdict
    assert (found.state, found.action) == (State.suspect, Action.drain_replace)
    for history in (remedies, faults):
        assert judge(evidence(sweep(gpu(0), gpu(1)), history=history)).verdict.state is State.healthy


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (finding("cuda_oom", "application", Action.fix_app), State.healthy),
        (finding("s3_slowdown", "storage/object", Action.retry_backoff), State.healthy),
        (finding("nfs_timeout", "storage/nfs", Action.check_storage), State.healthy),
        (finding("channels_torn_down", "secondary", Action.follow_primary), State.healthy),
        (finding("nccl_watchdog_timeout", "collective", Action.diagnose_then_restart), State.suspect),
        (finding("nic_link_down", "network/nic", Action.check_network), State.suspect),
        (finding("nic_link_down", "network/nic", Action.check_network, ago=1000), State.healthy),
        (finding("disk_medium_error", "host/storage", Action.drain_replace), State.failed),
        (finding("disk_medium_error", "host/storage", Action.drain_replace, ago=1000), State.failed),
        (finding("kernel_panic", "host/kernel", Action.reboot_node), State.failed),
        (finding("no_space", "storage", Action.free_space), State.suspect),
    ],
    ids=lambda value: value.kind if isinstance(value, Finding) else str(value),
)
def test_lines_without_a_number_are_judged_by_whose_fault_they_are(seen, state):
    assert node(findings=(seen,)).verdict.state is state


def test_a_finding_is_laid_to_the_gpu_that_it_names():
    seen = lines("Xid (PCI:0000:02:00): 95, pid=7, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No")
    found = node(xid(95, 5, index=1), findings=seen)
    assert found.gpus["GPU-1"].state is State.failed
    assert len(found.gpus["GPU-1"].reasons) == 1, "heard by two ways, it is one"
    assert found.gpus["GPU-0"].state is State.healthy
    bus = finding("pcie_aer_fatal", "host/pcie", Action.drain_replace, device="0000:02:00.0")
    assert node(findings=(bus,)).gpus["GPU-1"].state is State.failed
    named = finding("xid_unknown", "gpu", Action.reset_gpu, device="GPU-1")
    assert node(findings=(named,)).gpus["GPU-1"].state is State.failed
    elsewhere = node(xid(95, 5, index=1), findings=(seen[0].model_copy(update={"device": ""}),))
    assert len(elsewhere.verdict.reasons) == 1


def test_an_event_of_a_gpu_that_no_sweep_shows_is_not_forgotten():
    found = judge(evidence(sweep(gpu(0)), xids=(xid(79, index=5),)))
    assert found.gpus["GPU-5"].state is State.failed
    assert found.verdict.reasons[0].startswith("GPU GPU-5: ")
