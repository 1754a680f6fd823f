"""Looks at a run's marks and checkpoints from a side thread, so that no hung tier holds up supervision.

Turns what the child and the copier did into events, and knows what the train flow asks at every tick: the newest
durable step, and whether a checkpoint of the running attempt turned out damaged.
"""

import threading
import time
from collections.abc import Callable, Iterator

from everstep.core.checkpoint import Key, State, abandoned
from everstep.core.errors import EverstepError
from everstep.core.health import Severity
from everstep.host.runs import claims, takeover_wish
from everstep.host.tail import Row, Tail
from everstep.store import checkpoint, marks
from everstep.store.layout import RunPlaces

LOOK_SECONDS = 0.25
_KINDS = {
    State.verified: "checkpoint.verified",
    State.durable: "checkpoint.durable",
    State.quarantined: "checkpoint.quarantined",
}


class Observer:
    """Watches one run for the life of a flow run."""

    def __init__(self, places: RunPlaces, record: Callable[..., None]) -> None:
        self.landed: Callable[[Key, str], None] = lambda _key, _uri: None
        self.tend: Callable[[], None] = lambda: None
        self.durable_step = 0
        self.durable: Key | None = None
        self._landed = ""
        self.attempt = 0
        self._damaged: str | None = None
        self._takeover = False
        self._places = places
        self._record = record
        self._known: set[tuple[str, str, State]] = set()
        self._overtaken: set[Key] = set()
        self._failures = {
            "local": Tail(places.persistent / "save-errors.jsonl"),
            "": Tail(places.persistent / "copier.jsonl"),
        }
        self._removals = Tail(places.persistent / "copier.jsonl")
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="everstep-observer", daemon=True)

    def start(self) -> None:
        """Learn what is there already, then watch."""
        self._known = self._present()
        self._note_durable()
        for _ in (*self._failed_since(), *self._removed_since()):
            pass  # an earlier flow run has told of these
        self._thread.start()

    def stop(self) -> None:
        """Look once more, and end; nothing if it was never started."""
        if self._thread.ident is None:
            return
        self._over.set()
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self.look()

    def follow(self, attempt: int) -> None:
        """From now on damage of this attempt's checkpoints closes the gate."""
        self._damaged = None
        self.attempt = attempt

    def report_damage(self, folder: str) -> None:
        """A verification beside the next segment failed."""
        self._damaged = folder

    def gate(self) -> str | None:
        """The folder of this attempt's checkpoint that is damaged, or None."""
        return self._damaged

    def takeover(self) -> str | None:
        """Why the run must be given to another flow run, or None."""
        return "another flow run takes over" if self._takeover else None

    def look(self) -> None:
        """Compare what is there with what is known, and record what is new."""
        with self._lock:
            present = self._present()
            for folder, tier, state in sorted(present - self._known, key=lambda one: (one[0], one[2].value, one[1])):
                self._tell(folder, tier, state)
            self._tell_overtaken(present)
            self._known |= present
            self._note_durable()
            for row in self._removed_since():
                key = Key.parse(str(row.get("checkpoint")))
                told = {name: row.get(name) for name in ("checkpoint", "tier", "bytes")}
                self._record("checkpoint.removed", step=key.step if key else None, text=str(row.get("text")), **told)
            for tier, row in self._failed_since():
                text = str(row.get("error") or row.get("text"))
                self._record("checkpoint.failed", step=row.get("step"), severity=Severity.high, text=text, tier=tier)

    def _failed_since(self) -> Iterator[tuple[str, Row]]:
        """What the child could not save and the copier could not copy since the last look; both try again."""
        for tier, tail in self._failures.items():
            for rows in tail.batches(
                1000, lambda _row: 1, lambda row: row.get("kind", "copier.error") == "copier.error"
            ):
                yield from ((tier or str(row.get("tier", "")), row) for row in rows)

    def _removed_since(self) -> Iterator[Row]:
        """What the uploader has removed from the object tier since the last look."""
        for rows in self._removals.batches(1000, lambda _row: 1, lambda row: row.get("kind") == "checkpoint.removed"):
            yield from rows

    def _tell(self, folder: str, tier: str, state: State) -> None:
        key = Key.parse(folder)
        if state is State.saved:
            self._record("checkpoint.saved", step=key.step if key else None, checkpoint=folder, tier=tier)
            return
        reason = marks.reason(self._places, folder, tier, state)
        self._record(
            _KINDS[state], step=key.step if key else None, checkpoint=folder, tier=tier, text=reason, reason=reason
        )
        rotted = (
            folder,
            tier,
            State.verified,
        ) in self._known  # bytes that were right once are no fault of the training
        if state is State.quarantined and tier == "local" and key and key.attempt == self.attempt and not rotted:
            self._damaged = folder

    def _tell_overtaken(self, present: set[tuple[str, str, State]]) -> None:
        """Name the checkpoints that went from the local tier before any copy was made: newer ones had overtaken them."""
        saved = _saved(present)
        safe = {folder for folder, _, state in self._known | present if state in (State.durable, State.quarantined)}
        left = {key for key in _saved(self._known) - saved - self._overtaken if key.folder not in safe}
        passed = sorted(key for key in left if saved and key < max(saved))
        if not passed:
            return
        resumed = {number: claim.resumed_from for number, claim in claims(self._places).items()}
        for key in passed:
            self._overtaken.add(key)
            if not abandoned(key, resumed):
                text = f"{key.folder} was overtaken by newer checkpoints before it could be copied, and was dropped"
                self._record("checkpoint.overtaken", step=key.step, text=text, checkpoint=key.folder)

    def _present(self) -> set[tuple[str, str, State]]:
        found = {
            (folder, tier, state) for (folder, tier), states in marks.states(self._places).items() for state in states
        }
        saved, _ = checkpoint.find(self._places.checkpoints("local"))
        return found | {(key.folder, "local", State.saved) for key in saved}

    def _note_durable(self) -> None:
        keys = [Key.parse(folder) for folder, _, state in self._known if state is State.durable]
        newest = max((key for key in keys if key), default=None)
        if newest is not None:
            far = (newest.folder, "object", State.durable) in self._known
            uri = self._places.uri("object" if far else "persistent", newest.folder)
            if uri != self._landed:
                self.landed(newest, uri)
                self._landed = uri
        self.durable = newest
        self.durable_step = newest.step if newest else 0

    def _run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            try:
                self.look()
                self.tend()
                self._takeover = takeover_wish(self._places).exists()
            except (OSError, EverstepError):  # a tier that does not answer now may answer later: unknown is not failed
                time.sleep(LOOK_SECONDS)


def _saved(seen: set[tuple[str, str, State]]) -> set[Key]:
    """The checkpoints that the local tier holds, or held."""
    return {key for folder, _, state in seen if state is State.saved and (key := Key.parse(folder))}
