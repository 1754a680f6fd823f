"""The pulse of a rank: a thread that writes its heartbeat, hears signals, and keeps the grace period.

Signals reach it through the wake-up descriptor, so also while the training thread is deep in a long call (else that
one hears them first). It touches node-local disk only: a hung mount of the persistent tier stops no heartbeat.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from everstep.core.segment import Cause, CauseKind, Outcome, Phase, RankEnd
from everstep.store import atomic
from everstep.store.layout import RunPlaces
from everstep.trainer.vitals import Vitals

INTERVAL = 0.25
SHORTEST = 0.02
STOPS = frozenset({signal.SIGTERM, signal.SIGUSR1})
NOTHING_TO_SAVE = frozenset({Phase.start, Phase.restore})
LAST_WRITE = 1.0


class Pulse:
    """See the module. `stop_wanted` is set as soon as a signal has come."""

    def __init__(self, vitals: Vitals, places: RunPlaces, early_signal: int = 0) -> None:
        self.stop_wanted = False
        self._vitals = vitals
        self._places = places
        self._signal = 0
        self._deadline = float("inf")
        self._ending = threading.Lock()
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        if early_signal:
            self._heard(early_signal)

    def start(self) -> None:
        """Take over the signals; call it in the main thread."""
        self._places.local.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in STOPS:
            signal.signal(number, lambda number, _: self._heard(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        self._vitals.told = self.poke

    def poke(self) -> None:
        """Have a heartbeat written soon."""
        try:
            self._mouth.send(b"\0")
        except BlockingIOError:
            return  # it is about to wake up anyway

    def leave(self, end: RankEnd, code: int, before: Callable[[], None] | None = None) -> None:
        """Write this rank's last word and end the process. Only the first caller's word counts; others wait for ever."""
        self._ending.acquire()
        writer = threading.Thread(target=write_end, args=(self._places, end), daemon=True)
        writer.start()
        writer.join(None if before else LAST_WRITE)
        if before:
            before()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _run(self) -> None:
        wait = 0.0
        written = 0.0
        while True:
            ready, _, _ = select.select([self._ear], [], [], wait)
            for number in self._ear.recv(4096) if ready else b"":
                self._heard(number)
            now = time.monotonic()
            if self.stop_wanted and (now >= self._deadline or self._vitals.phase in NOTHING_TO_SAVE):
                self._leave_at_once()
            if now - written >= SHORTEST:
                self._beat()
                written = now
            wait = min(INTERVAL if now == written else SHORTEST, max(0.0, self._deadline - now))

    def _heard(self, number: int) -> None:
        """A signal may come twice (from the supervisor and from the kernel); the grace counts from the first."""
        if number not in STOPS or self.stop_wanted:
            return
        grace = self._vitals.spec.grace_seconds
        self._signal = number
        self._deadline = time.monotonic() + grace - min(3.0, grace / 5)
        self.stop_wanted = True

    def _beat(self) -> None:
        beat = self._vitals.heartbeat()
        try:
            atomic.write(self._places.heartbeat(beat.rank), beat.to_json().encode(), sync=False)
        except OSError as error:
            sys.stderr.write(f"everstep: no heartbeat could be written: {error}\n")

    def _leave_at_once(self) -> None:
        self.leave(stopped(self._vitals, self.signal_name), 0)

    @property
    def signal_name(self) -> str:
        return signal.Signals(self._signal).name if self._signal else ""


def stopped(vitals: Vitals, by: str) -> RankEnd:
    """The last word of a rank that stops on request."""
    lost = vitals.step - vitals.saved_step
    kept = f"kept step {vitals.saved_step}" + (f", {lost} steps after it are lost" if lost else "")
    cause = Cause(
        kind=CauseKind.stop,
        key=by or "lease",
        message=f"stopped by {by or 'request'} after step {vitals.step}; {kept}",
        phase=vitals.phase,
        rank=vitals.spec.rank,
        step=vitals.step,
    )
    return end_of(vitals, Outcome.stopped, cause)


def end_of(vitals: Vitals, outcome: Outcome, cause: Cause, *, early: bool = False) -> RankEnd:
    return RankEnd(
        attempt=vitals.spec.attempt,
        rank=vitals.spec.rank,
        outcome=outcome,
        step=vitals.step,
        saved_step=vitals.saved_step,
        time=time.time(),
        cause=cause,
        finished_early=early,
    )


def write_end(places: RunPlaces, end: RankEnd) -> None:
    path = places.end(end.attempt, end.rank)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic.write(path, end.to_json().encode())
