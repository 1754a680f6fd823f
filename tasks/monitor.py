"""How Prefect treats a monitor: it hears its events. It is asked nothing that the monitor would wait for."""

from datetime import UTC, datetime
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from everstep.core.ledger import Event
from everstep.host import monitoring

watch = task(name="watch-node", cache_policy=NO_CACHE, persist_result=False)(monitoring.watch)


def tell(event: Event) -> None:
    """Print an event, and tell it to Prefect: the resource is the GPU by its UUID, related to its node; or the node.

    While Prefect is away its own client keeps what it can; the ledger has all.
    """
    monitoring.show(event)
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
