"""What Xid events, findings of logs and the past say of GPUs and node. Pure.

One cause counts once, by whichever ways it was heard; the primary is blamed and not its echo; what comes back after its
remedy climbs to the next one. A fault stands until a remedy was carried out, or for a day.
"""

from collections.abc import Iterator, Mapping, Sequence

from everstep.core.concern import Concern, failed, note, suspect
from everstep.core.health import Action, Finding, Severity
from everstep.core.health_policy import HealthPolicy, Limits
from everstep.core.judging_xids import NODE, Burst, Heard, Offence, Weight, bursts, heard, remedies, weight

_HARDWARE_IF_REPEATED = {13: "part", 31: "gpu"}
_GONE = frozenset({79, 167})
_OF_LINKS = frozenset({74, 136, *range(144, 151)})
_ADVICE = 154
_REBOOTS = frozenset({Action.reboot_node, Action.drain_replace})


def judge(
    told: Heard,
    history: Sequence[Offence],
    advised: Mapping[str, int | None],
    booted: float | None,
    policy: HealthPolicy,
) -> Iterator[tuple[str, Concern]]:
    """Concerns by the UUID that they are about; `NODE` for the node.

    `advised` are the recovery numbers that the GPUs themselves read; `booted` is when the node came up, if known.
    """
    limits = policy.of()
    past = _Past(told.now, bursts(heard(told, history, policy), limits), remedies(history, booted), limits)
    for burst in past.standing:
        if concern := _of_burst(burst, past, advised.get(burst.uuid)):
            yield burst.uuid, concern
    for whose, finding in told.lines:
        if concern := _of_finding(whose, finding, past):
            yield whose, concern
    for uuid in {burst.uuid for burst in past.bursts}:
        for concern in _of_gpu(uuid, past):
            yield uuid, concern
    for concern in _of_node(past):
        yield NODE, concern


class _Past:
    """Bursts and remedies, with what stands of them now."""

    def __init__(self, now: float, found: Sequence[Burst], carried_out: Sequence[Offence], limits: Limits) -> None:
        self.now = now
        self.remedies = carried_out
        self.limits = limits
        self.bursts = [
            burst for burst in found if burst.last > self.replaced(burst.uuid)
        ]  # another GPU has another past
        self.gone = [burst for burst in self.bursts if burst.xid in _GONE]
        self.standing = [burst for burst in self.bursts if self._stands(burst)]

    def cured(self, whose: str, time: float) -> bool:
        """Whether a reset, a reboot or a replacement came after."""
        return any(one.time > time and one.uuid in (NODE, whose) for one in self.remedies)

    def replaced(self, whose: str) -> float:
        """When the GPU or the node was last replaced."""
        times = (one.time for one in self.remedies if one.remedy == Action.drain_replace and one.uuid in (NODE, whose))
        return max(times, default=float("-inf"))

    def lately(self, uuid: str, seconds: float) -> list[Burst]:
        return [burst for burst in self.bursts if burst.uuid == uuid and self.now - burst.last <= seconds]

    def follows(self, whose: str, time: float) -> Burst | None:
        """The GPU that left the bus shortly before, of which an error elsewhere is the echo."""
        near = (one for one in self.gone if one.uuid != whose and _is_echo(one.first, time, self.limits))
        return next(near, None)

    def _stands(self, burst: Burst) -> bool:
        passing = burst.action in _PASSING and burst.xid not in _HARDWARE_IF_REPEATED
        seconds = self.limits.passing_seconds if passing else self.limits.fault_seconds
        return self.now - burst.last <= seconds and not self.cured(burst.uuid, burst.last)


_PASSING = frozenset({Action.restart_app, Action.ignore_log, Action.follow_primary, Action.fix_app})
"""What a restart of the program settles."""


def _is_echo(primary: float, time: float, limits: Limits) -> bool:
    """Whether `time` lies shortly after the primary; clocks of two reporters differ by some seconds."""
    return -5.0 <= time - primary <= limits.echo_seconds


def _of_burst(burst: Burst, past: _Past, advised: int | None) -> Concern | None:
    if burst.action is Action.follow_primary and _has_primary(burst, past):
        return None
    if burst.xid == _ADVICE:
        return _of_advice(burst, past, advised)
    if burst.xid in _OF_LINKS and (primary := past.follows(burst.uuid, burst.first)):
        return note(f"{burst.why}: it follows from GPU {primary.uuid}, which left the bus")
    if burst.weight is Weight.fault:
        return _of_fault(burst, past)
    repeated = _repeated(burst, past)
    if repeated:
        return repeated
    if burst.weight is Weight.doubt:
        return suspect(burst.why, burst.action, burst.severity)
    if not burst.present:
        return None
    return note(f"{burst.why}; no fault of the GPU" if burst.weight is Weight.program else burst.why)


def _has_primary(burst: Burst, past: _Past) -> bool:
    others = (one for one in past.bursts if one.uuid == burst.uuid and one.xid != burst.xid)
    return any(
        _is_echo(one.first, burst.last, past.limits) or _is_echo(one.last, burst.first, past.limits) for one in others
    )


def _of_advice(burst: Burst, past: _Past, advised: int | None) -> Concern | None:
    """Xid 154 by the last number that it printed; without one by the number that the GPU itself reads."""
    if burst is not max((one for one in past.bursts if (one.uuid, one.xid) == (burst.uuid, _ADVICE)), key=_when):
        return None
    if burst.weight is Weight.fault:
        return failed(burst.why, burst.action, burst.severity)
    if burst.numbered or advised is not None:
        return note(burst.why)
    return suspect(burst.why, burst.action, burst.severity)


def _when(burst: Burst) -> float:
    return burst.last


def _of_fault(burst: Burst, past: _Past) -> Concern:
    """A fault of the hardware: its own remedy, and a replacement where that has been tried."""
    limits = past.limits
    same = [one for one in past.lately(burst.uuid, limits.return_seconds) if one.xid == burst.xid]
    reboots = [
        one
        for one in past.remedies
        if one.remedy in _REBOOTS and one.time < burst.first and any(before.last < one.time for before in same)
    ]
    if len(reboots) >= limits.reboots:
        why = f"{burst.why}; it is back after {len(reboots)} reboots"
        return failed(why, Action.drain_replace, Severity.critical)
    links = [part for part in burst.parts if part.startswith("link ")]
    for link in sorted(links):
        times = sum(1 for one in same if link in one.parts)
        if times >= limits.link_repeats:
            return failed(f"{burst.why}; {times} times on {link}", Action.drain_replace, Severity.critical)
    return failed(burst.why, burst.action, burst.severity)


def _repeated(burst: Burst, past: _Past) -> Concern | None:
    """A fault of programs that comes again in the same place is one of the hardware.

    Where several GPUs of the node had it at the same time it is the program that they all run: that does not count.
    """
    by, limits = _HARDWARE_IF_REPEATED.get(burst.xid), past.limits
    if by is None:
        return None
    alone = [
        one
        for one in past.lately(burst.uuid, limits.repeat_seconds)
        if one.xid == burst.xid and not _is_shared(one, past) and (by == "gpu" or one.parts & burst.parts)
    ]
    if burst not in alone or len(alone) < limits.repeats:
        return None
    where = f" on {', '.join(sorted(burst.parts))}" if by == "part" else ""
    why = f"{burst.why}; {len(alone)} times in a day{where}: hardware"
    return failed(why, Action.drain_then_reset_gpu)


def _is_shared(burst: Burst, past: _Past) -> bool:
    return any(
        one.xid == burst.xid and one.uuid not in (burst.uuid, NODE) and one.first - past.limits.echo_seconds <= burst.last
        and burst.first <= one.last + past.limits.echo_seconds
        for one in past.bursts
    )  # fmt: skip


def _of_finding(whose: str, finding: Finding, past: _Past) -> Concern | None:
    """A line of a log that has no Xid number."""
    time = past.now if finding.time is None else finding.time
    means = weight(finding.action, finding.component)
    seconds = past.limits.fault_seconds if means is Weight.fault else past.limits.passing_seconds
    if past.now - time > seconds or past.cured(whose, time):
        return None
    if finding.kind.startswith("sxid") and past.follows(whose, time):
        return note(f"{finding.why}: it follows from the GPU that left the bus")
    if means is Weight.fault:
        return failed(finding.why, finding.action, finding.severity)
    if means is Weight.doubt:
        return suspect(finding.why, finding.action, finding.severity)
    return note(finding.why)


def _of_gpu(uuid: str, past: _Past) -> Iterator[Concern]:
    """What a GPU has done too often."""
    limits = past.limits
    if uuid == NODE:
        return
    day = _apart([one for one in past.lately(uuid, limits.fault_seconds) if one.weight is Weight.fault], limits)
    if day >= limits.fatal_bursts:
        yield failed(f"{day} faults in a day", Action.drain_replace, Severity.critical)
    jobs: dict[int, set[str]] = {}
    for burst in past.lately(uuid, limits.lemon_seconds):
        if burst.weight is Weight.program:
            jobs.setdefault(burst.xid, set()).update(burst.jobs)
    for xid, names in sorted(jobs.items()):
        if len(names) >= limits.jobs:
            yield suspect(f"Xid {xid} under {len(names)} different jobs", severity=Severity.high)


def _of_node(past: _Past) -> Iterator[Concern]:
    """Lemon nodes: NVSentinel's rule over a week, and one after Meta's over four (several signals beyond their limits)."""
    limits = past.limits
    replaced = past.replaced(NODE)
    times = sorted(one.time for one in past.remedies if one.remedy and one.time > replaced)
    week = _distinct([time for time in times if past.now - time <= limits.lemon_seconds], limits)
    if week >= limits.lemon_remedies:
        yield failed(f"{week} remedies in {limits.lemon_seconds / 86_400:.0f} days: a lemon", Action.drain_replace)
    month = limits.lemon_window_seconds
    faults = [
        one
        for one in past.bursts
        if one.weight is Weight.fault and past.now - one.last <= month and one.first > replaced
    ]
    signals = {
        "different Xids": (len({one.xid for one in faults}), limits.lemon_xids),
        "faults": (_apart(faults, limits), limits.lemon_faults),
        "remedies": (_distinct([time for time in times if past.now - time <= month], limits), limits.lemon_outages),
    }
    beyond = [f"{count} {name}" for name, (count, most) in signals.items() if count >= most]
    if len(beyond) >= limits.lemon_signals:
        why = f"{', '.join(beyond)} in {month / 86_400:.0f} days: a lemon"
        yield suspect(why, Action.drain_replace, Severity.high)


def _apart(found: Sequence[Burst], limits: Limits) -> int:
    return _distinct(sorted(one.first for one in found), limits)


def _distinct(times: Sequence[float], limits: Limits) -> int:
    """How many they are, those within a burst's length of each other as one: a cause reports itself in several ways."""
    return sum(1 for at, time in enumerate(times) if at == 0 or time - times[at - 1] > limits.burst_seconds)
