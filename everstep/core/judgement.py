"""From samples, Xid events, findings of logs and history to a verdict on a node and each of its GPUs. Pure.

The worst state wins, in the order healthy, unknown, suspect, failed; reasons say why, the worst first. What is not measured
speaks neither for nor against anything; it is listed.
"""

from collections.abc import Iterable

from everstep.core import judging_gpu, judging_history, judging_host
from everstep.core.concern import Concern, failed, unknown, verdict
from everstep.core.gpu import Driver, GpuSample, Sweep, XidEvent, driving
from everstep.core.health import Action, Finding, Severity, State, Verdict
from everstep.core.health_policy import DEFAULT, HealthPolicy
from everstep.core.host import HostSample
from everstep.core.judging_history import NODE, Offence
from everstep.core.record import Record
from everstep.core.xid_lines import pci

__all__ = ["Evidence", "NodeVerdict", "Offence", "judge"]


class Evidence(Record):
    """All that is known about one node at a moment. Samples of any order; times are Unix seconds, UTC.

    `training` says whether a training should be computing now; None: unknown, and utilisation is not judged. What was
    before `training_since` counts as no training: a phase of idleness that has ended is no fault.
    """

    now: float
    node: str
    sweeps: tuple[Sweep, ...] = ()
    hosts: tuple[HostSample, ...] = ()
    xids: tuple[XidEvent, ...] = ()
    findings: tuple[Finding, ...] = ()
    history: tuple[Offence, ...] = ()
    training: bool | None = None
    training_since: float | None = None
    gpus_expected: int | None = None


class NodeVerdict(Record):
    """The verdict on a node, which is never better than that on its worst GPU; and what nobody could measure."""

    time: float
    node: str
    verdict: Verdict
    gpus: dict[str, Verdict] = {}
    not_measured: dict[str, tuple[str, ...]] = {}


def judge(evidence: Evidence, policy: HealthPolicy = DEFAULT) -> NodeVerdict:
    """The verdict on a node and its GPUs. Without any sample nothing is known: unknown, which is not failed."""
    sweeps = sorted(evidence.sweeps, key=lambda one: one.time)
    series = _series(sweeps)
    since = (evidence.training_since or float("-inf")) if evidence.training else None
    concerns: dict[str, list[Concern]] = {NODE: [], **{uuid: [] for uuid in series}}
    for uuid, samples in series.items():
        peers = [other for name, other in series.items() if name != uuid]
        concerns[uuid] += judging_gpu.judge(samples, peers, since, policy)
    hosts = sorted(evidence.hosts, key=lambda one: one.time)
    if hosts:
        concerns[NODE] += judging_host.judge(hosts, policy)
    concerns[NODE] += _driver(sweeps, policy)
    concerns[NODE] += _count(evidence, sweeps, hosts)
    buses = {pci(samples[-1].bus): uuid for uuid, samples in series.items() if samples[-1].bus}
    past = judging_history.judge(evidence.now, evidence.xids, evidence.findings, evidence.history, buses, policy)
    for uuid, concern in past:
        concerns.setdefault(uuid, []).append(concern)
    gpus = {uuid: verdict(found) for uuid, found in concerns.items() if uuid != NODE}
    from_gpus = (
        Concern(one.state, one.severity, one.action, f"{_name(uuid, series)}: {reason}")
        for uuid, one in gpus.items()
        if one.state is not State.healthy
        for reason in one.reasons[:1]
    )
    return NodeVerdict(
        time=evidence.now,
        node=evidence.node,
        verdict=verdict([*concerns[NODE], *from_gpus]),
        gpus=gpus,
        not_measured={uuid: samples[-1].not_measured for uuid, samples in series.items()},
    )


def _series(sweeps: Iterable[Sweep]) -> dict[str, list[GpuSample]]:
    """The samples of each GPU of the newest sweep, oldest first. One that an older sweep alone knows is not here now."""
    found: dict[str, list[GpuSample]] = {}
    newest: tuple[GpuSample, ...] = ()
    for sweep in sweeps:
        newest = sweep.gpus or newest
        for sample in sweep.gpus:
            found.setdefault(sample.uuid, []).append(sample)
    return {uuid: found[uuid] for uuid in sorted({one.uuid for one in newest})}


def _driver(sweeps: list[Sweep], policy: HealthPolicy) -> Iterable[Concern]:
    if not sweeps:
        yield unknown("no sample of its GPUs")
        return
    latest = sweeps[-1]
    state = driving(latest, policy.failed_after_seconds)
    why = latest.why or latest.driver.value
    if state is State.failed:
        yield failed(f"the GPU driver does not answer: {why}", Action.reboot_node, Severity.critical)
    elif state is State.unknown:
        yield unknown("no GPU driver here" if latest.driver is Driver.absent else f"the GPU driver: {why}")


def _count(evidence: Evidence, sweeps: list[Sweep], hosts: list[HostSample]) -> Iterable[Concern]:
    """Whether all GPUs are there, by what was promised and by what the PCI bus shows."""
    if not sweeps or sweeps[-1].driver is not Driver.present:
        return
    there = sum(1 for one in sweeps[-1].gpus if one.index is not None)
    on_bus = len(hosts[-1].pci_gpus) if hosts and hosts[-1].pci_gpus is not None else 0
    if evidence.gpus_expected is not None and there < evidence.gpus_expected:
        yield failed(f"{there} of {evidence.gpus_expected} GPUs are there", Action.reboot_node, Severity.critical)
    elif there < on_bus:
        yield failed(f"the driver shows {there} of the {on_bus} GPUs on the bus", Action.reboot_node, Severity.critical)


def _name(uuid: str, series: dict[str, list[GpuSample]]) -> str:
    index = series[uuid][-1].index if uuid in series else None
    return f"GPU {index}" if index is not None else f"GPU {uuid}"
