"""Times as logs print them, and what can be known of them: Unix seconds, seconds since boot, or a day without a year."""

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from everstep.core.record import Record


class Clock(Record):
    """What a reader knows of time, to make Unix seconds of what is printed.

    `boot` is the Unix time of the boot (for seconds since boot), `now` a time after the newest line (for stamps without
    a year), `zone` the seconds east of UTC in which stamps without a zone are written.
    """

    boot: float | None = None
    now: float | None = None
    zone: float = 0.0


UNKNOWN = Clock()


class Stamp(NamedTuple):
    """When a line was written. `time` is Unix seconds where they can be known; `seconds` order the lines of one `scale`."""

    scale: str
    seconds: float
    time: float | None = None


_MONTHS = {name: number for number, name in enumerate(("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1)}  # fmt: skip
MONTH = "|".join(_MONTHS)
_TIME = r"(?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
ISO = re.compile(
    r"\[?(?P<date>\d{4}-\d\d-\d\d)[T ]"
    + _TIME
    + r"(?: ?(?P<zone>Z|UTC|[+-]\d\d:?\d\d)\b)?(?: \[s=\S{1,200}\])?\]?:?\s*"
)
CTIME = re.compile(
    r"\[?(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?(?P<month>" + MONTH + r") {1,2}(?P<day>\d{1,2})(?: (?P<before>\d{4}))? "
    + _TIME + r"(?: (?:UTC|GMT))?(?: (?P<after>\d{4})(?=[\]\s:]|$))?\]?:?\s*"
)  # fmt: skip
UPTIME = re.compile(r"\[ {0,12}(?P<seconds>\d{1,10}\.\d{1,9})\]:?\s*")
KMSG = re.compile(r"\d{1,3},\d{1,20},(?P<micro>\d{1,20}),[^;]{1,64};")
UNIX = re.compile(r"(?P<seconds>\d{10}\.\d{3,9}) (?=[\w.-]{1,64} \S)")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def iso(found: re.Match[str], clock: Clock) -> Stamp | None:
    year, month, day = (int(part) for part in found["date"].split("-"))
    zone = found["zone"]
    if zone is None:
        east = clock.zone
    elif zone in ("Z", "UTC"):
        east = 0.0
    else:
        digits = zone.replace(":", "")
        east = (int(digits[1:3]) * 3600 + int(digits[3:5]) * 60) * (-1 if zone[0] == "-" else 1)
    return _wall(year, month, day, found, east)


def ctime(found: re.Match[str], clock: Clock) -> Stamp | None:
    year = found["before"] or found["after"]
    month, day = _MONTHS[found["month"]], int(found["day"])
    if year:
        return _wall(int(year), month, day, found, clock.zone)
    if clock.now is None:
        rough = _wall(2000, month, day, found, clock.zone)
        return rough and Stamp(scale="year", seconds=rough.seconds)
    this = (_EPOCH + timedelta(seconds=min(max(clock.now + clock.zone, 0.0), 4e9))).year
    for guess in range(this + 1, this - 8, -1):  # 29 February may be years ago
        stamp = _wall(guess, month, day, found, clock.zone)
        if stamp is not None and stamp.seconds <= clock.now + 86400:
            return stamp
    return None


def uptime(seconds: float, clock: Clock) -> Stamp:
    return Stamp(scale="boot", seconds=seconds) if clock.boot is None else unix(clock.boot + seconds)


def unix(seconds: float) -> Stamp:
    return Stamp(scale="wall", seconds=seconds, time=seconds)


def microseconds(value: object) -> Stamp | None:
    """A time of the journal: microseconds since 1970, as digits."""
    if not isinstance(value, str | int) or not str(value)[:20].isdecimal() or not str(value).isascii():
        return None
    return unix(int(str(value)[:20]) / 1e6)


def _wall(year: int, month: int, day: int, found: re.Match[str], east: float) -> Stamp | None:
    hour, minute, second = (int(part) for part in found["clock"].split(":"))
    try:
        whole = datetime(year, month, day, hour, minute, min(second, 59), tzinfo=UTC)
    except ValueError:
        return None
    seconds = (whole - _EPOCH).total_seconds() - east + float(f"0.{found['part'] or 0}")
    return Stamp(scale="wall", seconds=seconds, time=seconds)
