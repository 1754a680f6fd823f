"""Which checkpoints stay on a tier and which may go, each with the reason. Rules are small objects; judging is pure.

What is protected stays whatever the rules and the space say: the newest verified one, the best, what is pinned, being
copied, read or yet to be copied, what is newer than the newest verified one (it is yet to be judged), and quarantined
ones (evidence). What a run did not write itself is not judged at all. Order is by step and attempt as the manifest says
them, never by a name or a time of the file system.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from everstep.core.checkpoint import Key, abandoned
from everstep.core.job import CheckpointPolicy
from everstep.core.ledger import Event
from everstep.core.record import Record

GIGABYTE = 10**9


@dataclass(frozen=True)
class Kept:
    """One checkpoint on one tier, as retention sees it."""

    key: Key
    verified: bool = False
    quarantined: bool = False
    in_use: bool = False
    pinned: bool = False
    copied: bool = True
    metric: float | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Fate:
    """Whether a checkpoint stays on its tier, and why. `protected` = neither budget nor a lack of room removes it."""

    key: Key
    bytes: int
    keeps: bool
    why: str
    protected: bool = False


class Rule(Protocol):
    """Says which of a tier's checkpoints it wants to keep, each with why.

    `good` are the verified ones that may be resumed from, newest first.
    """

    def keeps(self, good: Sequence[Kept]) -> Mapping[Key, str]: ...


@dataclass(frozen=True)
class Newest:
    """The newest `count`."""

    count: int

    def keeps(self, good: Sequence[Kept]) -> Mapping[Key, str]:
        why = f"one of the newest {self.count}" if self.count > 1 else "the newest"
        return {one.key: why for one in good[: self.count]}


@dataclass(frozen=True)
class EverySteps:
    """The first one at or after each multiple of `steps`: saves by time seldom fall on a round number."""

    steps: int

    def keeps(self, good: Sequence[Kept]) -> Mapping[Key, str]:
        first = {one.key.step // self.steps: one.key for one in good if one.key.step >= self.steps}
        return {key: f"the first from step {mark * self.steps:,} on" for mark, key in first.items()}


@dataclass(frozen=True)
class Retention:
    """The rules of one tier, and the bytes that its checkpoints may take; None is no limit."""

    rules: tuple[Rule, ...]
    budget: int | None = None
    best_mode: str = "min"

    @classmethod
    def of(cls, policy: CheckpointPolicy, tier: str) -> "Retention":
        """What a job's policy means for a tier."""
        rules: tuple[Rule, ...] = (Newest(policy.keep),)
        if policy.keep_every_steps:
            rules += (EverySteps(policy.keep_every_steps),)
        space = getattr(policy.budget_gb, tier, None)
        mode = policy.best.mode if policy.best else "min"
        return cls(rules, None if space is None else int(space * GIGABYTE), mode)

    def judge(self, tier: Iterable[Kept], claims: Mapping[int, int], shed: int = 0) -> list[Fate]:
        """The fate of each checkpoint on a tier, oldest first.

        `claims` maps each claimed attempt to the step it resumed from. `shed` bytes at least are to be freed, if what
        is not protected comes to so many. What the rules keep and space does not allow goes oldest first. With nothing
        verified, nothing goes.
        """
        ordered = sorted(tier, key=lambda one: one.key)
        good = [one for one in reversed(ordered) if one.verified and not one.quarantined]
        good = [one for one in good if not abandoned(one.key, claims)]
        protected = {one.key: why for one in ordered if (why := _protected(one, good, self.best_mode, claims))}
        wished: dict[Key, str] = {}
        for rule in reversed(self.rules):
            wished |= rule.keeps(good)
        fates = [_fate(one, protected.get(one.key), wished.get(one.key), claims) for one in ordered]
        return self._within(fates, shed)

    def _within(self, fates: list[Fate], shed: int) -> list[Fate]:
        """The same, with as many of the oldest unprotected ones given up as space asks for."""
        total, held = sum(one.bytes for one in fates), sum(one.bytes for one in fates if one.keeps)
        limits = [(total - shed, "room is made for the next save")] if shed > 0 else []
        if self.budget is not None:
            limits.append((self.budget, f"the tier's budget is {self.budget:,} bytes"))
        if not limits:
            return fates
        most, why = min(limits)
        told = []
        for one in fates:
            over = held > most and one.keeps and not one.protected
            held -= one.bytes if over else 0
            told.append(Fate(one.key, one.bytes, keeps=False, why=f"{why}; it was {one.why}") if over else one)
        return told


class Freed(Record):
    """What retention has removed from a tier: how many checkpoints, and their bytes."""

    checkpoints: int = 0
    bytes: int = 0


def freed(events: Iterable[Event]) -> dict[str, Freed]:
    """What has been removed by tier, as a run's events tell it."""
    found: dict[str, Freed] = {}
    for event in events:
        if event.kind == "checkpoint.removed":
            tier, size = str(event.data.get("tier") or ""), event.data.get("bytes")
            before = found.get(tier, Freed())
            more = int(size) if isinstance(size, int | float) else 0
            found[tier] = Freed(checkpoints=before.checkpoints + 1, bytes=before.bytes + more)
    return found


def removable(tier: Iterable[Kept], retention: Retention, claims: Mapping[int, int], shed: int = 0) -> list[Key]:
    """The checkpoints that may be deleted from a tier, oldest first."""
    return [fate.key for fate in retention.judge(tier, claims, shed) if not fate.keeps]


def worth_copying(
    there: Iterable[Kept], more: Iterable[Kept], retention: Retention, claims: Mapping[int, int]
) -> list[Key]:
    """Which of `more` would stay on a tier if all of them were there, too, oldest first: the others need not be copied.

    So copying and removing never work against each other.
    """
    wanted = {one.key for one in more}
    stays = (fate.key for fate in retention.judge([*there, *more], claims) if fate.keeps)
    return [key for key in stays if key in wanted]


def _protected(one: Kept, good: Sequence[Kept], best_mode: str, claims: Mapping[int, int]) -> str:
    if not good:
        return "nothing on this tier has been verified yet"
    if one.quarantined:
        return "quarantined: evidence"
    if one.key == good[0].key:
        return "the newest verified"
    if one.key == best(good, best_mode):
        return "the best by its metric"
    if one.pinned:
        return "pinned"
    if one.in_use:
        return "being copied or read"
    if not one.copied:
        return "not yet copied to the next tier"
    if one.key > good[0].key and not abandoned(one.key, claims):
        return "newer than the newest verified: yet to be judged"
    return ""


def best(good: Sequence[Kept], mode: str) -> Key | None:
    """The best by its metric; of equal ones the newest. None where nothing is measured."""
    measured = [one for one in good if one.metric is not None and one.metric == one.metric]
    sign = 1.0 if mode == "min" else -1.0
    chosen = min(measured, key=lambda one: (sign * (one.metric or 0.0), -one.key.step, -one.key.attempt), default=None)
    return chosen.key if chosen else None


def _fate(one: Kept, protected: str | None, wished: str | None, claims: Mapping[int, int]) -> Fate:
    if protected:
        return Fate(one.key, one.bytes, keeps=True, why=protected, protected=True)
    if wished:
        return Fate(one.key, one.bytes, keeps=True, why=wished)
    if abandoned(one.key, claims):
        return Fate(one.key, one.bytes, keeps=False, why="a later attempt went back behind it")
    why = "newer ones stand for it" if one.verified else "never verified, and a newer one is"
    return Fate(one.key, one.bytes, keeps=False, why=why)
