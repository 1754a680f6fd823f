"""What a supervisor looks at: the ranks' signs of life, their last words, results, claims and the stop file.

A file that is missing or cannot be read means unknown, never failed: whoever asks looks again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.core.checkpoint import MANIFEST, Key
from everstep.core.errors import Damaged
from everstep.core.gating import Word
from everstep.core.segment import Heartbeat, Lease, RankEnd, SegmentResult
from everstep.store.layout import RunPlaces

LONGEST_LOOK = 2.0


@dataclass(frozen=True)
class Watch:
    """What the supervisor asks of others at each tick. All of them return at once and never raise.

    `stop_wish` gives a reason to stop gracefully within the job's grace, or None. `gate` gives the reason why the work
    since the last good checkpoint is to be thrown away, or None. `record(kind, *, step=None, severity=..., text="",
    **data)` appends an event. `save_every` is the rhythm of saves in seconds that holds now, None for the job's own.
    `health` hears the ranks' signs of life, and says whether the next segment may be leased.
    """

    stop_wish: Callable[[], str | None]
    gate: Callable[[], str | None]
    show: Callable[[Heartbeat | None, Lease], None]
    record: Callable[..., None]
    save_every: Callable[[], float | None] = lambda: None
    health: Callable[[Sequence[Heartbeat | None]], Word] = lambda _: Word()


class Pulse:
    """The heartbeats of an attempt's ranks, and how long each has been seen without progress.

    Stillness is counted on the clock that is passed, and only while we look: after a pause of this whole machine or of
    this process (suspended, stopped, swapped out) at most `LONGEST_LOOK` seconds are added, so that ranks that were
    frozen with us get their time to go on.
    """

    def __init__(self, places: RunPlaces, attempt: int, ranks: int, clock: Callable[[], float]) -> None:
        self.beats: list[Heartbeat | None] = [None] * ranks
        self.still: list[float | None] = [0.0] * ranks
        self._places = places
        self._attempt = attempt
        self._clock = clock
        self._counted = [0.0] * ranks
        self._last_look = clock()

    def look(self) -> None:
        now = self._clock()
        passed, self._last_look = min(now - self._last_look, LONGEST_LOOK), now
        for rank, before in enumerate(self.beats):
            beat, known = self._read(rank)
            if not known:
                self.still[rank] = None
                continue
            moved = _life(beat) != _life(before)
            self._counted[rank] = 0.0 if moved else self._counted[rank] + passed
            self.still[rank] = self._counted[rank]
            self.beats[rank] = beat

    def forget_stillness(self) -> None:
        """Give every rank its full time again, because what is expected of it has changed."""
        self._counted = [0.0] * len(self._counted)

    @property
    def step(self) -> int:
        """The newest step that any rank has told of."""
        return max((beat.step for beat in self.beats if beat), default=0)

    @property
    def saved_step(self) -> int:
        return max((beat.saved_step for beat in self.beats if beat), default=0)

    @property
    def last_seen(self) -> float | None:
        """When the last sign of life was given, Unix seconds."""
        return max((beat.time for beat in self.beats if beat), default=None)

    def _read(self, rank: int) -> tuple[Heartbeat | None, bool]:
        """The beat, and whether that is knowledge. No file yet is: the rank has not got that far."""
        path = self._places.heartbeat(rank)
        try:
            beat = Heartbeat.parse(path.read_bytes(), str(path.parent), path.name)
        except FileNotFoundError:
            return None, self.beats[rank] is None
        except (OSError, Damaged):
            return None, False
        return (beat, True) if beat.attempt == self._attempt else (None, False)


def _life(beat: Heartbeat | None) -> tuple[object, ...]:
    return (beat.pid, beat.phase, beat.step, beat.progress) if beat else ()


def last_words(places: RunPlaces, attempt: int, ranks: int) -> dict[int, RankEnd]:
    """The ranks' last words in this attempt, as far as they can be read."""
    words = {}
    for rank in range(ranks):
        path = places.end(attempt, rank)
        try:
            end = RankEnd.parse(path.read_bytes(), str(path.parent), path.name)
        except (OSError, Damaged):
            continue
        if end.attempt == attempt:
            words[rank] = end
    return words


def segment_result(places: RunPlaces, attempt: int, segment: int) -> SegmentResult | None:
    """The result of a segment in this attempt; None if there is none (yet), or an older attempt's."""
    path = places.result(segment)
    try:
        result = SegmentResult.parse(path.read_bytes(), str(path.parent), path.name)
    except (OSError, Damaged):
        return None
    return result if result.attempt == attempt else None


def newest_claim(places: RunPlaces) -> int | None:
    """The greatest attempt number that anybody claimed; None if that cannot be told now."""
    try:
        names = [path.stem for path in places.claim(1).parent.glob("*.json")]
    except OSError:
        return None
    return max((int(name) for name in names if name.isdigit()), default=None)


def stop_request(places: RunPlaces) -> str | None:
    """Who asks by the stop file for a graceful stop; None if nobody does."""
    try:
        text = places.stop_file.read_text(errors="replace")
    except OSError:
        return None
    return text.strip()[:200] or "stop file"


def committed_step(places: RunPlaces, attempt: int) -> int:
    """The newest step that this attempt has committed on the local tier, 0 if none: the files, not what was told."""
    try:
        folders = list(places.checkpoints("local").iterdir())
    except OSError:
        return 0
    keys = [key for folder in folders if (key := Key.parse(folder.name)) and _has_manifest(folder)]
    return max((key.step for key in keys if key.attempt == attempt), default=0)


def _has_manifest(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).exists()
    except OSError:
        return False
