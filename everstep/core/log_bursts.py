"""Findings of one text, gathered: the same cause printed again and again is one finding with a count.

Memory is bounded by kinds and devices, not by lines: a storm costs no more than its first line.
"""

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from everstep.core.health import Action, Finding, Severity
from everstep.core.log_rules import LogPolicy, echo_of
from everstep.core.log_stamps import Stamp
from everstep.core.record import Record
from everstep.core.xid_lines import Read

QUIET_SECONDS = 180.0
"""After so much silence the same line begins another finding. Source: the bursts of NVIDIA's NVSentinel."""

TOGETHER_SECONDS = 600.0
"""So far apart, a line still counts as a detail of another one."""

MOST_DEVICES = 64  # of one kind and number; a node has 16 GPUs and some hundred disks at most
MOST_BURSTS = 64  # of one cause in one text
MOST_UNITS = 16


class Sighting(Record):
    """A finding with what the rules over time need: how often, until when, on which parts, after which other Xid."""

    finding: Finding
    count: int
    last: float | None = None
    units: tuple[str, ...] = ()
    sxid: int | None = None
    primary: int | None = None


@dataclass
class _Burst:
    first: float
    last: float
    count: int = 1
    time: float | None = None
    until: float | None = None
    units: set[str] = field(default_factory=set)

    def takes(self, unit: str) -> None:
        if unit and len(self.units) < MOST_UNITS:
            self.units.add(unit)


@dataclass
class _Cause:
    """All lines of one cause. Bursts of each scale of time are kept in order and never overlap."""

    order: int
    read: Read
    untimed: _Burst = field(default_factory=lambda: _Burst(0.0, 0.0, 0))
    bursts: dict[str, list[_Burst]] = field(default_factory=dict)


_Key = tuple[str, int | None, int | None, str, Action, Severity, int | None]


class Bursts:
    """Takes one understood line after the other; `sightings` gives what they come to."""

    def __init__(self, policy: LogPolicy | None) -> None:
        self._policy = policy
        self._causes: dict[_Key, _Cause] = {}
        self._devices: dict[tuple[str, int | None, int | None], int] = {}

    def add(self, read: Read, stamp: Stamp | None) -> None:
        chosen = self._apply(read)
        if chosen is None:
            return
        key = (chosen.kind, chosen.xid, chosen.sxid, chosen.device, chosen.action, chosen.severity, chosen.primary)
        cause = self._causes.get(key)
        if cause is None:
            group = ("", chosen.xid and -1, None) if chosen.kind == "xid_unknown" else key[:3]
            if self._devices.get(group, 0) >= MOST_DEVICES:
                return
            self._devices[group] = self._devices.get(group, 0) + 1
            cause = self._causes[key] = _Cause(len(self._causes), chosen)
        if (len(chosen.why), chosen.why) > (len(cause.read.why), cause.read.why):
            cause.read = chosen
        if stamp is None:
            burst = cause.untimed
            burst.count += 1
        else:
            burst = _burst(cause.bursts.setdefault(stamp.scale, []), stamp)
        burst.takes(chosen.unit)

    def sightings(self) -> list[Sighting]:
        """In the order in which causes were first printed."""
        found = [one for cause in sorted(self._causes.values(), key=lambda one: one.order) for one in _sightings(cause)]
        by_kind: dict[str, list[Sighting]] = {}
        for one in found:
            by_kind.setdefault(one.finding.kind, []).append(one)
        details = {cause.read.kind for cause in self._causes.values() if cause.read.detail}
        return [one for one in found if not _is_covered(one, by_kind, one.finding.kind in details)]

    def _apply(self, read: Read) -> Read | None:
        override = self._policy.of(read.xid, read.sxid, read.kind) if self._policy else None
        if override is None:
            return read
        if override.ignore:
            return None
        return read._replace(
            severity=override.severity or read.severity,
            action=override.action or read.action,
            component=override.component or read.component,
            why=override.why or read.why,
        )


def _burst(bursts: list[_Burst], stamp: Stamp) -> _Burst:
    """Put one time among the bursts of its scale; whatever the order of lines, the same bursts come out."""
    at = bisect_left(bursts, stamp.seconds, key=lambda one: one.first)
    before = bursts[at - 1] if at else None
    after = bursts[at] if at < len(bursts) else None
    full = len(bursts) >= MOST_BURSTS
    if before is not None and (full or stamp.seconds - before.last <= QUIET_SECONDS):
        before.count += 1
        if stamp.seconds >= before.last:
            before.last, before.until = stamp.seconds, stamp.time
        if after is not None and after.first - before.last <= QUIET_SECONDS:
            before.last, before.until = max((before.last, before.until), (after.last, after.until))
            before.count += after.count
            before.units |= after.units
            del bursts[at]
        return before
    if after is not None and (full or after.first - stamp.seconds <= QUIET_SECONDS):
        after.count += 1
        after.first, after.time = stamp.seconds, stamp.time
        return after
    bursts.insert(at, _Burst(stamp.seconds, stamp.seconds, 1, stamp.time, stamp.time))
    return bursts[at]


def _sightings(cause: _Cause) -> list[Sighting]:
    """One for each burst. Lines whose time is not known belong to the first burst whose time is."""
    wall = cause.bursts.get("wall", [])
    others = [one for scale, bursts in cause.bursts.items() if scale != "wall" for one in bursts]
    bursts, loose = (wall, [cause.untimed, *others]) if wall else (others, [cause.untimed])
    if not bursts:
        return [_sighting(cause, cause.untimed)]
    first = replace(
        bursts[0],
        count=bursts[0].count + sum(one.count for one in loose),
        units=bursts[0].units.union(*(one.units for one in loose)),
    )
    return [_sighting(cause, one) for one in (first, *bursts[1:])]


def _sighting(cause: _Cause, burst: _Burst) -> Sighting:
    read, units = cause.read, tuple(sorted(burst.units)[:MOST_UNITS])
    named = "; ".join(units[:3]) + (" and more" if len(units) > 3 else "")
    why = f"{read.why} ({named})" if units else read.why
    finding = Finding(
        kind=read.kind,
        xid=read.xid,
        component=read.component,
        severity=read.severity,
        action=read.action,
        why=f"{why}; {burst.count:,} lines" if burst.count > 1 else why,
        time=burst.time,
        device=read.device,
    )
    return Sighting(
        finding=finding, count=burst.count, last=burst.until, units=units, sxid=read.sxid, primary=read.primary
    )


def _is_covered(one: Sighting, by_kind: dict[str, list[Sighting]], detail: bool) -> bool:
    """Whether another finding of this text says the same and more: a detail's own cause, or the same fault of the same device."""
    if one.finding.xid is not None or not (detail or one.finding.device):
        return False
    return any(
        (detail or other.finding.device == one.finding.device)
        and other.sxid == one.sxid
        and _are_together(one.finding.time, other)
        for kind in echo_of(one.finding.kind)
        for other in by_kind.get(kind, ())
    )


def _are_together(time: float | None, other: Sighting) -> bool:
    if time is None or other.finding.time is None or other.last is None:
        return True
    return other.finding.time - TOGETHER_SECONDS <= time <= other.last + TOGETHER_SECONDS
