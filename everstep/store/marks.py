"""What is known of each checkpoint on each tier: small files in `marks/` of the run directory.

A mark is about one committed manifest. `verified` and `durable` count only while the manifest on the tier is the one
that was marked; `quarantined` counts until somebody removes the mark.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.core.checkpoint import Key, Mark, State, Verification
from everstep.core.errors import Damaged
from everstep.store import atomic, checkpoint
from everstep.store.layout import RunPlaces

_NAME = re.compile(r"^(step-\d{8,}\.a\d+)\.([a-z]+)\.(verified|durable|quarantined)\.json$")


def write(places: RunPlaces, mark: Mark) -> None:
    """Put a mark, in place of an older one of the same state."""
    path = places.mark(mark.checkpoint, mark.tier, mark.state.value)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic.write(path, mark.to_json().encode())


def verified(places: RunPlaces, folder: str, tier: str, verification: Verification) -> None:
    """Mark what `checkpoint.verify` answered: verified, or quarantined with its reason."""
    state = State.verified if verification.ok else State.quarantined
    _put(places, folder, tier, state, verification.manifest_digest, verification.why)


def durable(places: RunPlaces, folder: str, tier: str, manifest_digest: str) -> None:
    """A verified copy stands on a tier that survives the machine."""
    _put(places, folder, tier, State.durable, manifest_digest)


def quarantine(places: RunPlaces, folder: str, tier: str, reason: str) -> None:
    """Never to be chosen, and kept, with the reason."""
    _put(places, folder, tier, State.quarantined, "", reason)


def read(places: RunPlaces) -> list[Mark]:
    """Every mark that can be read. An unreadable quarantine still counts as one: its file's name says enough."""
    found = []
    for path in sorted(_folder(places).glob("*.json")):
        match = _NAME.match(path.name)
        if not match or match[2] not in places.tiers:
            continue
        try:
            mark = Mark.parse(path.read_bytes(), str(path.parent), path.name)
        except FileNotFoundError:
            continue
        except Damaged as error:
            if match[3] == State.quarantined:
                found.append(
                    Mark(checkpoint=match[1], tier=match[2], state=State.quarantined, time=0, reason=str(error))
                )
            continue
        if (mark.checkpoint, mark.tier, mark.state.value) == match.groups():
            found.append(mark)
    return found


def states(places: RunPlaces) -> dict[tuple[str, str], set[State]]:
    """The states that count now, by (checkpoint's folder, tier)."""
    present: dict[tuple[str, str], str | None] = {}
    found: dict[tuple[str, str], set[State]] = {}
    for mark in read(places):
        place = (mark.checkpoint, mark.tier)
        if mark.state is not State.quarantined:
            if place not in present:
                present[place] = checkpoint.manifest_digest(places.checkpoints(mark.tier) / mark.checkpoint)
            if not mark.manifest_digest or present[place] != mark.manifest_digest:
                continue
        found.setdefault(place, set()).add(mark.state)
    return found


def reason(places: RunPlaces, folder: str, tier: str, state: State) -> str:
    """The sentence that goes with a mark; empty if there is none."""
    return next(
        (mark.reason for mark in read(places) if (mark.checkpoint, mark.tier, mark.state) == (folder, tier, state)), ""
    )


def lift(places: RunPlaces, folder: str, tier: str) -> None:
    """Take a quarantine back."""
    places.mark(folder, tier, State.quarantined.value).unlink(missing_ok=True)


def forget(places: RunPlaces, folder: str, tier: str) -> None:
    """Remove the marks of a checkpoint that has been removed from a tier."""
    for state in (State.verified, State.durable, State.quarantined):
        places.mark(folder, tier, state.value).unlink(missing_ok=True)


def advertise(places: RunPlaces, keys: Iterable[Key], file: str = "copying.json") -> None:
    """Say which checkpoints are being copied, so that retention leaves them. Not synced: it binds living processes.

    Each kind of copier has a `file` of its own.
    """
    atomic.write(places.persistent / file, json.dumps([key.folder for key in keys]).encode(), sync=False)


def copying(places: RunPlaces) -> set[Key]:
    """The checkpoints that copiers say they are copying; what a dead one left is cleared by the next."""
    return {key for file in ("copying.json", "copying-object.json") for key in _keys(places.persistent / file)}


def promote(places: RunPlaces, keys: Iterable[Key]) -> None:
    """Ask for these checkpoints on the object tier, besides those asked for before; there they are kept for good."""
    wanted = sorted({*promotions(places), *keys})
    atomic.write(_promote(places), json.dumps([key.folder for key in wanted]).encode())


def promotions(places: RunPlaces) -> list[Key]:
    """The checkpoints that were asked to be brought to the object tier, oldest first."""
    return sorted(_keys(_promote(places)))


def pin(places: RunPlaces, folder: str) -> None:
    """Keep a checkpoint, whatever retention allows: a person said so, or it was to go into production."""
    with _changing(_pinned(places)):
        if folder not in (known := pinned(places)):
            atomic.write(_pinned(places), json.dumps(sorted({*known, folder})).encode())


def unpin(places: RunPlaces, folder: str) -> None:
    """Leave a checkpoint to retention again."""
    with _changing(_pinned(places)):
        if folder in (known := pinned(places)):
            atomic.write(_pinned(places), json.dumps(sorted(known - {folder})).encode())


def pinned(places: RunPlaces) -> set[str]:
    """The folders that retention leaves alone."""
    return {key.folder for key in _keys(_pinned(places))}


def give_up(places: RunPlaces, keys: Iterable[Key]) -> None:
    """Say that these were removed from the persistent tier to make room, so that no copier brings them there again."""
    near = set(checkpoint.find(places.checkpoints("local"))[0])
    known = {*given_up(places), *keys}
    if known:
        atomic.write(_given_up(places), json.dumps([key.folder for key in sorted(known & near)]).encode())


def given_up(places: RunPlaces) -> set[Key]:
    """The checkpoints that made room on the persistent tier and may still be on the local one."""
    return set(_keys(_given_up(places)))


def _put(places: RunPlaces, folder: str, tier: str, state: State, digest: str, why: str = "") -> None:
    mark = Mark(checkpoint=folder, tier=tier, state=state, time=time.time(), reason=why, manifest_digest=digest)
    write(places, mark)


def _folder(places: RunPlaces) -> Path:
    return places.mark("x", "x", "x").parent


def _pinned(places: RunPlaces) -> Path:
    return places.persistent / "pinned.json"


def _given_up(places: RunPlaces) -> Path:
    return places.persistent / "given-up.json"


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """One at a time reads a list and writes it anew: a person and a flow may both pin at once."""
    handle = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _promote(places: RunPlaces) -> Path:
    return places.persistent / "promote.json"


def _keys(path: Path) -> list[Key]:
    try:
        names = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError:
        raise Damaged(str(path.parent), path.name, "is not a list of checkpoints; remove it") from None
    keys = [Key.parse(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return [key for key in keys if key]
