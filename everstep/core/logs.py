"""Reading logs: from text to findings. Pure; linear in the length of the text, bounded in memory.

A line is looked at closely only when it holds the words that begin a known form; all others cost one look at their words.
"""

import re
from collections.abc import Iterator, Sequence

from everstep.core.health import Finding
from everstep.core.log_bursts import Bursts, Sighting
from everstep.core.log_lines import Origin, Printed, read
from everstep.core.log_rules import LogPolicy, Rule, rules, triggers
from everstep.core.log_stamps import UNKNOWN, Clock
from everstep.core.xid_lines import FABRIC, PLUGIN, SXID, XID, Read, pci, read_fabric, read_sxid, read_xid

_CHUNK = 1 << 20  # characters at a time
_LONGEST_JSON = 1 << 18
_CONTINUATIONS = 3  # lines that may belong to the Xid line above them
_REMEMBERED = 20  # lines for which a GPU that was named belongs to what follows

_WORDS = bytes(
    byte if 48 <= byte <= 57 or 97 <= byte <= 122 or byte == 10 else byte + 32 if 65 <= byte <= 90 else 32
    for byte in range(256)
)  # lower case letters, digits and line feeds; all else is a gap between words
_NUMBERED = (
    frozenset((b"nvrm", b"xid")),
    frozenset((b"sxid",)),
    frozenset((b"nvswitch", b"detected")),
    frozenset((b"xidcriticalerror",)),
)
_NAMES_GPU = frozenset((b"nvrm", b"nvidia"))
_STARTS = frozenset(triggers()) | {b"xid", b"sxid", b"nvswitch", b"nvrm", b"xidcriticalerror"}
_GPU = re.compile(r"NVRM: The NVIDIA GPU (?P<device>[0-9a-fA-F:]{7,16}(?:\.0)?)")
_HOST = re.compile(r"(?:localhost|[\w.-]{0,64}?[\d.-][\w.-]{0,64}) +(?=\S)")
_LEAD = re.compile(r"(?:\S{1,80}[:|>;\])-] +|[\w.-]{1,64} [|>] +|[|>-] +){0,4}(?=NVRM: |nvidia-nvswitch\d)")
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_ESCAPED = re.compile(r"\\(?:u001[bB]\[[0-9;?]{0,20}[A-Za-z]|[nrt])")
_BYTES = re.compile(r'"(?:MESSAGE|message)" ?: ?\[')


def classify_log(
    text: str, *, policy: LogPolicy | None = None, clock: Clock = UNKNOWN, origin: Origin = Origin.unknown
) -> list[Finding]:
    """What a piece of log says about GPUs, node, network, storage and program: one finding for each cause.

    `text` is any number of lines in any of the printed forms. `policy` holds a user's own rows, `clock` what is known
    of time (see `Clock`), `origin` who wrote the text where the reader knows: from a program's own log nothing is taken
    that only the kernel may say. Lines of one cause that follow each other within three minutes are one finding; `why`
    then says how many they were. Never raises for any text.
    """
    return [one.finding for one in sightings(text, policy=policy, clock=clock, origin=origin)]


def sightings(
    text: str, *, policy: LogPolicy | None = None, clock: Clock = UNKNOWN, origin: Origin = Origin.unknown
) -> list[Sighting]:
    """The findings of a text with counts, times, parts and primaries, for rules that use history."""
    reader = _Reader(clock, origin, Bursts(policy))
    for chunk, following in _chunks(text):
        reader.take(chunk, following)
    return reader.bursts.sightings()


def _chunks(text: str) -> Iterator[tuple[str, str]]:
    """The text in pieces of whole lines, each with a little of what follows. Of a line without end only its head is given."""
    at, size = 0, len(text)
    while at < size:
        end = (
            size
            if size - at <= _CHUNK
            else max(text.rfind("\n", at, at + _CHUNK), text.rfind("\r", at, at + _CHUNK)) + 1
        )
        if end <= at:
            yield text[at : at + _LONGEST_JSON], ""
            end = text.find("\n", at) + 1 or size
            end = text.find("\r", at, end) + 1 or end
        else:
            yield text[at:end], text[end : end + 1024]
        at = end


class _Reader:
    """Goes over the lines of a text and remembers what a message of several lines needs."""

    def __init__(self, clock: Clock, origin: Origin, bursts: Bursts) -> None:
        self.bursts = bursts
        self._clock = clock
        self._origin = origin
        self._gpu: tuple[int, str] = (-_REMEMBERED, "")
        self._line = 0

    def take(self, chunk: str, following: str) -> None:
        chunk = _plain(chunk)
        lines, later = chunk.split("\n"), _plain(following).split("\n")
        flat = _flat(chunk).split(b"\n")
        harmless = _STARTS.isdisjoint
        for number, words in enumerate(map(bytes.split, flat)):
            if harmless(words) and not (
                lines[number].startswith("{") and _BYTES.search(lines[number], 0, _LONGEST_JSON)
            ):
                continue
            self._line = number
            self._look(lines[number], frozenset(words), lines, later)
        self._gpu = (self._gpu[0] - len(lines), self._gpu[1])

    def _look(self, line: str, words: frozenset[bytes], lines: Sequence[str], later: Sequence[str]) -> None:
        if line.startswith("{") and _BYTES.search(line, 0, _LONGEST_JSON):  # a message that is a list of bytes
            words |= frozenset(_flat(read(line[:_LONGEST_JSON]).message).split())
        places = sorted(
            {place for word in words & _STARTS for more, place in triggers().get(word, ()) if more <= words}
        )
        numbered = any(needed <= words for needed in _NUMBERED)
        if not places and not numbered and not words >= _NAMES_GPU:
            return
        printed = read(line[:_LONGEST_JSON], self._clock)
        if self._origin is not Origin.unknown:
            printed = printed._replace(origin=self._origin)
        kernel = [] if printed.origin is Origin.program else _starts(printed)
        understood = self._numbered(printed, kernel, lines, later) if numbered else None
        if understood is None:
            understood = self._by_rule(printed, kernel, [rules()[place] for place in places])
        if understood is not None:
            self.bursts.add(understood, printed.stamp)
        elif named := next((found for message in kernel if (found := _GPU.match(message))), None):
            self._gpu = (self._line, pci(named["device"]))

    def _numbered(
        self, printed: Printed, kernel: Sequence[str], lines: Sequence[str], later: Sequence[str]
    ) -> Read | None:
        for message in kernel:
            if found := XID.match(message):
                return read_xid(found, self._with_continuations(message[found.end() :], lines, later))
            if found := SXID.match(message):
                return read_sxid(found)
        if found := PLUGIN.search(printed.message):
            return read_xid(found, "")
        found = FABRIC.search(printed.message)
        return read_fabric(found) if found else None

    def _with_continuations(self, rest: str, lines: Sequence[str], later: Sequence[str]) -> str:
        """The rest of an Xid line with the lines below that belong to it: indented ones, and one after an open end."""
        below = [*lines[self._line + 1 : self._line + 1 + _CONTINUATIONS], *later][:_CONTINUATIONS]
        for line in below:
            open_end = not rest.strip() or rest.rstrip().endswith((",", "(", "-"))
            if not line[:1].isspace() and not open_end:
                break
            more = read(line, self._clock).message.removeprefix("NVRM: ")
            if not more or XID.match(f"NVRM: {more}") or SXID.match(more) or (open_end and line[:1] == "{"):
                break
            rest = f"{rest} {more[:400]}"
        return rest

    def _by_rule(self, printed: Printed, kernel: Sequence[str], candidates: Sequence[Rule]) -> Read | None:
        for rule in candidates:
            if not rule.kernel:
                if found := rule.pattern.search(printed.message):
                    return self._understood(rule, found)
                continue
            for message in kernel:
                if found := rule.pattern.match(message):
                    return self._understood(rule, found)
        return None

    def _understood(self, rule: Rule, found: re.Match[str]) -> Read:
        groups = {name: value for name, value in found.groupdict().items() if value}
        device = next((value for name, value in groups.items() if name.startswith("device")), groups.get("index", ""))
        if not device and rule.kind == "gpu_off_bus_no_xid" and self._line - self._gpu[0] < _REMEMBERED:
            device = self._gpu[1]
        if rule.component.startswith("gpu") and ":" in device:
            device = pci(device)
        unit = f"task {groups['task']}" if "task" in groups else f"rank {groups['rank']}" if "rank" in groups else ""
        return Read(
            rule.kind, rule.component, rule.severity, rule.action, rule.why, device, unit=unit, detail=rule.detail
        )


def _flat(text: str) -> bytes:
    """The words of a text, and nothing else; escapes of JSON would be glued to the words behind them."""
    if "\\" in text:
        text = _ESCAPED.sub(" ", text)
    return text.encode("ascii", "replace").translate(_WORDS)


def _plain(chunk: str) -> str:
    """Without colours, and with line feeds only."""
    if "\x1b" in chunk:
        chunk = _COLOUR.sub("", chunk)
    return chunk.replace("\r\n", "\n").replace("\r", "\n") if "\r" in chunk else chunk


def _starts(printed: Printed) -> list[str]:
    """Where the kernel's own message may begin: as read, without the host that some collectors put before it, or after
    a collector's own marks.
    """
    starts = [printed.message]
    if printed.stamp is not None and printed.origin is Origin.unknown and (host := _HOST.match(printed.message)):
        starts.append(printed.message[host.end() :])
    if (lead := _LEAD.match(starts[-1])) and lead.end():
        starts.append(starts[-1][lead.end() :])
    return starts
