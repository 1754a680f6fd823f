"""A data set in an object store: what is there, what is known of it, and what has to be fetched.

BLAKE3 digests are remembered by path, size and ETag in `<local>/datasets/index/`, so that an unchanged source costs one
listing. A `manifest.json` of a data set beside the data proves the others and shows a listing that lacks some.
"""

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from everstep.core.checkpoint import MANIFEST
from everstep.core.dataset import DatasetManifest, FileEntry, inside
from everstep.core.errors import Damaged
from everstep.core.place import ObjectPlace
from everstep.core.record import Record, Versioned
from everstep.host.arrival import Wanted
from everstep.host.fetch_journal import Journal, Proven
from everstep.host.fetching import Failed, fetch
from everstep.host.shelf import Hold, Progress, Shelf, Staged, is_there
from everstep.store import atomic, digest, faults
from everstep.store.objects import NotThere
from everstep.store.s3 import Bucket

ROUNDS = 3
"""A source that is another one after each fetch is given up after so many."""
MANIFEST_LIMIT = 64 << 20
LOOK_AGAIN = 0.8
"""How much of the data must be there before the source is listed a second time."""


class KnownObject(Record):
    """An object's digest, believed as long as the other two are unchanged."""

    size: int
    etag: str
    blake3: str


class ObjectIndex(Versioned):
    """Digests of a source's objects by path."""

    files: dict[str, KnownObject] = {}


@dataclass
class Source:
    """A data set below a prefix, and where it is brought to."""

    place: ObjectPlace
    store: Bucket
    shelf: Shelf
    name: str = field(init=False)
    fetched: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.name = f"s3-{digest.of_bytes(self.place.uri.encode())[:16]}"

    @property
    def index(self) -> Path:
        return self.shelf.root / "index" / f"{self.name}.json"


def stage(place: ObjectPlace, store: Bucket, shelf: Shelf, progress: Progress) -> Staged:
    """Make the data set available on the shelf, fetching only what is not there.

    Raises ValueError for what the user must mend, StoreUnavailable for what may pass, OSError from the disk.
    """
    source = Source(place, store, shelf)
    with shelf.locked(source.name):
        listed = _listed(source)
        for _ in range(ROUNDS):
            staged = _staged(source, listed, progress)
            if staged:
                return staged
            home = shelf.partial(source.name)
            (home / "data").mkdir(parents=True, exist_ok=True, mode=0o700)
            _borrow(source, home, listed)
            proven, listed = _fetch_and_look(source, home, listed, progress)
            if _is_same(proven, listed):
                return _commit(source, home, proven)
    raise ValueError(
        f"data.source: {place.uri!r} was another data set after each of {ROUNDS} copies; start again when nothing "
        "writes to the data."
    )


def _fetch_and_look(
    source: Source, home: Path, listed: dict[str, Wanted], progress: Progress
) -> tuple[dict[str, Proven], dict[str, Wanted]]:
    """Fetch all, and list the source a second time while the last of it arrives: what is listed anew is the newer truth."""
    looks: list[Future[dict[str, Wanted]]] = []

    def told(done: int, total: int) -> None:
        if not looks and done >= LOOK_AGAIN * total:
            looks.append(pool.submit(_listed, source))
        progress(done, total)

    with ThreadPoolExecutor(1, "everstep-look") as pool:
        proven = _fetch(source, home, listed, listed, told)
        return proven, looks[0].result() if looks else _listed(source)


def _is_same(proven: dict[str, Proven], listed: dict[str, Wanted]) -> bool:
    """Whether the objects that were fetched are those of a listing."""
    return {path: (one.size, one.etag) for path, one in proven.items()} == {
        path: (one.size, one.etag) for path, one in listed.items()
    }


def _commit(source: Source, home: Path, proven: dict[str, Proven]) -> Staged:
    manifest = _manifest(source, proven)
    folder = source.shelf.folder(manifest)
    files = {path: KnownObject(size=one.size, etag=one.etag, blake3=one.blake3) for path, one in proven.items()}
    atomic.write(source.index, ObjectIndex(files=files).to_json().encode(), sync=False)
    with source.shelf.locked(folder.name):
        hold = source.shelf.hold(folder)
        if source.shelf.staged(folder, manifest):  # the same files, from another place
            shutil.rmtree(home)
        else:
            faults.point("stage.before_commit")
            source.shelf.commit(home, folder, manifest)
    faults.point("stage.named")
    return _told(source, manifest, folder, hold)


def _told(source: Source, manifest: DatasetManifest, folder: Path, hold: Hold) -> Staged:
    moved = sum(entry.size for entry in manifest.files if entry.path in source.fetched)
    return Staged(manifest, folder / "data", len(source.fetched), moved, hold)


def _staged(source: Source, listed: dict[str, Wanted], progress: Progress) -> Staged | None:
    """The data set as it was staged before, with what is damaged or missing fetched again; None if it never was."""
    if not all(one.blake3 for one in listed.values()):
        return None
    manifest = _manifest(source, listed)
    folder = source.shelf.folder(manifest)
    with source.shelf.locked(folder.name):
        hold = source.shelf.hold(folder)
        before = source.shelf.staged(folder, manifest)
        if before is None:
            return None
        missing = {entry.path: listed[entry.path] for entry in manifest.files if not is_there(folder, entry, before)}
        if missing:
            for path in missing:
                (folder / "data" / path).unlink(missing_ok=True)
            _fetch(source, folder, missing, listed, progress)
            source.shelf.commit(folder, folder, manifest)
        return _told(source, before.dataset, folder, hold)


def _fetch(
    source: Source, home: Path, missing: dict[str, Wanted], listed: dict[str, Wanted], progress: Progress
) -> dict[str, Proven]:
    """Fetch what is missing; where objects have other digests than are remembered, those are forgotten."""
    total = sum(one.size for one in listed.values())
    needed = sum(one.size for one in missing.values())
    there = sum(
        path.lstat().st_size for name in ("data", "parts") for path in (home / name).rglob("*") if path.is_file()
    )
    source.shelf.make_room(home, max(0, needed - (there if len(missing) == len(listed) else 0)), total)
    try:
        proven, fetched = fetch(
            source.store, home, missing.values(), lambda done: progress(total - needed + done, total)
        )
    except Failed as failed:
        source.index.unlink(missing_ok=True)
        raise failed.told() from None
    source.fetched |= fetched
    return proven


def _listed(source: Source) -> dict[str, Wanted]:
    """The objects below the prefix by relative path, sorted, with the digests that are known already."""
    place, known = source.place, _read_index(source.index)
    found: dict[str, Wanted] = {}
    for stat in source.store.list(place.prefix):
        path = stat.key[len(place.prefix) + 1 :] if place.prefix else stat.key
        if path.endswith("/") and stat.size == 0:
            continue  # a folder, as some tools make them
        found[_checked(path)] = Wanted(path, stat.key, stat.size, stat.etag)
    if not found:
        raise ValueError(f"data.source: {place.uri!r} holds no objects; put the data there or name another prefix.")
    _check_folders(found)
    found = _promised(source, found)
    for path, one in found.items():
        before = known.get(path)
        if before and not one.blake3 and (before.size, before.etag) == (one.size, one.etag):
            found[path] = Wanted(path, one.key, one.size, one.etag, before.blake3)
    faults.point("stage.listed")
    return dict(sorted(found.items()))


def _checked(path: str) -> str:
    try:
        return inside(path)
    except ValueError:
        raise ValueError(f"data.source: {path!r} is a name that cannot be staged; rename the object.") from None


def _check_folders(found: dict[str, Wanted]) -> None:
    for path in found:
        above = path
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in found:
                raise ValueError(
                    f"data.source: {above!r} is an object and has others below it, such as {path!r}; rename one of them."
                )


def _promised(source: Source, found: dict[str, Wanted]) -> dict[str, Wanted]:
    """What a manifest beside the data says of the objects. One that is not listed is looked for by its name."""
    own = found.get(MANIFEST)
    if own is None or own.size > MANIFEST_LIMIT:
        return found
    try:
        data = source.store.read(own.key, etag=own.etag)
        manifest = DatasetManifest.parse(data, source.place.uri, MANIFEST)
    except (Damaged, NotThere):
        return found  # a file of that name that is part of the data
    for entry in manifest.files:
        one = found.get(entry.path) or _look_for(source, entry)
        if one.size != entry.size:
            raise ValueError(
                f"data.source: {entry.path!r} has {one.size} bytes and {MANIFEST} beside it says {entry.size}; "
                "put the file or the manifest right."
            )
        found[entry.path] = Wanted(one.path, one.key, one.size, one.etag, entry.blake3)
    return found


def _look_for(source: Source, entry: FileEntry) -> Wanted:
    stat = source.store.head(source.place.key(entry.path))
    if stat is None:
        raise ValueError(
            f"data.source: {entry.path!r} is named in {MANIFEST} but is not there; put it back or mend the manifest."
        )
    return Wanted(entry.path, stat.key, stat.size, stat.etag)


def _borrow(source: Source, home: Path, listed: dict[str, Wanted]) -> None:
    """Files that another staged data set has need not be fetched: they get a second name here, and are proven there."""
    wanted = {one.blake3: one for one in listed.values() if one.blake3}
    if not wanted:
        return
    journal = Journal(home)
    found = source.shelf.find({blake3: one.size for blake3, one in wanted.items()})
    for one in listed.values():
        path, target = found.get(one.blake3), home / "data" / one.path
        if path is None or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            os.link(path, target)
        except OSError:
            continue  # it is fetched then
        journal.record(Proven(one.path, one.etag, one.size, one.size, one.blake3))


def _manifest(source: Source, files: Mapping[str, Wanted | Proven]) -> DatasetManifest:
    entries = tuple(FileEntry(path=path, size=one.size, blake3=one.blake3) for path, one in sorted(files.items()))
    return DatasetManifest(source=source.place.uri, files=entries)


def _read_index(path: Path) -> dict[str, KnownObject]:
    """What is remembered. It only saves time, so an unreadable index is an empty one."""
    try:
        return ObjectIndex.parse(path.read_bytes(), str(path.parent), path.name).files
    except (FileNotFoundError, Damaged):
        return {}
