"""The inside of a probe: looks at things that may never answer, each in a thread of its own, and tells which one hangs.

A probe is a helper process that is asked by lines of JSON on its standard input and answers by lines on a descriptor:
`{"sweep": n, "within": seconds}` is answered by a `{"sweep": n, "part": name, ...}` for each thing and by
`{"sweep": n, "done": true}`. What hangs stays in its thread, where it costs nothing, and is not asked again before it
has come back. The main thread touches nothing that could hang. Imports the standard library only: a probe is to start
in no time.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any


class Notes:
    """What a look has found so far, and the query that it is at."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.at = "start"
        self.since = time.monotonic()

    def begin(self, query: str) -> None:
        self.at = query
        self.since = time.monotonic()


Look = Callable[[Notes], None]


class Voice:
    """Says lines, whole and one after the other, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._turn = threading.Lock()

    def say(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._turn:
            while line:
                line = line[os.write(self._descriptor, line) :]


class Watcher:
    """One thing that is looked at, with its thread. `held_until`: it is not asked before this moment."""

    def __init__(self, name: str, look: Look, turn: threading.Condition, held_until: float = 0.0) -> None:
        self.name = name
        self.held_until = held_until
        self.notes = Notes()
        self.looked = 0
        self.hangs = False
        self.look = look
        self._turn = turn
        self._asked = False
        self._leaving = False
        self._failure = ""
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        return self._asked

    def ask(self) -> bool:
        """Have it look, unless it still looks or is held. The condition must be held by the caller."""
        if self._asked or time.monotonic() < self.held_until:
            return False
        self.notes = Notes()
        self._asked = True
        self._turn.notify_all()
        return True

    def leave(self) -> None:
        self._leaving = True
        self._turn.notify_all()

    def told(self) -> dict[str, Any]:
        """What there is to say of it: what was found, and the query in which it hangs."""
        part: dict[str, Any] = {"part": self.name, "values": dict(self.notes.values)}
        self.hangs = self._asked
        if self._asked:
            part["stuck"] = [self.notes.at, round(time.monotonic() - self.notes.since, 3)]
        elif not self.looked:
            part["held"] = round(self.held_until - time.monotonic(), 3)
        elif self._failure:
            part["failure"] = self._failure
        return part

    def _serve(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._asked or self._leaving)
                if not self._asked:
                    return
            failure = ""
            try:
                self.look(self.notes)
            except Exception as error:  # noqa: BLE001 - the edge of a thread: told, and judged by the parent
                failure = f"{type(error).__name__}: {error}"
            with self._turn:
                self._failure = failure
                self._asked = self.hangs = False
                self.looked += 1
                self._turn.notify_all()


class Watch:
    """All that a probe looks at."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._turn = threading.Condition()
        self._watchers: dict[str, Watcher] = {}

    def keep(self, looks: Mapping[str, Look], held: Mapping[str, float] | None = None) -> None:
        """Look at these from now on: at new ones too, no more at those that are gone. `held`: seconds to wait first."""
        now = time.monotonic()
        with self._turn:
            for name in set(self._watchers) - set(looks):
                if not self._watchers[name].busy:
                    self._watchers.pop(name).leave()
            for name, look in looks.items():
                if name in self._watchers:
                    self._watchers[name].look = look
                else:
                    until = now + (held or {}).get(name, 0.0)
                    self._watchers[name] = Watcher(name, look, self._turn, until)

    def begin(self) -> None:
        """Look at all without waiting for it; the first sweep tells what was found."""
        with self._turn:
            for one in self._watchers.values():
                one.ask()

    def sweep(self, number: int, within: float) -> None:
        """Look at all, say what was found within so many seconds, and which ones hang.

        One that hung at the end of the sweep before and still does is not waited for again.
        """
        until = time.monotonic() + within
        with self._turn:
            everyone = list(self._watchers.values())
            for one in everyone:
                one.ask()
            waited_for = [one for one in everyone if one.busy and not one.hangs]
            self._turn.wait_for(lambda: not any(one.busy for one in waited_for), until - time.monotonic())
            parts = [one.told() for one in everyone]
        for part in parts:
            self._voice.say({"sweep": number, **part})
        self._voice.say({"sweep": number, "done": True})

    def settled(self, within: float) -> None:
        """Wait until each of them has been looked at once, but those that are held; no longer than `within`."""
        with self._turn:
            self._turn.wait_for(
                lambda: all(one.looked or one.held_until > time.monotonic() for one in self._watchers.values()), within
            )


def serve(watch: Watch, refresh: Callable[[], None]) -> None:
    """Answer the parent until it hangs up; `refresh` is called before each sweep. Ends the process."""
    try:
        for line in sys.stdin:
            command = json.loads(line)
            refresh()
            watch.sweep(command["sweep"], command["within"])
    except BrokenPipeError:
        pass
    finally:
        os._exit(0)  # threads that hang must not keep it
