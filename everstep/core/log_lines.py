"""How a line of a log is printed: what stands before the message, when it was written, and who wrote it.

Known forms: dmesg with its clocks (seconds since boot, ctime, ISO, -x levels, -H deltas) and callers ([T12], [C3]),
/dev/kmsg records, syslog (RFC 3164 and 5424), journalctl (short and its kin, short-iso, short-full, verbose, -o json),
Docker and Kubernetes logs, the tags of mpirun, srun, torchrun and pdsh, and the fabric manager's own log.
"""

import json
import re
from enum import StrEnum
from typing import NamedTuple

from everstep.core import log_stamps
from everstep.core.log_stamps import CTIME, ISO, KMSG, MONTH, UNIX, UNKNOWN, UPTIME, Clock, Stamp

LONGEST = 4096
"""Characters of a message that are looked at. The kernel prints 1,024 at most; longer ones are programs' dumps."""


class Origin(StrEnum):
    """Who wrote a line. Only the kernel may speak of hardware: a program that prints such a line is no witness."""

    unknown = "unknown"
    kernel = "kernel"
    program = "program"


class Printed(NamedTuple):
    """One line, taken apart."""

    message: str
    origin: Origin = Origin.unknown
    stamp: Stamp | None = None


_FULL = re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?=\d{4}-\d\d-\d\d )")
_MODERN = re.compile(r"<\d{1,3}>1 ")
_KERNEL = re.compile(r"kernel: ?\s*")
_TAG = re.compile(r"(?P<name>[\w./@+:-]{1,64}?)\[(?P<pid>\d{1,10})\]: ?")
_HOST = re.compile(r"[\w.-]{1,64} +(?=kernel:|[\w./@+:-]{1,64}\[\d{1,10}\]:)")
_RFC5424 = re.compile(r"\S{1,255} (?P<name>[\w./-]{1,48}) (?:-|\d{1,10}) (?:-|\S{1,32}) - ?(?:\ufeff)?")
_PDSH = re.compile(r"[\w.-]{1,64}: (?=\[ {0,12}\d{1,10}\.\d|kernel:|kern\b|<\d|\d{4}-\d\d-\d\d[T ]|\[?(?:[A-Z][a-z]{2} )?(?:" + MONTH + r") )")  # fmt: skip
_OTHER = re.compile(
    r"(?:<\d{1,3}>(?:1 )?"  # the priority of syslog
    r"|\[ {0,12}[TC]\d{1,10}\] ?"  # the caller, CONFIG_PRINTK_CALLER
    r"|\[(?:"
    + MONTH
    + r") ?\d{1,2} \d\d:\d\d\] ?|\[ {0,8}\+\d{1,8}\.\d{1,9}\] ?|\[ {0,8}<[ \d.]{1,20}>\] ?"  # dmesg -H, -d
    r"|(?:kern|user|daemon|syslog|local\d) {0,3}[:.] ?(?:emerg|alert|crit|err|error|warn|warning|notice|info|debug) {0,8}:? ?"
    r"|std(?:out|err) [FP] "  # Kubernetes
    r"|\[(?:rank|default)?\d{1,6}(?:,\d{1,6})?\](?:<std(?:out|err)>)?: ?|\d{1,6}: (?=\S)"  # torchrun, mpirun, srun
    r"|\[(?:EMERG|ALERT|CRIT|ERROR|WARN|WARNING|NOTICE|INFO|DEBUG)\] ?|\[tid \d{1,10}\] ?"  # fabric manager
    r"|(?:ERROR|WARNING|INFO|CRITICAL)[: ] ?"
    r"|\d{1,3}(?:\.\d{1,3}){3}: ?"
    r"|MESSAGE="  # journalctl -o verbose, export
    r"|> ?|\s+)"
)
_CONTROL = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def read(line: str, clock: Clock = UNKNOWN) -> Printed:
    """Take one line apart. Never raises: what is not understood stays part of the message."""
    if line.startswith("{"):
        record = _json(line)
        if record is not None:
            return _of_json(record, clock)
    return _Header(clock).read(line)


class _Header:
    """Goes over what stands before a message, part by part."""

    def __init__(self, clock: Clock, origin: Origin = Origin.unknown, stamp: Stamp | None = None) -> None:
        self._clock = clock
        self._origin = origin
        self._stamp = stamp
        self._kernel_clock = (
            False  # a clock of the kernel's own: what looks like a tag behind it is part of the message
        )

    def read(self, line: str) -> Printed:
        text = _CONTROL.sub("", line[:LONGEST])
        modern = _MODERN.match(text) is not None
        at = 0
        for _ in range(16):  # a header has fewer parts; more is no header
            end = self._time(text, at) or self._writer(text, at, modern) or self._other(text, at) or self._tag(text, at)
            if not end:
                break
            at = end
        return Printed(text[at:].rstrip(), self._origin, self._stamp)

    def _time(self, text: str, at: int) -> int:
        if found := ISO.match(text, at):
            stamp = log_stamps.iso(found, self._clock)
        elif found := CTIME.match(text, at):
            stamp = log_stamps.ctime(found, self._clock)
            self._kernel_clock |= found["after"] is not None and found[0].startswith("[")  # dmesg -T
        elif found := UPTIME.match(text, at):
            stamp, self._kernel_clock = log_stamps.uptime(float(found["seconds"]), self._clock), True
        elif found := KMSG.match(text, at):
            stamp, self._kernel_clock = log_stamps.uptime(int(found["micro"]) / 1e6, self._clock), True
        elif not at and (found := UNIX.match(text)):
            stamp = log_stamps.unix(float(found["seconds"]))
        else:
            return 0
        self._stamp = self._stamp or stamp
        return found.end()

    def _writer(self, text: str, at: int, modern: bool) -> int:
        if self._origin is not Origin.unknown:
            return 0
        if found := _KERNEL.match(text, at):
            self._origin = Origin.kernel
            return found.end()
        if modern and self._stamp and (found := _RFC5424.match(text, at)):
            self._origin = Origin.kernel if found["name"] == "kernel" else Origin.program
            return found.end()
        found = _HOST.match(text, at)
        return found.end() if found else 0

    def _other(self, text: str, at: int) -> int:
        found = _FULL.match(text, at) or _OTHER.match(text, at) or _PDSH.match(text, at)
        return found.end() if found else 0

    def _tag(self, text: str, at: int) -> int:
        if self._origin is not Origin.unknown or self._kernel_clock:
            return 0
        found = _TAG.match(text, at)
        if not found:
            return 0
        self._origin = Origin.kernel if found["name"] == "kernel" else Origin.program
        return found.end()


def _json(line: str) -> dict[str, object] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _of_json(record: dict[str, object], clock: Clock) -> Printed:
    """A line of journalctl -o json (a message that is no plain text is a list of bytes there), or another collector's line."""
    keys = ("MESSAGE", "message", "log", "msg", "text")
    text = next((found for key in keys if (found := _text(record.get(key))) is not None), "")
    stamp = log_stamps.microseconds(record.get("__REALTIME_TIMESTAMP")) or log_stamps.microseconds(
        record.get("_SOURCE_REALTIME_TIMESTAMP")
    )
    if stamp is None:
        for key in ("time", "timestamp", "ts", "@timestamp"):
            given = record.get(key)
            if isinstance(given, str) and (printed := ISO.match(given)):
                stamp = log_stamps.iso(printed, clock)
                break
    writer = record.get("SYSLOG_IDENTIFIER") or record.get("_COMM")
    origin = Origin.unknown
    if record.get("_TRANSPORT") == "kernel" or (record.get("_TRANSPORT") is None and writer == "kernel"):
        origin = Origin.kernel
    elif "_TRANSPORT" in record or writer:
        origin = Origin.program
    return _Header(clock, origin, stamp).read(" ".join(text.split("\n")).strip())


def _text(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in value[: 4 * LONGEST]):
        return bytes(value[: 4 * LONGEST]).decode("utf-8", "replace")
    return None
