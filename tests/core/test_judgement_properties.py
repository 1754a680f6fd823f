"""What must hold of the judgement for any samples, by the hundred; and an hour of a healthy node."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.telemetry import HEALTHY, LINKS, NOW, evidence, gpu, host, past, remedy, series, sweep, xid

from everstep.core.concern import ORDER, RUNGS
from everstep.core.gpu import REASON_BITS, Answer, Driver
from everstep.core.health import Action, Finding, Severity, State
from everstep.core.host import Clock, Memory, Mount, Pressure, StuckTask
from everstep.core.judgement import Evidence, judge, window

many = settings(max_examples=200, deadline=None)

SIGNALS = {
    "ecc_uncorrected_volatile": st.integers(0, 5),
    "ecc_corrected_volatile": st.integers(0, 40_000_000),
    "remapped_uncorrected": st.integers(0, 1000),
    "retired_single_bit": st.integers(0, 80),
    "retired_double_bit": st.integers(0, 80),
    "retired_pending": st.booleans(),
    "sram_threshold_exceeded": st.booleans(),
    "remap_pending": st.booleans(),
    "remap_failed": st.booleans(),
    "temperature_c": st.floats(20, 110),
    "memory_temperature_c": st.floats(20, 110),
    "recovery_action": st.sampled_from([0, 4]),
    "silent_s": st.floats(0, 200),
}
"""Readings that are worse the higher they are."""

LEVELS = {"pcie_width": st.integers(0, 16), "pcie_generation": st.integers(1, 5), "ecc_enabled": st.booleans()}
"""Readings that are worse the lower they are."""


def is_no_better(worse, better):
    return (
        ORDER.index(worse.state) >= ORDER.index(better.state)
        and worse.severity.rank <= better.severity.rank
        and RUNGS.index(worse.action) >= RUNGS.index(better.action)
    )


@given(name=st.sampled_from(sorted(SIGNALS | LEVELS)), data=st.data(), rest=st.fixed_dictionaries({}, optional=SIGNALS))
@many
def test_a_verdict_never_gets_better_when_a_reading_gets_worse(name, data, rest):
    low, high = sorted([data.draw((SIGNALS | LEVELS)[name]), data.draw((SIGNALS | LEVELS)[name])])
    if name in LEVELS:
        low, high = high, low
    answer = {"answer": Answer.unresponsive} if "silent_s" in (name, *rest) else {}
    found = [judge(evidence(sweep(gpu(**rest | answer | {name: value}), gpu(1)))) for value in (low, high)]
    assert is_no_better(found[1].gpus["GPU-0"], found[0].gpus["GPU-0"])
    assert is_no_better(found[1].verdict, found[0].verdict)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.data())
@many
def test_a_verdict_never_gets_better_when_less_is_computed(levels, data):
    less = [level * data.draw(st.sampled_from([0.0, 0.3, 1.0])) for level in levels]
    found = []
    for values in (levels, less):
        sweeps = [
            sweep(gpu(0, utilisation_percent=value), gpu(1), gpu(2), time=NOW - 12 * ago)
            for ago, value in enumerate(values)
        ]
        found.append(judge(evidence(*sweeps)).gpus["GPU-0"])
    assert is_no_better(found[1], found[0])


@given(st.sets(st.integers(0, 17)), st.sets(st.integers(0, 17)), st.integers(0, 500), st.integers(0, 500))
@many
def test_a_verdict_never_gets_better_when_links_fail(down, more, errors, further):
    found = []
    for broken, count in ((down, errors), (down | more, errors + further)):
        links = tuple(
            link.model_copy(update={"active": link.number not in broken, "crc_errors": count}) for link in LINKS
        )
        found.append(
            judge(evidence(sweep(gpu(), gpu(1), time=NOW - 60), sweep(gpu(links=links), gpu(1)))).gpus["GPU-0"]
        )
    assert is_no_better(found[1], found[0])


FAR_APART = 400.0  # seconds; what is closer may be one cause
xids = st.builds(
    lambda number, at, index: xid(number, at * FAR_APART, index),
    st.sampled_from([13, 31, 43, 48, 63, 74, 79, 94, 95, 119, 9999]),
    st.integers(0, 100),
    st.integers(0, 0),
)
offences = st.builds(
    lambda number, at, part: past(number, at * FAR_APART, part),
    st.sampled_from([13, 31, 48, 74, 79, 94, 119]),
    st.integers(0, 6000),
    st.sampled_from(["", "GPC 0, TPC 1", "link 3"]),
)


@given(st.lists(xids, max_size=4), st.lists(offences, max_size=8), xids, st.lists(offences, max_size=3))
@many
def test_a_verdict_never_gets_better_when_more_has_happened(events, history, event, more):
    before = judge(evidence(sweep(gpu(), gpu(1)), xids=tuple(events), history=tuple(history)))
    after = judge(evidence(sweep(gpu(), gpu(1)), xids=(*events, event), history=(*history, *more)))
    assert is_no_better(after.gpus["GPU-0"], before.gpus["GPU-0"])
    assert is_no_better(after.verdict, before.verdict)


hosts = st.fixed_dictionaries(
    {
        "full": st.floats(0, 100), "waited": st.floats(0, 100), "free": st.floats(0, 100), "stuck": st.floats(0, 900),
        "offset": st.floats(0, 2),
    }
)  # fmt: skip


@given(hosts, st.data())
@many
def test_a_verdict_never_gets_better_when_the_node_gets_worse(values, data):
    name = data.draw(st.sampled_from(sorted(values)))
    worst = {"full": 100, "waited": 100, "free": 0, "stuck": 900, "offset": 2}[name]
    worse = values | {name: values[name] + (worst - values[name]) * data.draw(st.floats(0, 1))}
    found = []
    for one in (values, worse):
        sample = host(
            mounts=(Mount(path="/data", kind="xfs", total_bytes=1_000_000, free_bytes=int(10_000 * (100 - one["full"]))),),
            memory=Memory(total_bytes=1_000_000, available_bytes=int(10_000 * one["free"]),
                          pressure=Pressure(some_10s=0, some_60s=0, full_60s=one["waited"])),
            stuck=(StuckTask(pid=1, task=1, name="python", kernel=False, seconds=one["stuck"]),),
            clock=Clock(source="chrony", offset_s=-one["offset"]),
        )  # fmt: skip
        found.append(judge(evidence(sweep(gpu()), hosts=(sample,))).verdict)
    assert is_no_better(found[1], found[0])


@given(seed=st.integers(0, 1_000_000))
@settings(max_examples=100, deadline=None)
def test_the_order_of_samples_does_not_matter(seed):
    dice = random.Random(seed)
    sweeps = list(
        series(
            30,
            step=5.0,
            temperature_c=lambda _: dice.uniform(60, 95),
            pcie_replays=lambda _: dice.randint(0, 500),
            utilisation_percent=lambda _: dice.uniform(0, 100),
            answer=lambda _: dice.choice(list(Answer)),
        )
    )
    sweeps += [dice.choice(sweeps).model_copy(update={"seconds": 0.02})]  # two of the same time
    nodes = [host(time=NOW - ago, memory=Memory(oom_kills=dice.randint(0, 3))) for ago in range(4)]
    events = [xid(dice.choice([13, 31, 45, 79, 95, 154]), dice.uniform(0, 500), dice.randrange(8)) for _ in range(5)]
    history = [past(dice.choice([13, 31, 95]), dice.uniform(0, 90_000), index=dice.randrange(8)) for _ in range(4)]
    history += [remedy(dice.choice(list(Action)), dice.uniform(0, 90_000)) for _ in range(3)]
    findings = [
        Finding(kind="x", xid=dice.choice([None, 31, 154]), component="gpu", severity=dice.choice(list(Severity)),
                action=dice.choice(list(Action)), why=dice.choice("ab"), time=NOW - dice.randrange(3),
                device="PCI:0000:01:00")
        for _ in range(4)
    ]  # fmt: skip
    groups = {"sweeps": sweeps, "hosts": nodes, "xids": events, "history": history, "findings": findings}

    def verdict():
        return judge(Evidence(now=NOW, node="n1", training=True, **{name: tuple(one) for name, one in groups.items()}))

    first = verdict()
    for values in groups.values():
        dice.shuffle(values)
    assert verdict() == first


silences = st.tuples(
    st.sampled_from([Answer.ok, Answer.unresponsive, Answer.missing, Answer.error]), st.floats(0, 59.9)
)
drivers = st.sampled_from(
    [Driver.present, Driver.silent, Driver.refused, Driver.starting, Driver.starved, Driver.absent]
)


@given(st.lists(silences, min_size=1, max_size=8), drivers, st.floats(0, 59.9), st.booleans(), st.floats(0, 1e7))
@many
def test_unknown_never_turns_into_failed_without_time(gpus, driver, silent, counted, later):
    silent_gpus = [
        gpu(number, answer=answer, silent_s=0.0 if answer is Answer.ok else seconds)
        for number, (answer, seconds) in enumerate(gpus)
    ]
    newest = sweep(*silent_gpus, driver=driver, silent_s=0.0 if driver is Driver.present else silent)
    found = judge(evidence(newest, gpus_expected=len(gpus) if counted else None, now=NOW + later))
    assert State.failed not in {found.verdict.state, *(one.state for one in found.gpus.values())}
    if driver is Driver.present and any(answer is not Answer.ok for answer, _ in gpus):
        assert found.verdict.state is State.unknown


@given(silent=st.floats(60, 1e5), driver=st.sampled_from([Driver.silent, Driver.refused, Driver.starting]))
@many
def test_time_turns_unknown_into_failed(silent, driver):
    assert judge(evidence(sweep(driver=driver, silent_s=silent))).verdict.state is State.failed
    assert judge(evidence(sweep(gpu(answer=Answer.error, silent_s=silent)))).verdict.state is State.failed


@given(
    st.sets(st.sampled_from(sorted(HEALTHY.keys() - {"model"}))), st.integers(1, 40), st.sampled_from([1.0, 10.0, 60.0])
)
@many
def test_what_a_device_lacks_is_never_held_against_it(lacking, count, step):
    without = dict.fromkeys(lacking)
    sweeps = [sweep(gpu(0, **without), gpu(1), time=NOW - step * ago) for ago in range(count)]
    found = judge(evidence(*sweeps))
    assert found.verdict.state is State.healthy, found.verdict
    assert lacking <= set(found.not_measured["GPU-0"])


def test_an_hour_of_healthy_telemetry_has_no_false_verdict():
    """Eight GPUs, a sample each second: noise, one rank that saves while its peers wait for it, saves of all, idle phases
    between trainings, a warm afternoon, errors that are corrected. Judged each third second, and each one after a change.
    """
    dice = random.Random(7)
    kept, began, wrong, changed, before = (), NOW, [], 0, None
    for at in range(3600):
        phase = at % 1200
        training = phase < 1000
        if phase == 0:
            began = NOW + at
        now = {"training": training, "saves": at % 240 < 25, "all_save": at % 720 < 40}
        changed, before = changed if now == before else at, now
        kept = window((*kept, healthy_sweep(dice, at, **now)))
        if at % 3 and at - changed > 5:
            continue
        sample = host(time=NOW + at, memory=Memory(oom_kills=at // 3000), clock=Clock(source="chrony", offset_s=0.002))
        seen = Evidence(
            now=NOW + at,
            node="n1",
            sweeps=kept,
            hosts=(sample,),
            training=training,
            training_since=began,
            gpus_expected=8,
        )
        found = judge(seen)
        states = {found.verdict.state, *(one.state for one in found.gpus.values())}
        if states != {State.healthy}:
            wrong.append((at, found.verdict))
    assert wrong == []


def healthy_sweep(dice, at, *, training, saves, all_save):
    gpus = []
    for index in range(8):
        busy = training and not all_save and not (saves and index == 0)
        gpus.append(
            gpu(
                index,
                utilisation_percent=min(100.0, dice.gauss(95, 3)) if busy else max(0.0, dice.gauss(1, 1)),
                temperature_c=dice.gauss(66 + index + 6 * (at > 1800), 1.5) if busy else dice.gauss(45, 1),
                power_w=dice.gauss(640, 30) if busy else 110.0,
                memory_used_bytes=int(dice.gauss(60e9, 5e8)) if training else 4 << 20,
                clock_reasons=dice.choice([0, REASON_BITS_OF_LOAD]) if busy else 1,
                ecc_corrected_volatile=at // 100,
                pcie_replays=at // 300,
                pcie_generation=5 if busy or dice.random() < 0.5 else 1,
            )
        )
    return sweep(*gpus, time=NOW + at)


REASON_BITS_OF_LOAD = next(bit for reason, bit in REASON_BITS.items() if reason.value == "power_cap")
