"""Work that must not be felt: at a bounded rate, after everybody else at the processor and the disk, and never for ever."""

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from everstep.core.errors import StoreUnavailable
from everstep.core.scrub import pause

STILL_SECONDS = 120.0
"""A tier that gives not one byte for so long does not answer. Object stores have their own, shorter deadlines."""
SLICE_SECONDS = 0.5
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13

T = TypeVar("T")


class Halted(BaseException):
    """Whoever waits for the work wants it no longer."""


class Pace:
    """Keeps a rate in bytes a second, over all threads. Time that nothing was read in is not made up for later."""

    def __init__(self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.moved = 0
        self._rate = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._halted = threading.Event()
        self._free_at = self._beat = clock()

    def see(self, piece: memoryview) -> None:
        self.take(len(piece))

    def take(self, count: int) -> None:
        """So many bytes have moved: wait for as long as they are worth. Raises Halted."""
        with self._lock:
            now = self._clock()
            self.moved += count
            self._free_at = max(self._free_at, now) + pause(count, self._rate, 0.0)
            until = self._free_at
        self.touch()
        while (left := until - self._clock()) > 0 and not self._halted.wait(min(left, SLICE_SECONDS)):
            self.touch()
        if self._halted.is_set():
            raise Halted

    def touch(self) -> None:
        """Something goes on."""
        self._beat = self._clock()

    @property
    def still(self) -> float:
        """Seconds since something went on."""
        return self._clock() - self._beat

    def halt(self) -> None:
        self._halted.set()


def aside(call: Callable[[], T], pace: Pace, what: str, still_seconds: float = STILL_SECONDS) -> T:
    """Do it in a thread of the lowest priority; the main thread hears signals meanwhile.

    Raises what it raises, and StoreUnavailable when nothing goes on for `still_seconds`; it is then left to itself.
    """
    answer: Future[T] = Future()

    def run() -> None:
        _step_back()
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: it is raised where the answer is awaited
            answer.set_exception(error)

    pace.touch()
    thread = threading.Thread(target=run, name="everstep-gentle", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(SLICE_SECONDS)
            if pace.still > still_seconds and thread.is_alive():
                raise StoreUnavailable(f"{what} does not answer since {pace.still:.0f} s; look again when it does.")
    except BaseException:
        pace.halt()
        thread.join(2 * SLICE_SECONDS)
        raise
    return answer.result()


def _step_back() -> None:
    """Lowest priority for this thread, and disk time that nobody else wants, where the kernel gives that."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _IDLE)
