"""Tells events to somebody who may hang, fail or be away, from a thread of its own: who has something to tell never waits."""

import contextvars
import logging
import queue
import threading
from collections.abc import Callable

from everstep.core.ledger import Event

MOST_WAITING = 10_000
CLOSE_SECONDS = 5.0


class Listener:
    """The thread. It has the context in which it was made; what `tell` raises is logged, and the next event is told."""

    def __init__(self, tell: Callable[[Event], None], most: int = MOST_WAITING) -> None:
        self.lost = 0
        self._tell = tell
        self._waiting: queue.Queue[Event | None] = queue.Queue(most)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="everstep-listener", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Hand over an event. With too many of them waiting it is not told; the ledger has it."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self.lost += 1

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Tell what waits; False where that takes longer."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return False
        self._thread.join(timeout=seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._tell(event)
            except Exception:  # the edge of the thread: whatever is raised, the node is watched on
                logging.getLogger("everstep").exception("an event was not told: %s", event.kind)
