"""What a monitor says and when: pure, with Hypothesis for the rules that must always hold."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.health import Action, Finding, Severity, State, Verdict
from everstep.core.judgement import NodeVerdict
from everstep.core.ledger import Event
from everstep.core.monitor import (
    QUIET_SECONDS,
    SETTLED_SECONDS,
    ailments,
    cause_of,
    changes,
    of_finding,
    of_xid,
    offences,
    resumed,
)

GPU = "GPU-1"


def event(time, kind, **data):
    return Event(id=f"{time}", time=time, kind=kind, data=data)


def verdict(state, *reasons, action=Action.ignore_log):
    return Verdict(state=state, reasons=reasons, action=action, severity=Severity.high)


def node(at, one=None, own=None):
    own = own or verdict(State.healthy)
    return NodeVerdict(time=at, node="n", verdict=own, gpus={GPU: one} if one else {})


def told(*steps):
    """The kinds that a series of verdicts on one GPU brings, with what was fresh."""
    standing, said = {}, []
    for at, one in steps:
        standing, found = changes(standing, node(at, one))
        said += [(at, change.kind, change.fresh) for change in found]
    return said


HOT = verdict(State.suspect, "86 C: the alarm is at 85 C")
WELL = verdict(State.healthy)


def test_what_gets_worse_is_told_at_once_and_once():
    hotter = verdict(State.suspect, "88 C: the alarm is at 85 C")
    assert told((0, WELL), (1, HOT), (2, hotter), (3, HOT)) == [(1, "everstep.gpu.suspect", HOT.reasons)]


def test_what_gets_better_is_told_when_it_has_stayed_so():
    said = told((0, HOT), *((at, WELL) for at in range(1, 20)))
    assert said == [(0, "everstep.gpu.suspect", HOT.reasons), (1 + SETTLED_SECONDS, "everstep.gpu.healthy", ())]


def test_a_reading_that_wavers_around_a_threshold_is_told_once():
    steps = [(at, HOT if at % 2 else WELL) for at in range(600)]
    assert told(*steps) == [(1, "everstep.gpu.suspect", HOT.reasons)]


def test_another_cause_is_told_although_the_state_stays():
    both = verdict(State.suspect, "NVLink 3 had to recover", *HOT.reasons)
    again = verdict(State.suspect, "NVLink 4 had to recover", *both.reasons)
    said = told((0, HOT), (1, both), (2, both), (3, again))
    assert [fresh for _, _, fresh in said] == [HOT.reasons, both.reasons[:1], again.reasons[:1]]


def test_a_cause_is_told_again_after_three_quiet_minutes():
    noted = verdict(State.healthy, "82 C")
    late = QUIET_SECONDS + 12
    said = told((0, noted), (5, WELL), (60, noted), (60 + late, WELL), (61 + late, noted))
    assert [(at, kind) for at, kind, _ in said] == [(0, "everstep.gpu.note"), (61 + late, "everstep.gpu.note")]


def test_another_remedy_is_told():
    worse = verdict(State.failed, "Xid 79: gone", action=Action.drain_replace)
    said = told((0, verdict(State.failed, "Xid 79: gone", action=Action.reboot_node)), (1, worse))
    assert [kind for _, kind, _ in said] == ["everstep.gpu.failed"] * 2


def test_the_node_says_once_that_it_failed_and_leaves_the_rest_to_its_gpus():
    standing, said = changes({}, node(0, own=verdict(State.failed, "GPU 1: Xid 79")))
    assert [one.kind for one in said] == ["everstep.node.failed"]
    _, said = changes(standing, node(1, own=verdict(State.failed, "GPU 1: Xid 79", "GPU 2: 3 errors")))
    assert said == []


def test_a_small_thing_beside_a_failure_is_no_second_failure():
    """Nobody is woken, or told to reboot, for a clock that turns out to be off on a node that is down already."""
    failed = Verdict(state=State.failed, reasons=("its disk is gone",), severity=Severity.critical)
    standing, said = changes({}, node(0, own=failed))
    assert [(one.kind, one.severity) for one in said] == [("everstep.node.failed", Severity.critical)]
    more = failed.model_copy(update={"reasons": ("its disk is gone", "its clock is not synchronised")})
    _, said = changes(standing, node(1, own=more))
    assert [(one.kind, one.severity) for one in said] == [("everstep.node.note", Severity.medium)]
    assert said[0].fresh == ("its clock is not synchronised",)


def test_figures_are_no_cause_and_names_are():
    assert cause_of("12 uncorrectable errors") == cause_of("13 uncorrectable errors")
    for one, other in (
        ("Xid 31: x", "Xid 13: x"),
        ("on GPC 1, TPC 2", "on GPC 1, TPC 3"),
        ("/data1 full", "/data2 full"),
    ):
        assert cause_of(one) != cause_of(other)


STATES = st.sampled_from(State)
STEPS = st.lists(st.tuples(st.integers(1, 30), STATES, st.sets(st.sampled_from("abcd"))), max_size=40)


@given(STEPS)
def test_what_stands_at_the_end_has_been_told(steps):
    standing, at, last = {}, 0, State.healthy
    for pause, state, reasons in steps:
        at += pause
        standing, said = changes(standing, node(at, verdict(state, *sorted(reasons))))
        last = said[-1].verdict.state if said else last
    final = steps[-1] if steps else (0, State.healthy, set())
    for more in range(3):
        standing, said = changes(standing, node(at + 20 * (more + 1), verdict(final[1], *sorted(final[2]))))
        last = said[-1].verdict.state if said else last
    assert last is final[1]


@given(STATES, st.sets(st.sampled_from("abcd")), st.integers(2, 50))
def test_a_verdict_that_stands_is_told_once(state, reasons, times):
    one = verdict(state, *sorted(reasons))
    assert len(told(*((at, one) for at in range(times)))) == (state is not State.healthy or bool(reasons))


def test_an_xid_is_the_same_cause_by_whichever_way_it_came():
    found = Finding(
        kind="app_exception", xid=13, component="application", severity=Severity.medium, action=Action.restart_app,
        why="Xid 13 on (GPC 1, TPC 2)", time=5.0, device="0000:3b:00",
    )  # fmt: skip
    line = of_finding(found, GPU, 9.0)
    assert line.key == of_xid(13, GPU, 5.1).key
    assert (line.time, line.part, line.event) == (5.0, "GPC 1, TPC 2", "everstep.gpu.xid")
    assert of_xid(9999, GPU, 5.0).action is Action.diagnose_then_restart


def test_the_past_of_a_node_is_read_from_the_ledger():
    events = [
        event(1.0, "everstep.gpu.xid", node="n", uuid=GPU, cause="xid-31", key=f"{GPU} xid-31", part=""),
        event(2.0, "everstep.gpu.xid", node="other", uuid=GPU, cause="xid-79", key="k"),
        event(3.0, "everstep.node.remedy", node="n", remedy="reboot_node"),
        event(
            4.0, "everstep.gpu.failed", node="n", uuid=GPU, state="failed", action="reboot_node", reasons=["Xid 79: x"]
        ),
    ]
    past = offences(events, "n")
    assert [(one.cause, one.remedy) for one in past] == [("xid-31", ""), ("", "reboot_node")]
    standing, seen = resumed(events, "n", 100.0)
    assert standing[GPU].state is State.failed
    assert seen == {f"{GPU} xid-31": 1.0}
    _, said = changes(standing, node(101, verdict(State.failed, "Xid 79: x", action=Action.reboot_node)))
    assert said == [], "a monitor that is started again does not tell it again"


def test_an_xid_is_told_once_whatever_words_there_are_for_it():
    said = told(
        (0, verdict(State.failed, "Xid 154: summary of another Xid")),
        (1, verdict(State.failed, "Xid 154: the driver wants a reset, on GPC 1, TPC 2")),
        (2, verdict(State.failed, "Xid 79: gone", "Xid 154: the driver wants a reset")),
    )
    assert [fresh for _, _, fresh in said] == [("Xid 154: summary of another Xid",), ("Xid 79: gone",)]


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40))
def test_a_monitors_own_trouble_and_its_end_are_told_in_turn(steps):
    told, at, said = {}, 0, []
    for pause, bad in steps:
        at += pause
        told, found = ailments(told, {"writing": "full"} if bad else {}, at)
        said += found.values()
    assert said == [("full", "")[turn % 2] for turn in range(len(said))]
    assert bool(told) == (len(said) % 2 == 1)


def test_a_trouble_that_comes_and_goes_is_told_once():
    told, said = {}, []
    for at in range(100):
        told, found = ailments(told, {"writing": f"{at} rows"} if at % 3 else {}, at)
        said += found.values()
    assert said == ["1 rows"]
