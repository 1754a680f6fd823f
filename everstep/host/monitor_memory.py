"""What a monitor remembers: Xid events, findings of logs, and which causes it has told. Bounded, whatever comes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from everstep.core.gpu import GpuSample, XidEvent
from everstep.core.health import Finding
from everstep.core.judgement import Offence
from everstep.core.judging_xids import NODE, whose
from everstep.core.log_bursts import QUIET_SECONDS
from everstep.core.monitor import HISTORY_SECONDS, Sign, of_finding, of_xid
from everstep.core.xid_lines import pci

KEEP_SECONDS = 86_400.0
"""Xids and findings older than that no longer stand by themselves (`fault_seconds`); the history has them."""

MOST_KEPT = 2000
MOST_BURSTS = 50

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True)
class New:
    """A cause that was not known lately, with the number of the GPU and how many events there were at once."""

    sign: Sign
    index: int | None = None
    count: int = 1


class Memory:
    """Of one node. `seen` has the times at which causes were last heard of, `history` what came before."""

    def __init__(self, node: str, seen: dict[str, float], history: Iterable[Offence]) -> None:
        self.counts: dict[tuple[str, int], int] = {}
        self.history = list(history)
        self._node = node
        self._seen = seen
        self._xids: dict[tuple[str, int, int | None, int | None], list[XidEvent]] = {}
        self._findings: dict[tuple[str, str], Finding] = {}

    @property
    def xids(self) -> tuple[XidEvent, ...]:
        return tuple(one for kept in self._xids.values() for one in kept)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(self._findings.values())

    def hear(self, events: Iterable[XidEvent], job: str) -> list[New]:
        """Keep what the driver raised; equal events that follow each other within three minutes are one."""
        found = []
        for event in events:
            self.counts[event.uuid, event.xid] = self.counts.get((event.uuid, event.xid), 0) + event.count
            kept = self._xids.setdefault((event.uuid, event.xid, event.gpu_instance, event.compute_instance), [])
            if kept and event.time - kept[-1].last <= QUIET_SECONDS:
                merged = {"last": max(event.last, kept[-1].last), "count": kept[-1].count + event.count}
                kept[-1] = kept[-1].model_copy(update=merged)
            else:
                kept.append(event)
            sign = of_xid(event.xid, event.uuid, event.time, event.bus)
            if self._is_new(sign, event.last, job):
                found.append(New(sign, event.index, event.count))
        return found

    def read(self, findings: Iterable[Finding], gpus: Sequence[GpuSample], job: str, now: float) -> list[New]:
        """Keep what logs say."""
        found = []
        for one in findings:
            if one.time is not None and now - one.time > KEEP_SECONDS:
                continue
            sign = of_finding(one, self._about(one, gpus), now)
            self._findings[sign.key, sign.part] = one
            if self._is_new(sign, sign.time, job):
                found.append(New(sign))
        return found

    def remember(self, found: Iterable[Offence]) -> None:
        """Take remedies that somebody else has noted."""
        known = {(one.time, one.uuid, one.remedy) for one in self.history}
        self.history += [one for one in found if (one.time, one.uuid, one.remedy) not in known]

    def forget(self, now: float) -> None:
        """What no longer stands, and what is too much to keep."""
        for place in [place for place, kept in self._xids.items() if now - kept[-1].last > KEEP_SECONDS]:
            del self._xids[place]
        for kept in self._xids.values():
            kept[:] = [one for one in kept if now - one.last <= KEEP_SECONDS][-MOST_BURSTS:]
        self._findings = _newest(
            {place: one for place, one in self._findings.items() if now - (one.time or now) <= KEEP_SECONDS}
        )
        self._seen = _newest({key: at for key, at in self._seen.items() if now - at <= KEEP_SECONDS})
        self._xids, self.counts = _newest(self._xids), _newest(self.counts)
        self.history = [one for one in self.history if now - one.time <= HISTORY_SECONDS][-MOST_KEPT:]

    def _about(self, found: Finding, gpus: Sequence[GpuSample]) -> str:
        """The GPU that a finding is about: by its address, else by an event that the driver has raised."""
        named = whose(found, {pci(one.bus): one.uuid for one in gpus if one.bus})
        if named or found.xid is None or found.device:
            return named
        return next((uuid for uuid, xid in self.counts if xid == found.xid), NODE)

    def _is_new(self, sign: Sign, last: float, job: str) -> bool:
        """Whether this cause was not heard of lately; a new one, or a new part, goes into the history."""
        before = self._seen.get(sign.key)
        self._seen[sign.key] = last if before is None else max(last, before)
        is_new = before is None or sign.time - before > QUIET_SECONDS
        if sign.xid is not None and (is_new or sign.part):
            cause = f"xid-{sign.xid}"
            one = Offence(time=sign.time, node=self._node, uuid=sign.uuid, cause=cause, part=sign.part, job=job)
            self.history.append(one)
        return is_new


def _newest(kept: dict[_K, _V]) -> dict[_K, _V]:
    return kept if len(kept) <= MOST_KEPT else dict(list(kept.items())[-MOST_KEPT:])
