"""How lengths of time, sizes, numbers and money are worded: one way, wherever a person reads them."""

import math
from datetime import UTC, datetime


def duration(seconds: float) -> str:
    """A length of time in the two largest units that fit: 7.6 s, 45 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400:,} d {whole % 86400 // 3600} h"


def size(count: float) -> str:
    """Bytes in a decimal unit; empty where nothing is known."""
    if not count:
        return ""
    value, unit = float(count), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, bigger
    return f"{value:.1f} {unit}" if unit != "B" else f"{count:.0f} B"


def short(value: float) -> str:
    """A number for an axis: 0.05, 250, 1.5k, 20M."""
    if not math.isfinite(value):
        return str(value)
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor * 0.9999995:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def figure(value: float | str) -> str:
    """A measured value: four digits; what is not a number says so."""
    return value if isinstance(value, str) else f"{value:.4g}"


def share(part: float, whole: float) -> str:
    """A part in per cent; what is there is never shown as nothing, and what is missing never as all."""
    per_cent = 100 * part / whole if whole > 0 else 0.0
    if 0 < per_cent < 0.1:
        return "< 0.1 %"
    return "> 99.9 %" if 99.95 <= per_cent < 100 else f"{per_cent:.1f} %"


def money(amount: float, currency: str) -> str:
    """An amount with its currency; a fraction of a cent is not shown as nothing."""
    return f"under 0.01 {currency}" if 0 < amount < 0.005 else f"{amount:,.2f} {currency}"


def hours(amount: float) -> str:
    """Hours to two digits; a little is not shown as nothing."""
    return "under 0.01" if 0 < amount < 0.005 else f"{amount:,.2f}"


def moment(time: float) -> str:
    """A moment (Unix seconds) to the second, UTC."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def count(number: int, noun: str, plural: str = "") -> str:
    """1 restart, 2 restarts, 1,200 restarts."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def first_line(text: str, most: int) -> str:
    """The beginning of a text that may be a program's own words, over many lines."""
    line = next((one.strip() for one in text.splitlines() if one.strip()), "")
    return line if len(line) <= most else line[: most - 3] + "..."
