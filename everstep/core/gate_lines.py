"""What the gates of a run said, as lines of its report: each gate's first answer, and those that differ from the one before."""

from collections.abc import Iterable, Mapping

from everstep.core import words
from everstep.core.ledger import Event
from everstep.core.summary import GateLine

TEXT = 2000
_NAMES = {"closed": "verification", "health_hold": "health: hold", "health_closed": "health: closed"}
_ASKED = ("waiting", "testing")
_REPORTS = ("passive", "active", "training", "telemetry")
"""Gates that answer at each segment's end."""


def gate_lines(events: Iterable[Event], links: Mapping[str, str]) -> tuple[GateLine, ...]:
    """The answers of all gates, oldest first. Questions are none."""
    found: list[GateLine] = []
    last: dict[str, bool | None] = {}
    for event in events:
        name = event.kind.partition(".")[2]
        if not event.kind.startswith("gate.") or name in _ASKED:
            continue
        line = _line(name, event, links)
        if name in _REPORTS and name in last and last[name] == line.passed:
            continue
        last[name] = line.passed
        found.append(line)
    return tuple(found)


def _line(name: str, event: Event, links: Mapping[str, str]) -> GateLine:
    told = next((event.data[key] for key in ("passed", "ok", "success") if key in event.data), event.severity.value)
    passed = told if isinstance(told, bool) else None if told is None or name == "unknown" else told == "low"
    return GateLine(
        gate=_NAMES.get(name, name),
        time=event.time,
        step=event.step,
        passed=False if name == "closed" else passed,
        text=event.text[:TEXT] or _checked(event),
        link=links.get(event.kind, ""),
    )


def _checked(event: Event) -> str:
    """What an open gate looked at, where it counted it."""
    number = event.data.get("checked")
    suite = str(event.data.get("suite") or "")[:200]
    counted = isinstance(number, int) and number > 0 and suite
    return f"{words.count(int(str(number)), 'expectation')} hold, suite: {suite}" if counted else ""
