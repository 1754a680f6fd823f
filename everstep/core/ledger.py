"""The ledger's one record: an event. Everything appends events, reports only read them."""

import math
from typing import Any

from pydantic import Field, JsonValue, field_validator

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

    @field_validator("text", "data", mode="before")
    @classmethod
    def _is_writable(cls, value: Any) -> Any:
        return _writable(value)


def _writable(value: Any) -> Any:
    """Text from paths and logs may hold bytes that are no UTF-8, a loss may be NaN: no event may fail or lose that."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {_writable(key): _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return value
