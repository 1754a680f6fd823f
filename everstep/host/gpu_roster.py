"""Who is who among the GPUs: turns what a probe found into a sample for each GPU that is, or was, in this node."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from everstep.core.gpu import Answer, Driver, GpuSample

Part = Mapping[str, Any]


class _Known(NamedTuple):
    last: GpuSample
    answered: float


class Roster:
    """The GPUs of a node, by UUID. One that answered once is looked for ever after."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._known: dict[str, _Known] = {}
        self._first_asked: dict[str, float] = {}
        self._numbers: dict[int, str] = {}

    def last(self, uuid: str) -> GpuSample | None:
        """The newest sample in which this GPU answered."""
        known = self._known.get(uuid)
        return known.last if known else None

    def listed(self, count: int) -> None:
        """The driver lists so many; where that is another number than before, the old numbers say nothing any more."""
        if len(self._numbers) != count:
            self._numbers = dict.fromkeys(range(count), "")

    def samples(self, driver: Driver, why: str, parts: Iterable[Part]) -> list[GpuSample]:
        """One for each GPU that the driver lists, and for each that it listed before."""
        now = self._clock()
        parts = list(parts)
        self._name([(int(part["part"]), part["values"].get("uuid", "")) for part in parts])
        found = [self._sample(part, self._numbers[int(part["part"])], now) for part in parts]
        for one in found:
            if one.answer is Answer.ok:
                self._known[one.uuid] = _Known(one, now)
                self._first_asked.pop(one.uuid, None)
        there = {one.uuid for one in found}
        if driver is Driver.starved:
            return found  # nobody was asked: there is nothing to say of the others
        waiting = driver in (Driver.silent, Driver.starting)
        answer = Answer.unresponsive if waiting else Answer.missing
        gone = [uuid for uuid in self._known if uuid not in there]
        return found + [self._absent(uuid, answer, why or "the driver lists it no more", now) for uuid in gone]

    def _name(self, told: list[tuple[int, str]]) -> None:
        """Give each number its UUID: as told, else as before, else the only one that can be meant."""
        names = {uuid for _, uuid in told if uuid}
        nameless = [number for number, uuid in told if not uuid]
        left = [uuid for uuid in self._known if uuid not in names]
        for number, uuid in told:
            before = self._numbers.get(number, "")
            if uuid:
                self._numbers[number] = uuid
            elif before in left:
                left.remove(before)
            elif len(left) == len(nameless) == 1:
                self._numbers[number] = left[0]
            else:
                self._numbers[number] = f"unknown-{number}"

    def _sample(self, part: Part, uuid: str, now: float) -> GpuSample:
        values = {"time": self._wall(), **self._identity(uuid), **part["values"], "uuid": uuid}
        if "stuck" in part:
            query, seconds = part["stuck"]
            values |= {"answer": Answer.unresponsive, "why": f"{query}: no answer for {seconds:.1f} s"}
        elif "held" in part:
            why = f"the driver hung in it; it is asked again in {part['held']:.0f} s"
            values |= {"answer": Answer.unresponsive, "why": why}
        elif "failure" in part:
            values |= {"answer": Answer.error, "why": part["failure"]}
        if values.get("answer") != Answer.ok:
            values["silent_s"] = self._silent(uuid, now)
        try:
            return GpuSample.model_validate({"index": int(part["part"]), **values})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            return GpuSample(
                time=self._wall(), uuid=uuid, answer=Answer.error, why=why, silent_s=self._silent(uuid, now)
            )

    def _absent(self, uuid: str, answer: Answer, why: str, now: float) -> GpuSample:
        return GpuSample(
            time=self._wall(),
            uuid=uuid,
            answer=answer,
            why=why,
            silent_s=self._silent(uuid, now),
            **self._identity(uuid),
        )

    def _identity(self, uuid: str) -> dict[str, str]:
        last = self.last(uuid)
        return {"bus": last.bus, "model": last.model, "serial": last.serial} if last else {}

    def _silent(self, uuid: str, now: float) -> float:
        known = self._known.get(uuid)
        return now - (known.answered if known else self._first_asked.setdefault(uuid, now))
