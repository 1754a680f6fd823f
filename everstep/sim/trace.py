"""Samples from a recorded trace: what a node read once is read again, with the interface of the sampler.

A trace is JSON lines, each `{"sweep": {...}}` or `{"xid": {...}}`, in the order in which they came.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from everstep.core.gpu import Answer, GpuSample, Sweep, XidEvent
from everstep.core.record import Record


class TraceLine(Record):
    """One line of a trace: a sweep or an event."""

    sweep: Sweep | None = None
    xid: XidEvent | None = None


class Recorder:
    """Writes a trace, line by line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def sweep(self, one: Sweep) -> None:
        self._write(TraceLine(sweep=one))

    def events(self, some: tuple[XidEvent, ...]) -> None:
        for one in some:
            self._write(TraceLine(xid=one))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: TraceLine) -> None:
        self._file.write(line.model_dump_json(exclude_none=True, exclude_defaults=True) + "\n")
        self._file.flush()


class TraceEnded(EOFError):
    """The trace has no more sweeps."""


class TraceSampler:
    """Gives the sweeps of a trace in their order, and with each wait the events that came before the next sweep.

    It takes no time: `wait` returns at once. Raises `ValueError` for a line that is no record, and `TraceEnded` from
    `sweep` at the end.
    """

    def __init__(self, path: Path) -> None:
        self._lines = _Lines(path)
        self._events: list[XidEvent] = []
        self._next: Sweep | None = None
        self._last: dict[str, GpuSample] = {}
        self._advance()

    def sweep(self) -> Sweep:
        if self._next is None:
            raise TraceEnded("the trace has no more sweeps")
        found = self._next
        self._last |= {one.uuid: one for one in found.gpus if one.answer is Answer.ok}
        self._advance()
        return found

    def wait(self, seconds: float) -> tuple[XidEvent, ...]:  # noqa: ARG002 - as the sampler
        found = tuple(self._events)
        self._events.clear()
        return found

    def last(self, uuid: str) -> GpuSample | None:
        return self._last.get(uuid)

    def close(self) -> None:
        self._lines.close()

    def _advance(self) -> None:
        """Read on to the next sweep, and keep the events that stand before it."""
        self._next = None
        for line in self._lines:
            if line.xid is not None:
                self._events.append(line.xid)
            if line.sweep is not None:
                self._next = line.sweep
                return


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open()
        self._at = 0

    def __iter__(self) -> Iterator[TraceLine]:
        while text := self._file.readline():
            self._at += 1
            if not text.strip():
                continue
            try:
                yield TraceLine.model_validate_json(text)
            except ValidationError as error:
                self.close()
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"])) or "the whole line"
                raise ValueError(
                    f"{self._path}: line {self._at} is no line of a trace ({where}: {first['msg']})."
                ) from None

    def close(self) -> None:
        self._file.close()
