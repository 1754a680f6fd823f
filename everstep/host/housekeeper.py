"""Keeps a run's tiers tidy while it trains: removes what retention allows, makes room before a save, and says so.

Housekeeping never stops training: whatever a disk answers is one warning, until it works again. It is done in the
flow's own threads, never in a rank.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from everstep.core.checkpoint import Key
from everstep.core.errors import Damaged, EverstepError
from everstep.core.health import Severity
from everstep.core.job import CheckpointPolicy
from everstep.core.words import size
from everstep.host import retention, runs
from everstep.host.retention import TIERS, Swept
from everstep.store import checkpoint, room
from everstep.store.layout import RunPlaces

LOOK_SECONDS = 2.0
LANDING = 2
"""Snapshots that may come to a tier before anybody can remove one: one is being written and one waits."""


class Housekeeper:
    """One run's housekeeper. `in_use` names the folders that are read just now. No method raises for a disk."""

    def __init__(
        self,
        places: RunPlaces,
        policy: CheckpointPolicy,
        record: Callable[..., None],
        in_use: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = places
        self._policy = policy
        self._record = record
        self._in_use = in_use
        self._clock = clock
        self._turn = threading.Lock()
        self._failing: dict[str, set[object]] = {}
        self._short: set[str] = set()
        self._looked = -LOOK_SECONDS
        self._sizes: dict[Key, int] = {}

    def keep(self) -> None:
        """Remove what retention allows on the local and the persistent tier."""
        self._sweep({})

    def make_room(self) -> None:
        """Look, from time to time, whether the next save will find room, and make some; warn where there is none."""
        if self._clock() - self._looked < LOOK_SECONDS:
            return
        self._looked = self._clock()
        try:
            needed = LANDING * self._next_size()
            for tiers in self._devices() if needed else ():
                self._provide(tiers, needed * len(tiers))
        except (OSError, EverstepError) as error:
            self._fail("room", error)
        else:
            self._failing.pop("room", None)

    def _provide(self, tiers: list[str], needed: int) -> None:
        """Free so much on the device of these tiers, the nearest first: what is on it may vanish anyway."""
        place = self._places.tiers[tiers[0]]
        available, freed = room.free(place), 0
        for tier in tiers:
            if available < needed:
                freed += self._sweep({tier: needed - available})
                available = room.free(place)
        if available >= needed:
            self._short.discard(tiers[0])
            if freed:
                text = f"{size(freed)} were freed for the next save: {room.words(place, available, needed)}"
                self._record("space.made", text=text, tier=tiers[0], bytes=freed, free=available, needed=needed)
            return
        if tiers[0] not in self._short:
            self._short.add(tiers[0])
            text = (
                f"the next saves may find no room: {room.words(place, available, needed)}, and nothing more may be "
                "removed there; free some space, or give the tier another place"
            )
            self._record(
                "space.low",
                severity=Severity.high,
                text=text,
                tier=tiers[0],
                path=str(place),
                free=available,
                needed=needed,
            )

    def _sweep(self, shed: Mapping[str, int]) -> int:
        """One sweep, told event by event; the bytes that it freed."""
        try:
            resumed = {number: claim.resumed_from for number, claim in runs.claims(self._places).items()}
            with self._turn:
                swept = retention.apply(self._places, self._policy, resumed, self._in_use(), shed)
        except (OSError, EverstepError) as error:
            self._fail("retention", error)
            return 0
        self._tell(swept)
        if swept.failures:
            self._fail("retention", swept.failures[0])
        else:
            self._failing.pop("retention", None)
        return sum(one.bytes for one in swept.removed)

    def _tell(self, swept: Swept) -> None:
        for one in swept.removed:
            key = Key.parse(one.folder)
            self._record(
                "checkpoint.removed",
                step=key.step if key else None,
                text=one.why,
                checkpoint=one.folder,
                tier=one.tier,
                bytes=one.bytes,
            )

    def _fail(self, what: str, error: OSError | EverstepError) -> None:
        """Once for each kind of trouble, until it is over."""
        kind = (type(error).__name__, getattr(error, "errno", None))
        known = self._failing.setdefault(what, set())
        if kind not in known:
            known.add(kind)
            self._record(
                "retention.failed",
                severity=Severity.medium,
                text=f"old checkpoints could not be removed, training goes on: {error}",
            )

    def _devices(self) -> Iterable[list[str]]:
        """The tiers by the device that they are on: those that share one need room for both."""
        found: dict[int, list[str]] = {}
        for tier in TIERS:
            found.setdefault(_device(self._places.tiers[tier]), []).append(tier)
        return found.values()

    def _next_size(self) -> int:
        """Bytes that the next save is expected to take: those of the newest one. 0 before the first."""
        keys = (key for tier in TIERS for key in checkpoint.find(self._places.checkpoints(tier))[0])
        newest = max(keys, default=None)
        if newest is None:
            return 0
        if newest not in self._sizes:
            self._sizes = {newest: self._measured(newest)}
        return self._sizes[newest]

    def _measured(self, key: Key) -> int:
        for tier in TIERS:
            try:
                return checkpoint.read_manifest(self._places.checkpoint(tier, key)).bytes
            except Damaged:
                continue
        return 0


def _device(path: Path) -> int:
    """The device of a folder, or of the nearest one above it that exists."""
    for place in (path, *path.absolute().parents):
        try:
            return place.stat().st_dev
        except FileNotFoundError:
            continue
    return 0
