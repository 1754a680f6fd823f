"""What a series of readings proves: for how long something has held, how fast a counter grows. Pure.

A reading that was not measured (None) is passed over. A gap in the readings is no evidence of anything.
"""

from collections.abc import Iterable, Sequence


def holds_for(readings: Iterable[tuple[float, bool | None]], gap: float) -> float:
    """Seconds for which something has held up to now; -1 if it does not. `readings` newest first: (time, whether)."""
    newest = oldest = None
    for time, true in readings:
        if true is None:
            continue
        if not true or (oldest is not None and oldest - time > gap):
            break
        newest, oldest = time if newest is None else newest, time
    return -1.0 if newest is None or oldest is None else newest - oldest


def growth(counts: Sequence[tuple[float, int | None]]) -> tuple[int, float]:
    """By how much a counter has grown, and within how many seconds. `counts` oldest first.

    From its first reading to its last; a counter that was set back meanwhile counts from there.
    """
    first = next(((time, count) for time, count in counts if count is not None), None)
    last = next(((time, count) for time, count in reversed(counts) if count is not None), None)
    if first is None or last is None:
        return 0, 0.0
    grown = last[1] - first[1] if last[1] >= first[1] else last[1]
    return grown, last[0] - first[0]


def rate(counts: Sequence[tuple[float, int | None]], per: float = 60.0) -> float:
    """How fast a counter grows in `per` seconds, over a minute at least: a short look makes no rate out of one error."""
    grown, seconds = growth(counts)
    return per * grown / max(60.0, seconds)


def part(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies, roughly; share 0.5 is the median. At least one value."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
