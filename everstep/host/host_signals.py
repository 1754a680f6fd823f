"""The sampler of a node's own signals: space, mounts, memory, stuck tasks, clock, network.

All is read by a probe (`host.host_probe`) that may hang on a mount without harm: every sample has a deadline, and a mount
that does not answer is `hung` in it.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from everstep.core.host import HostSample, Looked
from everstep.host.probe_process import ProbeProcess

WITHIN_SECONDS = 2.0
START_SECONDS = 10.0

_GROUPS = ("memory", "stuck", "nics", "pci_gpus", "clock")


class HostSampler:
    """For one thread, whose end ends the probe. `root` is where /proc and /sys lie; `argv` is for stand-ins."""

    def __init__(
        self,
        root: Path = Path("/"),
        within: float = WITHIN_SECONDS,
        *,
        argv: Sequence[str] | None = None,
        log: Path = Path(os.devnull),
        start_seconds: float = START_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._probe = ProbeProcess("everstep.host.host_probe", argv=argv, log=log, clock=clock)
        self._root = root
        self._within = within
        self._start_seconds = start_seconds
        self._clock = clock
        self._wall = wall
        self._number = 0
        self._since: dict[tuple[int, int], float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def sample(self) -> HostSample:
        """Read all, within the deadline whatever hangs; a sample that starts the probe may take `start_seconds` more."""
        asked, began = self._wall(), self._clock()
        self._number += 1
        parts, why = self._converse()
        values: dict[str, Any] = {"time": asked, "node": os.uname().nodename}
        unanswered, troubles = [], {}
        if parts is None:
            unanswered.append("probe")
            troubles["probe"] = why
        for part in parts or ():
            if "stuck" in part:
                unanswered.append(part["part"])
            elif "failure" in part:
                troubles[part["part"]] = part["failure"]
        if parts is not None:
            values |= self._gathered(parts)
        values |= {"unanswered": tuple(unanswered), "troubles": troubles, "left_behind": self._probe.left_behind}
        values["seconds"] = self._clock() - began
        try:
            return HostSample.model_validate(values)
        except ValidationError as error:
            told = {"probe": f"said what cannot be: {error.errors(include_url=False)[0]['loc']}"}
            keep = {name: values[name] for name in ("time", "node", "seconds", "left_behind")}
            return HostSample(**keep, unanswered=("probe",), troubles=told)

    def close(self) -> None:
        self._probe.close()

    def _converse(self) -> tuple[list[dict[str, Any]] | None, str]:
        fresh = not self._probe.runs
        if not self._probe.start(str(self._root)):
            return None, self._probe.ended or "the probe is not started again yet"
        until = self._clock() + self._within + 0.5 + (self._start_seconds if fresh else 0.0)
        self._probe.tell({"sweep": self._number, "within": self._within})
        parts: list[dict[str, Any]] = []
        while messages := self._probe.receive(until):
            parts += [one for one in messages if one.get("sweep") == self._number]
            if parts and "done" in parts[-1]:
                self._probe.is_well()
                return parts[:-1], ""
        if self._probe.starves:
            return None, "the probe waits for a processor; this machine is overloaded"
        self._probe.replace(f"no answer from the probe within {self._within:g} s")
        return None, self._probe.ended

    def _gathered(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {"mounts": [], "ports": []}
        for part in parts:
            name, values = part["part"], part["values"]
            group = name.partition(" ")[0] + "s"
            if group in ("mounts", "ports") and values:
                if "stuck" in part:
                    query, seconds = part["stuck"]
                    values |= {"looked": Looked.hung, "why": f"{query}: no answer for {seconds:.1f} s"}
                elif "failure" in part:
                    values |= {"looked": Looked.error, "why": part["failure"]}
                found[group].append(values)
            elif name in _GROUPS:
                found[name] = values.get("value")
            elif name == "boot":
                found |= values.get("value") or {}
        if found.get("stuck") is not None:
            found["stuck"] = self._aged(found["stuck"])
        return found

    def _aged(self, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With how long each has been seen so, at every look since the first."""
        now = self._clock()
        seen = {(one["task"], one["born"]): now for one in tasks}
        self._since = {key: self._since.get(key, now) for key in seen}
        return [
            {name: value for name, value in one.items() if name != "born"}
            | {"seconds": now - self._since[one["task"], one["born"]]}
            for one in tasks
        ]
