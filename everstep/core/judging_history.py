"""What Xid events, findings of logs and the past say: one cause once, the primary before its echo, and what comes back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from everstep.core.concern import Concern, failed, note, suspect
from everstep.core.gpu import XidEvent
from everstep.core.health import Action, Finding, Severity
from everstep.core.health_policy import HealthPolicy
from everstep.core.log_rules import Row, xids
from everstep.core.record import Record
from everstep.core.xid_lines import pci

NODE = ""
"""Stands for the node where no GPU is meant."""

_GONE = (79, 167)
"""Xids of a GPU that has left the bus: what the switches and its peers report seconds later follows from it."""

_HARDWARE_IF_REPEATED = {13: "part", 31: "gpu"}
_APPLICATION = frozenset(
    {Action.ignore_log, Action.restart_app, Action.fix_app, Action.retry_backoff, Action.follow_primary}
)
_REPLACED = frozenset({Action.drain_replace.value})
_REBOOTED = frozenset({Action.reboot_node.value, Action.drain_replace.value})
_RESET = frozenset({Action.reset_gpu.value, Action.drain_then_reset_gpu.value, *_REBOOTED})


class Offence(Record):
    """Something that happened to a node or GPU, or a `remedy` that was carried out. `uuid` is empty for the node."""

    time: float
    node: str
    uuid: str = NODE
    cause: str = ""
    part: str = ""
    remedy: str = ""


class Hit(NamedTuple):
    """An Xid on a GPU, by whichever way it was heard."""

    time: float
    uuid: str
    xid: int
    part: str
    past: bool


def judge(
    now: float,
    xid_events: Iterable[XidEvent],
    findings: Iterable[Finding],
    history: Sequence[Offence],
    buses: Mapping[str, str],
    policy: HealthPolicy,
) -> Iterator[tuple[str, Concern]]:
    """Concerns by the UUID they are about; `NODE` for the node. `buses` maps PCI addresses to UUIDs."""
    remedies = [one for one in history if one.remedy]
    logged = [(_whose(one, buses), one) for one in findings]
    hits = [Hit(one.time, one.uuid, one.xid, "", past=False) for one in xid_events]
    hits += [Hit(one.time or now, whose, one.xid, "", past=False) for whose, one in logged if one.xid is not None]
    hits += [
        Hit(one.time, one.uuid, int(one.cause[4:]), one.part, past=True)
        for one in history
        if not one.remedy and one.cause.startswith("xid-") and one.cause[4:].isdecimal()
    ]
    bursts = _bursts(hits, policy)
    present = [one for one in bursts if not one.past and not _is_cured(one, remedies)]
    gone = [one for one in present if one.xid in _GONE]
    for one in _primaries(present, policy):
        yield one.uuid, _of_xid(one, bursts, remedies, now, policy)
    for whose, finding in logged:
        if finding.xid is None and not _is_cured(Hit(finding.time or now, whose, 0, "", past=False), remedies):
            if finding.kind.startswith("sxid") and any(abs((finding.time or now) - one.time) <= 60 for one in gone):
                yield NODE, note(f"{finding.why}: it follows from the GPU that left the bus")
            else:
                yield whose, _of_finding(finding)
    lately = [one for one in remedies if now - one.time <= policy.lemon_seconds]
    if len(lately) >= policy.lemon_remedies and not any(one.remedy in _REPLACED for one in lately):
        yield NODE, failed(f"{len(lately)} remedies in seven days: a lemon", Action.drain_replace)


def _whose(finding: Finding, buses: Mapping[str, str]) -> str:
    return buses.get(pci(finding.device), NODE) if finding.device else NODE


def _bursts(hits: Iterable[Hit], policy: HealthPolicy) -> list[Hit]:
    """One hit for each cause until it has been quiet for a while; of what is heard by two ways, the present one."""
    found: list[Hit] = []
    last: dict[tuple[str, int, str], tuple[int, float]] = {}
    for one in sorted(hits, key=lambda one: (one.time, one.past, one.xid, one.uuid, one.part)):
        key = (one.uuid, one.xid, one.part)
        at, before = last.get(key, (-1, float("-inf")))
        if one.time - before > policy.burst_seconds:
            found.append(one)
            at = len(found) - 1
        elif not one.past and found[at].past:
            found[at] = found[at]._replace(past=False)
        last[key] = (at, one.time)
    return found


def _is_cured(one: Hit, remedies: Iterable[Offence]) -> bool:
    """Whether a remedy was carried out since, that cures such a thing."""
    return any(
        remedy.time > one.time and remedy.uuid in (NODE, one.uuid) and remedy.remedy in _RESET for remedy in remedies
    )


def _primaries(present: Sequence[Hit], policy: HealthPolicy) -> Iterator[Hit]:
    """Without those that follow another one on the same GPU within seconds and say only that a process ended."""
    for one in present:
        follows = _row(one.xid).action is Action.follow_primary
        others = (other for other in present if other.uuid == one.uuid and other.xid != one.xid)
        if follows and any(abs(other.time - one.time) <= 60 + policy.echo_seconds for other in others):
            continue
        yield one


def _of_xid(one: Hit, bursts: Sequence[Hit], remedies: Sequence[Offence], now: float, policy: HealthPolicy) -> Concern:
    row = _row(one.xid)
    why = f"Xid {one.xid}: {row.cause}"
    same = [hit for hit in bursts if (hit.uuid, hit.xid) == (one.uuid, one.xid) and hit.time <= one.time]
    if row.action not in _APPLICATION:
        reboots = [remedy for remedy in remedies if remedy.remedy in _REBOOTED and remedy.time < one.time]
        since = [remedy for remedy in reboots if any(hit.time < remedy.time for hit in same)]
        if len(since) >= policy.reboots:
            return failed(f"{why}; it is back after {len(since)} reboots", Action.drain_replace, Severity.critical)
        lately = [hit for hit in bursts if hit.uuid == one.uuid and now - hit.time <= policy.repeat_seconds]
        if sum(1 for hit in lately if _row(hit.xid).action not in _APPLICATION) >= policy.fatal_bursts:
            return failed(f"{why}; {policy.fatal_bursts} faults in a day", Action.drain_replace, Severity.critical)
        if row.action in (Action.log_then_reset_gpu_when_idle, Action.diagnose_then_restart):
            return suspect(why, row.action, row.severity)
        return failed(why, row.action, row.severity)
    by = _HARDWARE_IF_REPEATED.get(one.xid)
    again = [
        hit for hit in same if one.time - hit.time <= policy.repeat_seconds and (by == "gpu" or _same_part(hit, one))
    ]
    if by and len(again) >= policy.repeats:
        where = f" on {one.part}" if one.part else ""
        return failed(f"{why}; {len(again)} times in a day{where}: hardware", Action.drain_then_reset_gpu)
    return note(f"{why}; no fault of the GPU")


def _same_part(hit: Hit, one: Hit) -> bool:
    return bool(one.part) and hit.part == one.part


def _of_finding(finding: Finding) -> Concern:
    if finding.action in _APPLICATION:
        return note(finding.why)
    gpu = finding.component.startswith(("gpu", "nvswitch", "nvlink"))
    if gpu and finding.severity.rank <= Severity.high.rank:
        return failed(finding.why, finding.action, finding.severity)
    return suspect(finding.why, finding.action, finding.severity)


def _row(xid: int) -> Row:
    return xids().get(xid) or Row(
        code=xid, name="", kind="xid", component="gpu", severity=Severity.medium,
        action=Action.diagnose_then_restart, cause="a number that no catalogue has",
    )  # fmt: skip
