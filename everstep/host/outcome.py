"""The last word of a training flow in this process: what the command line prints and exits by."""

from typing import Any

_last: dict[str, Any] | None = None


def deliver(final: dict[str, Any]) -> None:
    """Remember the JSON line of the run that has just ended."""
    global _last  # noqa: PLW0603 - one process, one command line, one last word
    _last = final


def delivered() -> dict[str, Any] | None:
    """The JSON line, or None if no run got that far."""
    return _last
