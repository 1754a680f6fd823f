"""What verdicts on GPUs mean for the next segment. Pure; properties by Hypothesis."""

from hypothesis import given
from hypothesis import strategies as st
from rigs.telemetry import HEALTHY, NOW, evidence, gpu, sweep, xid

from everstep.core import check
from everstep.core.check import GateReport, Outcome
from everstep.core.gating import (
    AGAIN_SECONDS,
    Door,
    Examined,
    decide_door,
    doubted,
    doubts,
    examined_by,
    is_silent,
    no_numbers,
    of_used,
    passive,
    worst_of,
)
from everstep.core.gpu import Answer, Driver
from everstep.core.health import Action, Severity, State, Verdict
from everstep.core.judgement import judge

HOT = Verdict(state=State.suspect, reasons=("86 C: the alarm is at 85 C",), severity=Severity.medium)
HOTTER = HOT.model_copy(update={"reasons": ("89 C: the alarm is at 85 C",)})
WELL = Verdict(state=State.healthy)
LOST = Verdict(state=State.failed, reasons=("Xid 79",), action=Action.reboot_node, severity=Severity.critical)


def test_a_failed_gpu_that_the_run_uses_closes_the_door_and_another_does_not():
    found = judge(evidence(sweep(*(gpu(one) for one in range(8))), xids=(xid(79, index=2),)))
    newest = sweep(*(gpu(one) for one in range(8)))
    closed = decide_door(of_used(found, newest, {"GPU-2", "GPU-3"}), None, NOW)
    assert closed.door is Door.closed
    assert closed.verdict.action is Action.reboot_node
    assert "Xid 79" in closed.why
    assert decide_door(of_used(found, newest, {"GPU-3"}), None, NOW).door is Door.open
    assert decide_door(of_used(found, newest, ()), None, NOW).door is Door.open


def test_missing_telemetry_closes_the_gate_for_new_segments_until_a_test_and_stops_nobody():
    """BC-140: within three periods it is an alarm; a training that goes on is not stopped for it."""
    silent = sweep(gpu(0, answer=Answer.unresponsive, silent_s=3600.0), gpu(1))
    found = judge(evidence(silent))
    assert found.gpus["GPU-0"].state is State.failed, "the monitor and the end of an attempt say so"
    held = of_used(found, silent, {"GPU-0"})
    assert decide_door(held, None, NOW).door is Door.hold
    assert "telemetry is silent for 3600 s" in decide_door(held, None, NOW).why
    tested = examined_by(GateReport(gate="active", time=NOW), held, None)
    later = sweep(gpu(0, answer=Answer.unresponsive, silent_s=3700.0, why="the driver hung in it"))
    assert decide_door(of_used(judge(evidence(later)), later, {"GPU-0"}), tested, NOW + 100).door is Door.open
    gone = sweep(gpu(0), driver=Driver.silent, why="no answer", silent_s=3600.0)
    assert decide_door(of_used(judge(evidence(gone)), gone, {"GPU-0"}), None, NOW).door is Door.hold


def test_a_moment_without_an_answer_holds_nobody_and_the_last_evidence_stays():
    short = sweep(gpu(0, answer=Answer.unresponsive, silent_s=4.0))
    assert of_used(judge(evidence(short)), short, {"GPU-0"})["GPU-0"].state is State.unknown
    sick = sweep(gpu(0, ecc_uncorrected_volatile=2), time=NOW - 10)
    blank = dict.fromkeys(HEALTHY.keys() - {"model"})
    silent = sweep(gpu(0, answer=Answer.unresponsive, silent_s=10.0, **blank))
    found = judge(evidence(sick, silent))
    assert decide_door(of_used(found, silent, {"GPU-0"}), None, NOW).door is Door.closed


def test_a_test_that_could_not_be_made_is_tried_again_unless_silence_is_all():
    """BC-151: inconclusive is not unhealthy."""
    assert not is_silent({"GPU-0": HOT})
    assert is_silent({"GPU-0": HOT.model_copy(update={"reasons": ("telemetry is silent for 20 s",)}), "GPU-1": WELL})


def test_a_suspect_gpu_is_tested_first_and_the_same_cause_not_again():
    hot = {"GPU-0": HOT, "GPU-1": WELL}
    assert decide_door(hot, None, NOW).door is Door.hold
    assert decide_door(hot, None, NOW, may_test=False).door is Door.open
    well = GateReport(gate="active", time=NOW, checks=(check.passed("values", "exact", uuid="GPU-0"),))
    tested = examined_by(well, hot, None)
    assert decide_door(hot, tested, NOW + 60).door is Door.open
    assert decide_door({"GPU-0": HOTTER}, tested, NOW + 60).door is Door.open, "figures are no new cause"
    other = HOT.model_copy(update={"reasons": (*HOT.reasons, "NVLink 3 had to recover")})
    assert decide_door({"GPU-0": other}, tested, NOW + 60).door is Door.hold
    assert decide_door(hot, tested, NOW + AGAIN_SECONDS).door is Door.hold


def test_a_gpu_that_fails_its_test_is_out_and_the_others_are_not():
    wrong = check.failed("matmul values", "exact", "3 of 1,024 are wrong", uuid="GPU-0", wrong=3)
    slow = check.failed("memory bandwidth", "1,905 GB/s at least", "900 GB/s", uuid="GPU-1", gb_per_second=900.0)
    report = GateReport(gate="active", time=NOW, checks=(wrong, slow, check.passed("values", "exact", uuid="GPU-2")))
    hot = {f"GPU-{one}": HOT for one in range(3)}
    tested = examined_by(report, hot, None)
    assert set(tested.condemned) == {"GPU-0", "GPU-1"}
    assert tested.condemned["GPU-0"].action is Action.drain_replace
    assert tested.condemned["GPU-1"].action is Action.drain_then_reset_gpu
    closed = decide_door(hot, tested, NOW + 1)
    assert closed.door is Door.closed
    assert closed.verdict.action is Action.drain_replace
    assert decide_door({"GPU-2": HOT}, tested, NOW + 1).door is Door.open


def test_what_a_test_could_not_measure_condemns_nobody():
    none = GateReport(gate="active", time=NOW, checks=(check.not_measured("values", "exact", "no answer in 20 s"),))
    tested = examined_by(none, {"GPU-0": HOT}, None)
    assert not tested.condemned
    assert decide_door({"GPU-0": HOT}, tested, NOW + 1).door is Door.open


def test_the_passive_gate_says_what_was_measured():
    newest = sweep(gpu(0), gpu(1, temperature_c=91.0), gpu(2, answer=Answer.unresponsive, silent_s=5.0))
    found = judge(evidence(newest))
    checks, verdict = passive(found, newest, {"GPU-0", "GPU-1", "GPU-2"}, {"GPU-0": "GPU 0"}, "")
    said = {one.name: one.outcome for one in checks}
    assert said["GPU 0"] is Outcome.passed
    assert said["GPU GPU-1"] is Outcome.failed
    assert said["GPU GPU-2"] is Outcome.not_measured
    assert verdict.state in (State.suspect, State.failed)
    assert passive(None, None, (), {}, "no GPU driver here")[0][0].why == "no GPU driver here"
    assert passive(found, newest, (), {}, "")[0][0].outcome is Outcome.not_measured


def test_what_a_sick_gpu_may_have_caused_puts_it_in_doubt():
    slow = check.failed("slow_rank", "no slower than 1/0.7 of its peers", "rank 1 needs 0.9 s", rank=1)
    drop = check.failed("throughput", "80 % of its own", "70 %")
    flat = check.failed("plateau", "gains", "none")
    gpus = {0: "GPU-0", 1: "GPU-1"}

    def doubted_by(*checks, gate="training"):
        return [uuid for uuid, _ in doubts(GateReport(gate=gate, time=NOW, checks=checks), set(gpus.values()), gpus)]

    assert doubted_by(slow, flat) == ["GPU-1"]
    assert doubted_by(drop) == ["GPU-0", "GPU-1"]
    assert doubted_by(flat) == []
    assert doubted_by(check.failed("rows", "half", "none came"), gate="telemetry") == []
    found = doubted({"GPU-0": WELL, "GPU-1": LOST}, {"GPU-0": ("training: throughput: 70 %",), "GPU-1": ("x",)})
    assert found["GPU-0"].state is State.suspect
    assert found["GPU-1"] is LOST
    held = {"GPU-0": found["GPU-0"]}
    assert decide_door(held, None, NOW).door is Door.hold
    tested = examined_by(GateReport(gate="active", time=NOW), held, None)
    again = doubted({"GPU-0": WELL}, {"GPU-0": ("training: throughput: 65 %",)})
    assert decide_door(again, tested, NOW + 60).door is Door.open, "it was tested for that an hour ago at most"


def test_numbers_that_are_none_are_named():
    def report(*checks):
        return GateReport(gate="training", time=0.0, checks=checks)

    def losses(measured, run):
        return check.failed("finite_loss", "finite", "nan", measured=measured, longest_run=run)

    slow = check.failed("throughput", "80 % of its own", "70 %")
    assert no_numbers(report(losses(500, 20), slow)) == "finite loss: nan"
    assert no_numbers(report(losses(3, 3))) == "finite loss: nan"
    assert no_numbers(report(losses(500, 2), slow)) == "", "a program may skip a bad step by itself"
    assert no_numbers(report(losses(1, 1))) == ""
    assert no_numbers(report(check.failed("finite_weights", "finite", "inf"))) == "finite weights: inf"
    assert no_numbers(report(slow)) == ""


STATES = st.builds(
    lambda state, reason: Verdict(state=state, reasons=(reason,)), st.sampled_from(State), st.sampled_from("abc")
)
VERDICTS = st.dictionaries(st.sampled_from(["G0", "G1", "G2"]), STATES, max_size=3)
ORDER = (Door.open, Door.hold, Door.closed)


@given(VERDICTS, st.sampled_from(["G0", "G1", "G2"]))
def test_a_worse_verdict_never_opens_the_door(verdicts, uuid):
    order = (State.healthy, State.unknown, State.suspect, State.failed)
    before = decide_door(verdicts, None, NOW).door
    state = verdicts[uuid].state if uuid in verdicts else State.healthy
    for worse in order[order.index(state) :]:
        after = decide_door(verdicts | {uuid: Verdict(state=worse, reasons=("x",))}, None, NOW).door
        assert ORDER.index(after) >= ORDER.index(before)
        assert worst_of(verdicts | {uuid: Verdict(state=worse)}, None).state in State


@given(VERDICTS)
def test_nothing_but_failed_closes_it_and_unknown_holds_nobody(verdicts):
    door = decide_door(verdicts, None, NOW).door
    states = {one.state for one in verdicts.values()}
    assert (door is Door.closed) == (State.failed in states)
    if not states & {State.failed, State.suspect}:
        assert door is Door.open


@given(VERDICTS)
def test_after_a_passed_test_the_same_verdicts_hold_nobody(verdicts):
    fine = {uuid: one for uuid, one in verdicts.items() if one.state is not State.failed}
    report = GateReport(gate="active", time=NOW, checks=())
    tested = examined_by(report, fine, None)
    assert isinstance(tested, Examined)
    assert decide_door(fine, tested, NOW + 1).door is Door.open
