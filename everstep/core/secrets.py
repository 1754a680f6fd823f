"""What must not be shown to others is taken out of a value before it is written down or drawn."""

import re
from typing import TypeVar

from pydantic import JsonValue

HIDDEN = "***"
_NAMES = re.compile(r"(?i)(passw|secret|token$|_token|api_?key|access_?key|credential|private_?key|authorization)")
_IN_URL = re.compile(r"(?<=//)[^/@\s]+@")
_IN_QUERY = re.compile(r"(?i)([?&][^=&\s]*(?:passw|secret|token|key|signature|credential)[^=&\s]*=)[^&\s]+")

V = TypeVar("V", bound=JsonValue)


def without_secrets(value: V) -> V:
    """The same JSON value with passwords in URLs, and the values of fields that are named like secrets, hidden."""
    return _clean(value)  # type: ignore[return-value]


def _clean(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_URL.sub(f"{HIDDEN}@", value))
    if isinstance(value, dict):
        return {
            key: HIDDEN if _NAMES.search(key) and isinstance(inner, str) and inner else _clean(inner)
            for key, inner in value.items()
        }
    return [_clean(inner) for inner in value] if isinstance(value, list) else value
