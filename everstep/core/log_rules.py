"""The catalogues of what logs say: Xid and SXid numbers, and lines without a number. Data in `core/data/*.csv`.

`sources` in a row holds what each source says of that code, as it was found; where they disagree, a `LogPolicy` decides.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from pydantic import Field, model_validator

from everstep.core.health import Action, Severity
from everstep.core.record import Record


class Row(Record):
    """What one Xid or SXid number means. `next` is the rung after `action`, `lives` whether training goes on."""

    code: int
    name: str
    kind: str
    component: str
    severity: Severity
    action: Action
    next: str = ""
    lives: str = ""
    cause: str
    sources: str = ""


class Rule(NamedTuple):
    """What one printed form without a number means.

    `kernel` forms count only at the start of a message that no program wrote. `echo_of` names kinds of which this one
    is a consequence or another view; a `detail` of one of them is not worth a finding of its own beside it.
    """

    kind: str
    kernel: bool
    triggers: tuple[frozenset[bytes], ...]
    pattern: re.Pattern[str]
    component: str
    severity: Severity
    action: Action
    why: str
    echo_of: frozenset[str]
    detail: bool
    source: str


class Override(Record):
    """What a user puts in place of a row's own; what is left out stays. `ignore` drops the finding."""

    severity: Severity | None = None
    action: Action | None = None
    component: str | None = Field(default=None, pattern=r"^[a-z_]+(/[a-z0-9_]+)?$")
    why: str | None = Field(default=None, min_length=1, max_length=400)
    ignore: bool = False


class LogPolicy(Record):
    """A user's own rows, by Xid, by SXid and by kind. A number goes before a kind; a number may be unknown so far.

    What is written here holds whatever else a line says (reset flags, Fatal, the number of Xid 154).
    """

    xid: dict[int, Override] = {}
    sxid: dict[int, Override] = {}
    kinds: dict[str, Override] = {}

    @model_validator(mode="after")
    def _names_known_kinds(self) -> "LogPolicy":
        known = kinds()
        for kind in self.kinds:
            if kind not in known:
                near = get_close_matches(kind, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else "docs/logs.md lists the kinds."
                raise ValueError(f"kinds: there is no kind {kind!r}; {hint}")
        for field, codes in (("xid", self.xid), ("sxid", self.sxid)):
            for code in codes:
                if not 0 < code < 100_000:
                    raise ValueError(f"{field}: {code} is no such number; give one from 1 to 99999.")
        return self

    def of(self, xid: int | None, sxid: int | None, kind: str) -> Override | None:
        if xid is not None and xid in self.xid:
            return self.xid[xid]
        if sxid is not None and sxid in self.sxid:
            return self.sxid[sxid]
        return self.kinds.get(kind)


NVLINK5 = ("nvlink5_fatal", "nvlink5_nonfatal")
"""What Xid 144 to 150 become once the line has said which."""


@cache
def xids() -> Mapping[int, Row]:
    return _rows("xid.csv")


@cache
def sxids() -> Mapping[int, Row]:
    return _rows("sxid.csv")


@cache
def rules() -> tuple[Rule, ...]:
    """In the order in which they are tried: the first that matches a line names it."""
    return tuple(_rule(row) for row in _read("lines.csv"))


@cache
def kinds() -> frozenset[str]:
    """All kinds that a finding can have."""
    named = {row.kind for row in xids().values()} | {rule.kind for rule in rules()}
    return frozenset(named | {"xid_unknown", "sxid_fatal", "sxid_nonfatal", "sxid", *NVLINK5})


@cache
def echo_of(kind: str) -> frozenset[str]:
    """The kinds of which this one is only an echo: where one of them is seen at about the same time, blame that one."""
    if kind == "secondary_teardown":
        return frozenset(row.kind for row in xids().values()) - {kind}
    if kind == "sxid":
        return frozenset(("sxid_fatal", "sxid_nonfatal"))
    return frozenset[str]().union(*(rule.echo_of for rule in rules() if rule.kind == kind))


@cache
def triggers() -> Mapping[bytes, tuple[tuple[frozenset[bytes], int], ...]]:
    """For each word that can begin a search: what else must stand in the line, and the place of the rule in `rules()`."""
    index: dict[bytes, list[tuple[frozenset[bytes], int]]] = {}
    for place, rule in enumerate(rules()):
        for words in rule.triggers:
            index.setdefault(min(words, key=_commonness), []).append((words, place))
    return {word: tuple(found) for word, found in index.items()}


_COMMON = {
    word: rank
    for rank, words in enumerate(
        (
            b"failed timeout event worker",
            b"error warn cuda signal driver",
            b"nccl memory device link read write nvidia kernel mlx5",
        ),
        1,
    )
    for word in words.split()
}  # words that harmless lines hold too, the commonest last: of a trigger's words the rarest is looked for first


def _commonness(word: bytes) -> tuple[int, int, bytes]:
    return _COMMON.get(word, 0), -len(word), word


def _rows(name: str) -> Mapping[int, Row]:
    rows = (Row.model_validate(row) for row in _read(name))
    return {row.code: row for row in rows}


def _read(name: str) -> Iterable[dict[str, str]]:
    text = files("everstep.core").joinpath("data", name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


def _rule(row: Mapping[str, str]) -> Rule:
    return Rule(
        kind=row["kind"],
        kernel=row["where"] == "kernel",
        triggers=tuple(frozenset(words.encode().split(b"+")) for words in row["triggers"].split()),
        pattern=re.compile(row["pattern"]),
        component=row["component"],
        severity=Severity(row["severity"]),
        action=Action(row["action"]),
        why=row["why"],
        echo_of=frozenset(row["echo_of"].split()),
        detail=row["detail"] == "yes",
        source=row["source"],
    )
