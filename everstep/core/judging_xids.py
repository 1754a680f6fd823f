"""Xids from all that reports them, gathered: what was heard by several ways, or again and again, is one burst. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from everstep.core.concern import RUNGS
from everstep.core.gpu import XidEvent
from everstep.core.health import Action, Finding, Severity
from everstep.core.health_policy import HealthPolicy, Limits
from everstep.core.log_rules import Override, xids
from everstep.core.record import Record
from everstep.core.xid_lines import pci

NODE = ""
"""Stands for the node where no GPU is meant."""

_PART = re.compile(r"GPC \d+, TPC \d+|\blink \d+")
_PRIMARY = re.compile(r"\bact on Xid (\d+)")
_XID = re.compile(r"xid-(\d{1,5})")


class Offence(Record):
    """Something that happened to a node or GPU, as the ledger keeps it; one with a `remedy` says that it was carried out.

    `time` in Unix seconds; `uuid` empty for the node as a whole; `cause` such as xid-31, `part` such as GPC 0, TPC 1 or
    link 5, `remedy` the word of an action; `job` the name of the training that ran, where one did.
    """

    time: float
    node: str
    uuid: str = NODE
    cause: str = ""
    part: str = ""
    remedy: str = ""
    job: str = ""


class Weight(IntEnum):
    """What an action says about the hardware."""

    nothing = 0
    program = 1
    doubt = 2
    fault = 3


class Hit(NamedTuple):
    """An Xid on a GPU, by one of the ways in which it is heard. `told` is set where a line said what to do."""

    first: float
    last: float
    uuid: str
    xid: int
    action: Action
    severity: Severity
    component: str
    why: str
    told: bool
    present: bool
    parts: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()


class Burst(NamedTuple):
    """One Xid on one GPU until it has been quiet for a while."""

    first: float
    last: float
    uuid: str
    xid: int
    action: Action
    severity: Severity
    weight: Weight
    why: str
    numbered: bool
    present: bool
    parts: frozenset[str]
    jobs: frozenset[str]


class Heard(NamedTuple):
    """What is told of the present: events of the driver, and findings with the GPU that each is about."""

    now: float
    job: str
    events: Sequence[XidEvent]
    findings: Sequence[tuple[str, Finding]]

    @property
    def lines(self) -> Iterator[tuple[str, Finding]]:
        """The findings that have no Xid number."""
        return (one for one in self.findings if one[1].xid is None)


def weight(action: Action, component: str) -> Weight:
    """What a first move says: whoever has to be reset, rebooted or replaced is at fault, whatever else is said."""
    if action in _FAULTS:
        return Weight.fault
    if action in (Action.ignore_log, Action.follow_primary):
        return Weight.nothing
    ours = (
        component.startswith(("gpu", "nvswitch", "fabricmanager", "host", "network", "collective"))
        or component == "storage"
    )
    if not ours or action in (Action.retry_backoff, Action.fix_app):
        return Weight.program
    hardware = component.startswith(("gpu", "nvswitch"))
    return Weight.doubt if action is not Action.restart_app or hardware else Weight.program


_FAULTS = frozenset({Action.reset_gpu, Action.drain_then_reset_gpu, Action.reboot_node, Action.drain_replace})


def heard(told: Heard, history: Iterable[Offence], policy: HealthPolicy) -> Iterator[Hit]:
    """Every Xid that is known of, now and in the past."""
    reported = sorted((one.xid, one.uuid) for one in told.events)
    job = frozenset((told.job,)) if told.job else frozenset[str]()
    for event in told.events:
        if hit := _plain(event.xid, policy):
            yield hit._replace(
                first=event.time, last=max(event.time, event.last), uuid=event.uuid, present=True, jobs=job
            )
    for whose, finding in told.findings:
        if finding.xid is None:
            continue
        time = told.now if finding.time is None else finding.time
        uuid = whose or next((uuid for xid, uuid in reported if xid == finding.xid), NODE)
        if hit := _of_line(finding, policy):
            yield hit._replace(first=time, last=time, uuid=uuid, jobs=job)
        if (named := _PRIMARY.search(finding.why)) and (hit := _plain(int(named[1]), policy)):
            yield hit._replace(first=time, last=time, uuid=uuid, present=True, jobs=job)
    for one in history:
        found = _XID.fullmatch(one.cause)
        if found and not one.remedy and (hit := _plain(int(found[1]), policy)):
            yield hit._replace(
                first=one.time,
                last=one.time,
                uuid=one.uuid,
                parts=frozenset((one.part,)) if one.part else frozenset(),
                jobs=frozenset((one.job,)) if one.job else frozenset(),
            )


def bursts(hits: Iterable[Hit], limits: Limits) -> list[Burst]:
    """Hits of the same Xid on the same GPU that follow each other closely, as one; in the order of their times."""
    found: dict[tuple[str, int], list[list[Hit]]] = {}
    for hit in sorted(hits, key=_order):
        groups = found.setdefault((hit.uuid, hit.xid), [])
        if groups and hit.first - max(one.last for one in groups[-1]) <= limits.burst_seconds:
            groups[-1].append(hit)
        else:
            groups.append([hit])
    return sorted((_burst(group) for groups in found.values() for group in groups), key=lambda one: one[:4])


def remedies(history: Iterable[Offence], booted: float | None) -> list[Offence]:
    """What was carried out that takes faults away: resets, reboots, replacements. A boot that nobody noted is one, too,
    but no remedy that anybody chose: it does not count among the reboots.
    """
    found = [one for one in history if one.remedy in _FAULTS]
    return [*found, Offence(time=booted, node="")] if booted is not None else found


def _plain(xid: int, policy: HealthPolicy) -> Hit | None:
    """By the catalogue, or by a user's own row; None where they ignore it."""
    row, own = xids().get(xid), policy.xids.get(xid, Override())
    if own.ignore:
        return None
    cause = own.why or (
        row.cause if row else "a number that is in no table that is known here: hold the GPU for inspection"
    )
    return Hit(
        first=0.0,
        last=0.0,
        uuid=NODE,
        xid=xid,
        action=own.action or (row.action if row else Action.diagnose_then_restart),
        severity=own.severity or (row.severity if row else Severity.medium),
        component=own.component or (row.component if row else "gpu"),
        why=f"Xid {xid}: {cause}",
        told=False,
        present=False,
    )


def _of_line(finding: Finding, policy: HealthPolicy) -> Hit | None:
    """What the line says goes before the catalogue; a user's own row before both."""
    own = policy.xids.get(finding.xid or 0, Override())
    if own.ignore:
        return None
    return Hit(
        first=0.0,
        last=0.0,
        uuid=NODE,
        xid=finding.xid or 0,
        action=own.action or finding.action,
        severity=own.severity or finding.severity,
        component=own.component or finding.component,
        why=own.why or finding.why,
        told=True,
        present=True,
        parts=frozenset(_PART.findall(finding.why)),
    )


def _order(hit: Hit) -> tuple[float, float, bool, int, str, int, str]:
    return (hit.first, hit.last, hit.told, hit.xid, hit.uuid, RUNGS.index(hit.action), hit.why)


def _burst(hits: Sequence[Hit]) -> Burst:
    """What a line says goes before the catalogue, the worst before the others; of Xid 154 the last one counts."""
    told = [one for one in hits if one.told] or list(hits)
    if told[0].xid == 154:
        told = [one for one in told if one.first == told[-1].first]
    worst = max(told, key=lambda one: (RUNGS.index(one.action), -one.severity.rank, one.why))
    return Burst(
        first=hits[0].first,
        last=max(one.last for one in hits),
        uuid=worst.uuid,
        xid=worst.xid,
        action=worst.action,
        severity=min((one.severity for one in told), key=lambda severity: severity.rank),
        weight=weight(worst.action, worst.component),
        why=worst.why,
        numbered=worst.told,
        present=any(one.present for one in hits),
        parts=frozenset[str]().union(*(one.parts for one in hits)),
        jobs=frozenset[str]().union(*(one.jobs for one in hits)),
    )


def whose(finding: Finding, buses: Mapping[str, str]) -> str:
    """The GPU that a finding is about, by the address or UUID that it names."""
    if not finding.device:
        return NODE
    return buses.get(
        pci(finding.device.removeprefix("PCI:")), finding.device if finding.device.startswith("GPU-") else NODE
    )
