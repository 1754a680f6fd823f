"""From samples, Xid events, findings of logs and history to a verdict on a node and each of its GPUs. Pure.

The worst state wins, in the order healthy, unknown, suspect, failed; reasons say why, the worst first. What is not measured
speaks neither for nor against anything; it is listed. Unknown turns into failed by time alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TypeVar

from pydantic import Field

from everstep.core import judging_gpu, judging_history, judging_host, judging_work
from everstep.core.concern import Concern, failed, note, unknown, verdict
from everstep.core.gpu import Driver, GpuSample, Sweep, XidEvent, driving
from everstep.core.health import Action, Finding, Severity, State, Verdict
from everstep.core.health_policy import DEFAULT, HealthPolicy, Limits
from everstep.core.host import HostSample
from everstep.core.judging_xids import NODE, Heard, Offence, whose
from everstep.core.record import Record
from everstep.core.xid_lines import pci

__all__ = ["Evidence", "NodeVerdict", "Offence", "judge", "window"]

_FINE = 60  # of the newest sweeps, all are kept in a window
_COARSE_SECONDS = 10.0  # and one for each so many seconds before them
_AT_LEAST_SECONDS = 10.0  # a busy machine may delay a sampler by so much
_PLACEHOLDER = "unknown-"

_Dated = TypeVar("_Dated", Sweep, HostSample)


class Evidence(Record):
    """All that is known about one node at a moment. Times are Unix seconds, UTC; samples may come in any order.

    Samples have to reach back as far as the longest duration of the policy (`window` keeps such ones, and few).
    """

    now: float
    node: str
    sweeps: tuple[Sweep, ...] = ()
    hosts: tuple[HostSample, ...] = ()
    xids: tuple[XidEvent, ...] = ()
    findings: tuple[Finding, ...] = ()
    history: tuple[Offence, ...] = Field(default=(), description="earlier offences and remedies of node and GPUs")
    training: bool | None = Field(default=None, description="whether a training should be computing now; None: unknown")
    training_since: float | None = Field(
        default=None, description="when it began to compute; None: as long as samples reach"
    )
    training_gpus: tuple[str, ...] | None = Field(
        default=None, description="UUIDs that it uses; None: those with memory in use"
    )
    gpus_expected: int | None = None
    job: str = Field(default="", description="the name of the training that runs, for faults that follow programs")


class NodeVerdict(Record):
    """The verdict on a node, which is never better than that on its worst GPU; and what could not be measured.

    `gpus` by UUID; `not_measured` by UUID, and what the node did not give under `node`.
    """

    time: float
    node: str
    verdict: Verdict
    gpus: dict[str, Verdict] = {}
    not_measured: dict[str, tuple[str, ...]] = {}


def judge(evidence: Evidence, policy: HealthPolicy = DEFAULT) -> NodeVerdict:
    """The verdict on a node and its GPUs. Without any sample nothing is known: unknown, which is not failed."""
    limits = policy.of()
    sweeps, hosts = _in_order(evidence.sweeps), _in_order(evidence.hosts)
    series = _series(sweeps)
    concerns: dict[str, list[Concern]] = {NODE: [], **{uuid: [] for uuid in series}}
    for uuid, samples in series.items():
        concerns[uuid] += judging_gpu.judge(samples, policy, has_peers=len(series) > 1)
        concerns[uuid] += _gone(samples[-1], sweeps[-1], policy)
    if evidence.training:
        for uuid, concern in judging_work.judge(series, evidence.training_since, evidence.training_gpus, policy):
            concerns[uuid].append(concern)
    if hosts:
        concerns[NODE] += judging_host.judge(hosts, policy)
    concerns[NODE] += _telemetry(evidence, sweeps, limits)
    if sweeps:
        concerns[NODE] += _count(evidence, len(series), sweeps[-1], hosts)
    for uuid, concern in _past(evidence, series, hosts, policy):
        concerns.setdefault(uuid, []).append(concern)
    gpus = {uuid: verdict(found) for uuid, found in concerns.items() if uuid != NODE}
    return NodeVerdict(
        time=evidence.now,
        node=evidence.node,
        verdict=verdict([*concerns[NODE], *_of_gpus(gpus, series)]),
        gpus=gpus,
        not_measured=_not_measured(series, hosts),
    )


def window(sweeps: Sequence[Sweep], policy: HealthPolicy = DEFAULT) -> tuple[Sweep, ...]:
    """The sweeps, oldest first, that are worth keeping for `judge`: the newest ones, and some of those before them.

    They reach back as far as the longest duration of the policy. Bounded: at most 130 by the default policy.
    """
    found = _in_order(sweeps)
    if not found:
        return ()
    oldest = found[-1].time - policy.of().longest_seconds - 2 * _COARSE_SECONDS
    coarse = {int(one.time // _COARSE_SECONDS): one for one in reversed(found[:-_FINE]) if one.time >= oldest}
    return (*sorted(coarse.values(), key=lambda one: one.time), *found[-_FINE:])


def _in_order(records: Sequence[_Dated]) -> list[_Dated]:
    """Oldest first, in an order of their own where times are equal."""
    if len({one.time for one in records}) == len(records):
        return sorted(records, key=lambda one: one.time)
    return sorted(records, key=lambda one: (one.time, one.model_dump_json()))


def _series(sweeps: Sequence[Sweep]) -> dict[str, list[GpuSample]]:
    """The samples of each GPU, oldest first. A stand-in for a name that a GPU had not told counts while it is listed."""
    found: dict[str, list[GpuSample]] = {}
    for sweep in sweeps:
        for sample in sweep.gpus:
            found.setdefault(sample.uuid, []).append(sample)
    there = {sample.uuid for sample in sweeps[-1].gpus} if sweeps else set()
    return {uuid: found[uuid] for uuid in sorted(found) if uuid in there or not uuid.startswith(_PLACEHOLDER)}


def _gone(last: GpuSample, newest: Sweep, policy: HealthPolicy) -> Iterator[Concern]:
    """A GPU of which the newest sweep says nothing: nobody could ask, or it is listed no more."""
    if any(one.uuid == last.uuid for one in newest.gpus):
        return
    silent = max(0.0, newest.time - last.time)
    if newest.driver is Driver.present and silent >= policy.of(last.model).failed_after_seconds:
        yield failed("it is missing", Action.reboot_node, Severity.critical)
    else:
        yield unknown(f"nothing is known of it for {silent:.0f} s")


def _telemetry(evidence: Evidence, sweeps: Sequence[Sweep], limits: Limits) -> Iterator[Concern]:
    """Whether anything is known of the GPUs, how old it is, and how the driver answered."""
    if not sweeps:
        if evidence.gpus_expected != 0:
            yield unknown("no sample of its GPUs")
        return
    latest, age = sweeps[-1], evidence.now - sweeps[-1].time
    if age > _silent_after(sweeps, limits):
        yield unknown(f"telemetry is silent on this node for {age:.0f} s")
    state = driving(latest, limits.failed_after_seconds)
    why = latest.why or latest.driver.value
    if state is State.failed:
        yield failed(f"the GPU driver does not answer: {why}", Action.reboot_node, Severity.critical)
    elif latest.driver is Driver.absent and evidence.gpus_expected == 0:
        return
    elif state is State.unknown:
        yield unknown("there is no GPU driver here" if latest.driver is Driver.absent else f"the GPU driver: {why}")
    if latest.left_behind:
        yield note(f"{latest.left_behind} probes hang in the driver for ever")


def _silent_after(sweeps: Sequence[Sweep], limits: Limits) -> float:
    """Three periods, where the newest sweeps show the period."""
    times = [one.time for one in sweeps[-9:]]
    gaps = [after - before for before, after in pairwise(times) if after > before]
    if len(gaps) < 2:
        return limits.silent_seconds
    return min(limits.silent_seconds, max(_AT_LEAST_SECONDS, limits.silent_periods * median(gaps)))


def _count(evidence: Evidence, known: int, newest: Sweep, hosts: Sequence[HostSample]) -> Iterator[Concern]:
    """Whether all GPUs are there. Of those that were, and are not listed now, their own samples tell."""
    if newest.driver is not Driver.present:
        return
    if evidence.gpus_expected is not None and known < evidence.gpus_expected:
        why = f"{known} of {evidence.gpus_expected} GPUs are there"
        yield failed(why, Action.reboot_node, Severity.critical)
    on_bus = len(hosts[-1].pci_gpus or ()) if hosts else 0
    if evidence.gpus_expected is None and known < on_bus:  # a container sees all on the bus, and is given some of them
        yield note(f"the driver lists {known} of the {on_bus} GPUs on the bus")


def _past(
    evidence: Evidence, series: Mapping[str, Sequence[GpuSample]], hosts: Sequence[HostSample], policy: HealthPolicy
) -> Iterator[tuple[str, Concern]]:
    if not (evidence.xids or evidence.findings or evidence.history):
        return iter(())
    buses = {pci(one.bus): one.uuid for one in evidence.xids if one.bus}
    buses |= {pci(samples[-1].bus): uuid for uuid, samples in series.items() if samples[-1].bus}
    findings = [(whose(one, buses), one) for one in evidence.findings]
    told = Heard(evidence.now, evidence.job, evidence.xids, findings)
    advised = {uuid: samples[-1].recovery_action for uuid, samples in series.items()}
    uptime = hosts[-1].uptime_s if hosts else None
    booted = None if uptime is None else hosts[-1].time - uptime
    return judging_history.judge(told, evidence.history, advised, booted, policy)


def _of_gpus(gpus: Mapping[str, Verdict], series: Mapping[str, Sequence[GpuSample]]) -> Iterator[Concern]:
    """What is wrong with its GPUs is wrong with the node; notes stay with the GPU."""
    for uuid, one in gpus.items():
        if one.state is not State.healthy:
            index = series[uuid][-1].index if uuid in series else None
            name = f"GPU {uuid}" if index is None else f"GPU {index}"
            yield Concern(one.state, one.severity, one.action, f"{name}: {one.reasons[0]}")


def _not_measured(series: Mapping[str, Sequence[GpuSample]], hosts: Sequence[HostSample]) -> dict[str, tuple[str, ...]]:
    found = {
        uuid: (*samples[-1].not_measured, *(() if samples[-1].events_heard is not False else ("events",)))
        for uuid, samples in series.items()
    }
    if hosts:
        groups = ("mounts", "memory", "stuck", "clock", "nics", "ports")
        found["node"] = tuple(name for name in groups if getattr(hosts[-1], name) is None)
    return found
