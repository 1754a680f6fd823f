"""The ledger's one record: an event. Everything appends events, reports only read them."""

from pydantic import Field, JsonValue

from everstep.core.health import Severity
from everstep.core.record import Versioned


class Event(Versioned):
    """Something that happened. `id` makes a replay harmless; `time` is Unix seconds, UTC."""

    id: str
    time: float
    kind: str = Field(pattern=r"^[a-z_]+(\.[a-z_]+)+$")
    severity: Severity = Severity.low
    job: str = ""
    run: str = ""
    attempt: int = 0
    step: int | None = None
    text: str = ""
    data: dict[str, JsonValue] = {}
