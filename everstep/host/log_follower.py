"""Follows the logs of a node: what they say, one finding for each cause, within a share of one processor.

A storm of lines costs no more memory than its first line, and no more processor time than `share` beyond the first second;
what has not been looked at by then waits in the log.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.core.health import Finding
from everstep.core.log_bursts import QUIET_SECONDS, Sighting
from everstep.core.log_rules import LogPolicy
from everstep.core.logs import sightings
from everstep.host.log_file import Piece, Source

PIECE = 1 << 16
SHARE = 0.1
BURST_SECONDS = 1.0
MOST_CAUSES = 1000
_COUNT = re.compile(r"; [\d,]+ lines$")


@dataclass
class _Cause:
    finding: Finding
    last: float
    read: float
    count: int

    @property
    def whole(self) -> Finding:
        counted = f"{self.finding.why}; {self.count:,} lines" if self.count > 1 else self.finding.why
        return self.finding.model_copy(update={"why": counted})


class LogFollower:
    """For one thread. `cpu` counts that thread's processor seconds; `wall` gives Unix seconds."""

    def __init__(
        self,
        sources: Sequence[Source],
        policy: LogPolicy | None = None,
        *,
        share: float = SHARE,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.sources = tuple(sources)
        self.behind = False
        self._policy = policy
        self._share = share
        self._wall = wall
        self._clock = clock
        self._cpu = cpu
        self._left = BURST_SECONDS
        self._filled = clock()
        self._held: dict[int, tuple[int, str]] = {}
        self._looks = 0
        self._causes: dict[tuple[object, ...], _Cause] = {}

    @property
    def lost(self) -> int:
        """Records and bytes that were passed over unread, because they came faster than they could be read."""
        return sum(one.lost for one in self.sources)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The causes that were seen within the last three minutes, with how many lines each has by now."""
        return tuple(one.whole for one in self._causes.values())

    def poll(self) -> list[Finding]:
        """Look at what is new, and give the causes that were not known; a cause is new again after three quiet minutes."""
        now = self._clock()
        self._left = min(BURST_SECONDS, self._left + self._share * (now - self._filled))
        self._filled = now
        self._forget()
        self._looks += 1
        self.behind = False
        return [finding for place in range(len(self.sources)) for finding in self._follow(place)]

    def close(self) -> None:
        for one in self.sources:
            one.close()

    def _follow(self, place: int) -> list[Finding]:
        found: list[Finding] = []
        while self._left > 0:
            piece = self.sources[place].read(PIECE)
            text = self._settled(place, piece.text)
            if text:
                began = self._cpu()
                seen = sightings(text, policy=self._policy, clock=piece.clock, origin=piece.origin)
                found += [new for one in seen if (new := self._note(one, piece)) is not None]
                self._left -= self._cpu() - began
            if not piece.text:
                return found
        self.behind = True
        return found

    def _settled(self, place: int, text: str) -> str:
        """The text that is to be looked at now. A last line with an Xid waits for the next look: more lines may belong to it."""
        look, before = self._held.get(place, (0, ""))
        if not text and look == self._looks:
            return ""
        self._held.pop(place, None)
        start = text.rstrip("\n").rfind("\n") + 1
        if "Xid" in text[start:]:
            self._held[place] = (self._looks, text[start:])
            text = text[:start]
        return before + text

    def _note(self, seen: Sighting, piece: Piece) -> Finding | None:
        """The finding, where its cause is not known yet."""
        now = self._wall()
        one = seen.finding.model_copy(update={"why": _COUNT.sub("", seen.finding.why)})
        first = now if one.time is None else one.time
        last = first if seen.last is None else seen.last
        key = (one.kind, one.xid, seen.sxid, one.component, one.device, one.action, one.severity, piece.origin)
        cause = self._causes.get(key)
        if cause is not None and first - cause.last <= QUIET_SECONDS:
            cause.count += seen.count
            cause.last, cause.read = max(cause.last, last), now
            return None
        if cause is None and len(self._causes) >= MOST_CAUSES:
            return None
        self._causes[key] = _Cause(one.model_copy(update={"time": first}), last, now, seen.count)
        return self._causes[key].whole

    def _forget(self) -> None:
        """What has not been read for long."""
        now = self._wall()
        for key in [key for key, one in self._causes.items() if now - one.read > QUIET_SECONDS]:
            del self._causes[key]
