"""How Prefect treats a monitor: it hears its events. It is asked nothing that the monitor would wait for."""

import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.logging import get_logger

from everstep.core.ledger import Event
from everstep.host import monitoring

MOST_WAITING = 10_000
CLOSE_SECONDS = 5.0

watch = task(name="watch-node", cache_policy=NO_CACHE, persist_result=False)(monitoring.watch)


@contextmanager
def telling() -> Iterator[Callable[[Event], None]]:
    """Who tells Prefect of a monitor's events, and prints them, from a thread of its own. While Prefect is away its own
    client keeps what it can; the ledger has all.
    """
    waiting: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
    settings = contextvars.copy_context()  # a bare thread would see Prefect's global ones, and start a server
    thread = threading.Thread(target=settings.run, args=(_tell, waiting), name="everstep-events", daemon=True)
    thread.start()

    def put(event: Event | None) -> None:
        if event is not None:
            monitoring.show(event)
        try:
            waiting.put_nowait(event)
        except queue.Full:  # the ledger has it
            get_logger("everstep").warning("Prefect takes no events; one was not told to it")

    try:
        yield put
    finally:
        put(None)
        thread.join(timeout=CLOSE_SECONDS)


def _tell(waiting: "queue.Queue[Event | None]") -> None:
    while (event := waiting.get()) is not None:
        try:
            _emit(event)
        except Exception:  # noqa: BLE001 - the edge of the thread: whatever Prefect raises, the node is watched on
            get_logger("everstep").exception("Prefect took no event %s", event.kind)


def _emit(event: Event) -> None:
    """The event as Prefect knows it: the resource is the GPU by its UUID, related to its node; or the node."""
    node, uuid = str(event.data["node"]), str(event.data.get("uuid") or "")
    of_node = {"prefect.resource.id": f"everstep.node.{node}", "prefect.resource.name": node}
    of_gpu = {"prefect.resource.id": f"everstep.gpu.{uuid}", "prefect.resource.name": uuid, "everstep.node": node}
    emit_event(
        event.kind,
        resource=of_gpu if uuid else of_node,
        related=[of_node | {"prefect.resource.role": "node"}] if uuid else None,
        occurred=datetime.fromtimestamp(event.time, UTC),
        payload={"text": event.text, "severity": event.severity.value, "job": event.job, **event.data},
        id=UUID(event.id),
    )
