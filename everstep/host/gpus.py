"""The sampler of a node's GPUs: asks a probe of its own (`host.gpu_probe`) that may hang without harm.

Every sweep has a deadline. A GPU in which the driver hangs is `unresponsive` at once, with the query, while the others are
read on; a probe that does not answer at all is killed and started anew, later each time. GPUs are known by UUID: one that
was seen and is listed no more is `missing`. While a probe runs it has the GPUs open, so close the sampler before a GPU is
reset. Xid events that come while a probe is replaced are not heard; the kernel's log has them.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from everstep.core.gpu import Answer, Driver, GpuSample, Sweep, XidEvent
from everstep.host.gpu_roster import Roster
from everstep.host.probe_process import ProbeProcess

WITHIN_SECONDS = 2.0
GRACE_SECONDS = 0.5
START_SECONDS = 20.0
"""So long a probe may take to get an answer from the driver: the first one to open a GPU initialises it."""

LOOK_ANEW_SECONDS = 30.0
LOOK_ANEW_LONGEST = 600.0
HOLD_SECONDS = 300.0
ABSENT_PAUSE = 60.0

_Answered = tuple[Driver, str, list[dict[str, Any]]]


class Sampler(Protocol):
    """What gives samples: the real one, and one that reads a recorded trace."""

    def sweep(self) -> Sweep: ...

    def wait(self, seconds: float) -> tuple[XidEvent, ...]: ...

    def last(self, uuid: str) -> GpuSample | None: ...

    def close(self) -> None: ...


class GpuSampler:
    """All GPUs of this machine. For one thread, whose end ends the probe.

    `within`: seconds for a sweep; one that starts the probe may take as long again. A probe that is to look anew at GPUs
    that do not answer is started after `look_anew` seconds, later each time. `environment` and `argv` are for stand-ins.
    Nothing is started before the first sweep.
    """

    def __init__(
        self,
        within: float = WITHIN_SECONDS,
        *,
        environment: Mapping[str, str] | None = None,
        argv: Sequence[str] | None = None,
        log: Path = Path(os.devnull),
        start_seconds: float = START_SECONDS,
        look_anew: float = LOOK_ANEW_SECONDS,
        hold: float = HOLD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._probe = ProbeProcess("everstep.host.gpu_probe", environment, argv=argv, log=log, clock=clock)
        self._roster = Roster(clock, wall)
        self._clock = clock
        self._wall = wall
        self._within = within
        self._start_seconds = start_seconds
        self._look_anew = self._pause = look_anew
        self._anew_at = clock() + look_anew
        self._hold_seconds = hold
        self._held: int | None = None
        self._tried: set[int] = set()
        self._hello: dict[str, Any] = {}
        self._number = 0
        self._well_at = clock()
        self._events: dict[tuple[object, ...], XidEvent] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, seconds: float = START_SECONDS) -> Sweep:
        """The first sweep that finds more than a probe that is starting, waiting for it for so many seconds."""
        until = self._clock() + seconds
        while (got := self.sweep()).driver in (Driver.starting, Driver.starved) and self._clock() < until:
            pass
        return got

    def sweep(self) -> Sweep:
        """Read all GPUs, within the deadline whatever hangs."""
        asked, began = self._wall(), self._clock()
        self._number += 1
        driver, why, parts = self._converse()
        well = driver in (Driver.present, Driver.absent)
        if well:
            self._well_at = self._clock()
            self._probe.is_well()
        samples = self._roster.samples(driver, why, parts)
        if driver is Driver.present:
            self._mend(samples, parts)
        return Sweep(
            time=asked,
            seconds=self._clock() - began,
            driver=driver,
            why=why,
            driver_version=self._hello.get("version", ""),
            silent_s=0.0 if well else self._clock() - self._well_at,
            left_behind=self._probe.left_behind,
            restarts=max(0, self._probe.starts - 1),
            gpus=tuple(samples),
        )

    def wait(self, seconds: float) -> tuple[XidEvent, ...]:
        """The Xid events that have come, or the next ones, waiting for them for so long."""
        until = self._clock() + seconds
        while not self._events and self._clock() < until:
            if not self._probe.runs:
                time.sleep(max(0.0, min(until - self._clock(), 0.1)))
            for message in self._probe.receive(until):
                self._hear(message)
        found = tuple(self._events.values())
        self._events.clear()
        return found

    def last(self, uuid: str) -> GpuSample | None:
        """The newest sample in which this GPU answered: the evidence of one that does so no more."""
        return self._roster.last(uuid)

    def close(self) -> None:
        self._probe.close()

    def _converse(self) -> _Answered:
        """How the driver answered, why it did not, and what was found of each GPU."""
        until = self._clock() + self._within + GRACE_SECONDS
        if not self._probe.runs:
            earlier = self._hello
            held = {} if self._held is None else {self._held: self._hold_seconds}
            if not self._probe.start(json.dumps(held)):
                known = earlier.get("driver") in (Driver.absent, Driver.refused)
                return (
                    (Driver(earlier["driver"]), earlier["why"], []) if known else (Driver.silent, self._probe.ended, [])
                )
            self._hello = {}
        while not self._hello and self._listen(until):
            pass
        if self._hello.get("driver") in (Driver.absent, Driver.refused):
            driver = Driver(self._hello["driver"])
            self._probe.replace(self._hello["why"], ABSENT_PAUSE if driver is Driver.absent else None)
            return driver, self._hello["why"], []
        return self._ask() if self._hello and self._probe.runs else self._no_answer()

    def _ask(self) -> _Answered:
        until = self._clock() + self._within + GRACE_SECONDS
        self._probe.tell({"sweep": self._number, "within": self._within})
        parts: list[dict[str, Any]] = []
        while messages := self._listen(until):
            parts += [one for one in messages if one.get("sweep") == self._number]
            if parts and "done" in parts[-1]:
                return Driver.present, "", parts[:-1]
        return self._no_answer()

    def _no_answer(self) -> _Answered:
        if not self._probe.runs:
            return Driver.silent, self._probe.ended, []
        if self._probe.starves:
            return Driver.starved, "the probe waits for a processor; this machine is overloaded", []
        if self._hello:
            self._probe.replace(f"no answer from the probe within {self._within:g} s")
        elif self._clock() - self._probe.started < self._start_seconds:
            return Driver.starting, "the probe is starting, and has no answer from the driver yet", []
        else:
            self._probe.replace(f"no answer from the driver within {self._start_seconds:g} s of the start")
        return Driver.silent, self._probe.ended, []

    def _listen(self, until: float) -> list[dict[str, Any]]:
        messages = self._probe.receive(until)
        for message in messages:
            self._hear(message)
        return messages

    def _hear(self, message: dict[str, Any]) -> None:
        if "hello" in message:
            self._hello = message["hello"]
            if "count" in self._hello:
                self._roster.listed(self._hello["count"])
        elif "xid" in message:
            self._note(message["xid"])

    def _note(self, said: dict[str, Any]) -> None:
        """Keep an event; equal ones that nobody has asked for yet are counted, so that a storm takes no memory."""
        last = self._roster.last(said["uuid"])
        about = {"index": last.index, "bus": last.bus} if last else {}
        event = XidEvent(last=said["time"], **said, **about)
        key = (event.uuid, event.xid, event.gpu_instance, event.compute_instance)
        before = self._events.get(key)
        if before:
            event = before.model_copy(update={"last": event.last, "count": before.count + 1})
        self._events[key] = event

    def _mend(self, samples: list[GpuSample], parts: list[dict[str, Any]]) -> None:
        """Start the probe anew where that may help: it sees devices that returned, and is rid of locks that a hang holds."""
        now = self._clock()
        if all(one.answer is Answer.ok for one in samples):
            self._pause = self._look_anew
            self._anew_at = now + self._pause
            self._held = None
            self._tried.clear()
            return
        stuck = {int(part["part"]): float(part["stuck"][1]) for part in parts if "stuck" in part}
        if self._held not in stuck and not any("held" in part for part in parts):
            self._held = None  # its time is over, and it answers
        if len(stuck) < 2:
            self._tried.clear()
        elif (suspect := self._suspect(stuck)) is not None:
            self._held = suspect
            self._probe.replace(f"GPU {suspect} seems to block the others", 0.0)
            return
        if now >= self._anew_at and not self._probe.left_behind and self._held is None:
            self._pause = min(2 * self._pause, LOOK_ANEW_LONGEST)
            self._anew_at = now + self._pause
            self._tried.clear()
            self._probe.replace("to look anew at GPUs that do not answer", 0.0)

    def _suspect(self, stuck: Mapping[int, float]) -> int | None:
        """Of GPUs that hang at once, most likely one holds the driver's lock and the others wait for it: which one?

        The one that did so before, else the one that has waited longest. That can be wrong, so others are tried in turn:
        none is left once each was set aside and the rest hung all the same.
        """
        if self._held in stuck:
            return self._held  # it was asked again, and did it again
        untried = {number: seconds for number, seconds in stuck.items() if number not in self._tried}
        self._held = None
        if not untried:
            return None
        first = max(untried, key=lambda number: untried[number])
        self._tried.add(first)
        return first
