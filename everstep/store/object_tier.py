"""One run on the object tier: `<place>/<name>/<run>/`, in an S3 bucket or in a directory that stands for one.

    run.json, structure.json      who the run is, and what its checkpoints must hold
    attempts/<n>.json             the fencing tokens, each made by a conditional PUT
    checkpoints/<checkpoint>/     as on the other tiers
    history/                      the newest copies of the run's journal, metrics and phases

Commit rule: files first, each read back from there and proven against the manifest, then `manifest.json` by a single
PUT. Removal goes the other way round: the manifest first.
"""

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from blake3 import blake3

from everstep.core.checkpoint import MANIFEST, AttemptClaim, Key, Manifest
from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged, StoreUnavailable
from everstep.core.place import ObjectPlace, S3Settings, is_object
from everstep.store import atomic, checkpoint, digest, faults
from everstep.store.folder import FolderStore
from everstep.store.objects import Changed, Exists, Moved, NotThere, ObjectStore

if TYPE_CHECKING:
    from everstep.store.s3 import Access

PIECE = 8 << 20
AHEAD = 3
"""Pieces that are read ahead: memory stays under (AHEAD + 1) * PIECE bytes."""
NAMED = 10


def connect(uri: str, access: "Access | None" = None, seconds: float = 60.0) -> tuple[ObjectStore, str]:
    """The store of a place on the object tier, and the prefix of its keys. `access` is for s3:// only.

    One that does not answer is asked the same thing for about so many `seconds`.
    """
    if not is_object(uri):
        return FolderStore(Path(uri)), ""
    from everstep.store import s3

    place = ObjectPlace.parse(uri)
    if access is None:
        raise ValueError(f"{uri}: there are no S3 settings to reach it; name the endpoint, or set the AWS variables")
    return s3.open_store(place.bucket, access, patience=s3.Patience(seconds=seconds)), place.prefix


def open_run(uri: str, access: "Access | None" = None, *, seconds: float = 60.0) -> "ObjectTier":
    """The run whose place on the object tier is `uri`. See `connect`."""
    store, prefix = connect(uri, access, seconds)
    return ObjectTier(store, prefix, uri)


def runs(uri: str, access: "Access | None" = None, *, seconds: float = 60.0) -> dict[str, bytes]:
    """The `run.json` of every run below `uri` (a place and a job's name), by the run's name. See `connect`."""
    store, prefix = connect(uri, access, seconds)
    found = {}
    for stat in store.list(prefix):
        path = stat.key.removeprefix(f"{prefix}/") if prefix else stat.key
        run, _, rest = path.partition("/")
        if rest == "run.json":
            found[run] = store.read(stat.key)
    return found


@contextmanager
def nearby(uri: str) -> Iterator[Path]:
    """The checkpoint at an `s3://` URI as a folder for the length of the block, reached as the environment says.

    The run's record and structure stand two folders above it, and the folders are named as there: what belongs to another
    run is seen, as in a run directory.

    Raises ValueError for a URI that names none, NotThere, Damaged, StoreUnavailable.
    """
    from everstep.store import s3

    run, _, folder = uri.rstrip("/").rpartition("/checkpoints/")
    key = Key.parse(folder)
    if key is None or not run:
        raise ValueError(
            f"uri: {uri!r} names no checkpoint; give s3://bucket/.../checkpoints/step-<8 digits>.a<attempt>"
        )
    with TemporaryDirectory(prefix="everstep-") as place:
        job_and_run = [name for name in run.split("/")[-2:] if name not in ("", ".", "..")]
        home = Path(place, *job_and_run)
        target = home / "checkpoints" / key.folder
        target.parent.mkdir(parents=True)
        tier = open_run(run, s3.access(S3Settings()))
        tier.fetch(key, target)
        for name in ("structure.json", "run.json"):
            with suppress(NotThere):
                (home / name).write_bytes(tier.read(name))
        yield target


@dataclass(frozen=True)
class Seen:
    """What a listing showed: the size of each object by its path in the run."""

    sizes: Mapping[str, int]

    @property
    def attempts(self) -> list[int]:
        names = (path.removeprefix("attempts/").removesuffix(".json") for path in self._below("attempts"))
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def committed(self) -> list[Key]:
        """Checkpoints with a manifest, oldest first."""
        folders = (path.split("/")[1] for path in self._below("checkpoints") if path.endswith(f"/{MANIFEST}"))
        return sorted(key for folder in folders if (key := Key.parse(folder)))

    @property
    def torn(self) -> list[Key]:
        """Checkpoints without one, oldest first."""
        keys = {key for path in self._below("checkpoints") if (key := Key.parse(path.split("/")[1]))}
        return sorted(keys - set(self.committed))

    def files(self, key: Key) -> dict[str, int]:
        """The sizes of a checkpoint's files by name."""
        begin = f"checkpoints/{key.folder}/"
        return {path.removeprefix(begin): size for path, size in self.sizes.items() if path.startswith(begin)}

    def _below(self, folder: str) -> Iterator[str]:
        return (path for path in self.sizes if path.startswith(f"{folder}/"))


class ObjectTier:
    """One run there; see the module. Methods raise what `ObjectStore` raises."""

    def __init__(self, store: ObjectStore, prefix: str, uri: str) -> None:
        self.uri = uri
        self._store = store
        self._prefix = prefix

    def look(self, below: str = "") -> Seen:
        """List what is there; `below` is a folder of the run."""
        begin = f"{self._prefix}/" if self._prefix else ""
        sizes = {stat.key.removeprefix(begin): stat.size for stat in self._store.list(self._key(below))}
        return Seen(sizes)

    def read(self, path: str) -> bytes:
        """A small object, whole. Raises NotThere."""
        return self._store.read(self._key(path))

    def write(self, path: str, data: bytes) -> None:
        self._store.put(self._key(path), data)

    def write_file(self, path: str, source: Path) -> None:
        self._store.put_file(self._key(path), source)

    def delete(self, path: str) -> None:
        self._store.delete(self._key(path))

    def stream(self, path: str, size: int) -> Iterator[bytes]:
        """An object's bytes in order. Raises NotThere, also where it has another size."""
        return self._pieces(self._key(path), size)

    def manifest(self, key: Key) -> bytes:
        """The manifest of a committed checkpoint. Raises NotThere."""
        return self.read(f"checkpoints/{key.folder}/{MANIFEST}")

    def claims(self, known: Mapping[int, bytes] | None = None) -> dict[int, bytes]:
        """The claims of all attempts by number; those in `known` are not read again."""
        old = known or {}
        return {number: old.get(number) or self.read(_claim(number)) for number in self.look("attempts").attempts}

    def claim(self, wanted: AttemptClaim) -> bool:
        """Claim an attempt; whether it is ours. A reply that was lost is no loss: the claim itself tells.

        It is looked for before and after, since a store without conditional PUT would let a second claim replace the
        first: there only two that claim within the same moment may both believe that they did.
        """
        data, path = wanted.to_json().encode(), _claim(wanted.attempt)
        with suppress(NotThere):
            return self.read(path) == data
        with suppress(Exists):
            self._store.put(self._key(path), data, create=True)
        return self.read(path) == data

    def is_guarded(self, claimed: AttemptClaim) -> bool:
        """Whether the store refuses to create what is there, shown on a claim of ours. Without that, two may claim."""
        try:
            self._store.put(self._key(_claim(claimed.attempt)), claimed.to_json().encode(), create=True)
        except Exists:
            return True
        return False

    def upload(self, source: Path, allowed: Callable[[], None], moved: Moved | None = None) -> int:
        """Bring the committed checkpoint in `source` there; the number of bytes that had to be moved.

        `moved` is told of those bytes as they move.

        May be killed anywhere and called again: it goes on. `allowed` is asked just before the commit and raises if the
        run is no longer ours. Raises Damaged if the source is not what its manifest says, or another checkpoint of that
        name is committed there; StoreUnavailable if the store gives back other bytes than it got.
        """
        faults.point("upload.begin")
        data = checkpoint.read_manifest_bytes(source)
        manifest = checkpoint.read_manifest(source)
        key = manifest.key
        there = self.look(f"checkpoints/{key.folder}").files(key)
        if MANIFEST in there and self.manifest(key) != data:
            raise Damaged(f"{self.uri}/checkpoints", key.folder, "is another checkpoint; move one of the two away")
        for name in sorted(there.keys() - {entry.path for entry in manifest.files} - {MANIFEST}):
            if self._size(key, name) is not None:
                raise Damaged(
                    f"{self.uri}/checkpoints/{key.folder}", name, "is not part of the checkpoint; move it away"
                )
        missing = [entry for entry in manifest.files if not self._is_right(key, entry, there.get(entry.path))]
        for entry in missing:
            self._send(source, key, entry, moved)
        faults.point("upload.verify")
        if lost := [entry.path for entry in missing if not self._is_proven(source, key, entry)]:
            raise StoreUnavailable(f"{self.uri}/checkpoints/{key.folder}: {_listed(lost)} came back with other bytes.")
        allowed()
        faults.point("upload.before_manifest")
        self.write(f"checkpoints/{key.folder}/{MANIFEST}", data)
        faults.point("upload.after_manifest")
        if self.manifest(key) != data:
            raise StoreUnavailable(f"{self.uri}/checkpoints/{key.folder}/{MANIFEST} came back with other bytes.")
        return sum(entry.size for entry in missing)

    def fetch(self, key: Key, target: Path, moved: Moved | None = None) -> int:
        """Bring a committed checkpoint to the folder `target`, proven, under its name when it is whole.

        May be killed anywhere and called again: whole files are not fetched twice. Raises NotThere, and Damaged naming
        the file whose bytes are not what the manifest says.
        """
        data = self.manifest(key)
        manifest = parse(key, data)
        self._check_objects(key, manifest)
        beside = target.with_name(f".fetching-{target.name}")
        beside.mkdir(parents=True, exist_ok=True, mode=0o700)
        fetched = 0
        for entry in manifest.files:
            if not _is_whole(beside / entry.path, entry):
                self._fetch_file(key, entry, beside, moved)
                fetched += entry.size
        _remove_others(beside, manifest)
        faults.point("fetch.before_manifest")
        atomic.write(beside / MANIFEST, data)
        atomic.sync_folder(beside)
        beside.rename(target)
        atomic.sync_folder(target.parent)
        return fetched

    def remove(self, key: Key) -> int:
        """Delete a checkpoint, its manifest first; how many bytes were there."""
        there = self.look(f"checkpoints/{key.folder}").files(key)
        for name in sorted(there, key=lambda name: name != MANIFEST):
            self._store.delete(self._key(f"checkpoints/{key.folder}/{name}"))
            faults.point("remove.mid")
        return sum(there.values())

    def abort_uploads(self) -> int:
        """Give up what a killed upload has left in parts, which no listing shows; how many there were."""
        return self._store.abort_uploads(self._key("checkpoints"))

    def _key(self, path: str) -> str:
        return "/".join(part for part in (self._prefix, path) if part)

    def _file(self, key: Key, entry: FileEntry) -> str:
        return self._key(f"checkpoints/{key.folder}/{entry.path}")

    def _size(self, key: Key, name: str) -> int | None:
        """How many bytes a file of a checkpoint has there now; None if it is not there."""
        stat = self._store.head(self._key(f"checkpoints/{key.folder}/{name}"))
        return None if stat is None else stat.size

    def _check_objects(self, key: Key, manifest: Manifest) -> None:
        """Exactly the files of the manifest are there, with their sizes. What a listing says is asked again: it may be old.

        Raises Damaged, naming the file; NotThere if the checkpoint is being removed.
        """
        there = self.look(f"checkpoints/{key.folder}").files(key)
        wanted = {entry.path: entry.size for entry in manifest.files}
        for name in sorted((there.keys() | wanted.keys()) - {MANIFEST}):
            if there.get(name) == wanted.get(name) or (size := self._size(key, name)) == wanted.get(name):
                continue
            self.manifest(key)
            if name not in wanted:
                raise Damaged(key.folder, name, "is not in the manifest")
            found = "is missing" if size is None else f"has {size} bytes where the manifest says {wanted[name]}"
            raise Damaged(key.folder, name, found)

    def _send(self, source: Path, key: Key, entry: FileEntry, moved: Moved | None) -> None:
        half = [entry.size // 2]

        def passed(count: int) -> None:
            if half:
                half[0] -= count
                if half[0] < 0:
                    half.clear()
                    faults.point("upload.mid_file")
            if moved is not None:
                moved(count)

        self._store.put_file(self._file(key, entry), source / entry.path, moved=passed)

    def _is_proven(self, source: Path, key: Key, entry: FileEntry) -> bool:
        """Whether what was sent is there: the store's own word for it counts for nothing. Else it is deleted."""
        if self._is_right(key, entry, entry.size):
            return True
        self._store.delete(self._file(key, entry))
        if digest.of_file(source / entry.path, cold=True, limit=entry.size) != entry.blake3:
            raise Damaged(source.name, entry.path, "does not match its BLAKE3 digest in the manifest")
        return False

    def _is_right(self, key: Key, entry: FileEntry, size: int | None) -> bool:
        """An independent read: whether the object has the size and digest that the manifest says."""
        if size != entry.size:
            return False
        found = blake3()
        try:
            for piece in self._pieces(self._file(key, entry), entry.size):
                found.update(piece)
        except NotThere:
            return False
        return found.hexdigest() == entry.blake3

    def _fetch_file(self, key: Key, entry: FileEntry, folder: Path, moved: Moved | None) -> None:
        part = folder / f".{secrets.token_hex(4)}.part"
        found, done, half = blake3(), 0, entry.size // 2
        with part.open("xb") as file:
            for piece in self._pieces(self._file(key, entry), entry.size):
                found.update(piece)
                file.write(piece)
                done += len(piece)
                if done > half >= done - len(piece):
                    faults.point("fetch.mid_file")
                if moved is not None:
                    moved(len(piece))
            file.flush()
            digest.forget(file.fileno())
        if found.hexdigest() != entry.blake3:
            part.unlink()
            raise Damaged(f"{self.uri}/checkpoints/{key.folder}", entry.path, "does not match its BLAKE3 digest")
        part.replace(folder / entry.path)

    def _pieces(self, key: str, size: int) -> Iterator[bytes]:
        """An object's bytes in order, some pieces read ahead; all of one version of it."""
        stat = self._store.head(key)
        if stat is None or stat.size != size:
            raise NotThere(f"{key} is not there with {size} bytes.")
        try:
            yield from self._pieces_of(key, size, stat.etag)
        except Changed as error:
            raise StoreUnavailable(f"{error} It changed while it was read; look again.") from error

    def _pieces_of(self, key: str, size: int, etag: str) -> Iterator[bytes]:
        with ThreadPoolExecutor(AHEAD, thread_name_prefix="everstep-read") as pool:
            waiting: list[Future[bytes]] = []
            for start in range(0, size, PIECE):
                end = min(start + PIECE, size)
                waiting.append(pool.submit(self._store.read, key, start, end, etag=etag))
                if len(waiting) == AHEAD:
                    yield waiting.pop(0).result()
            for one in waiting:
                yield one.result()


def parse(key: Key, data: bytes) -> Manifest:
    """A manifest as it came from the store. Raises Damaged if it is not that of `key`, whole and unaltered."""
    manifest = Manifest.parse(data, key.folder, MANIFEST)
    if manifest.key != key:
        raise Damaged(key.folder, MANIFEST, f"is that of {manifest.key.folder}, not of this folder")
    return manifest


def _listed(names: list[str]) -> str:
    """All names of a few, the first ones of many."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _claim(number: int) -> str:
    return f"attempts/{number:06d}.json"


def _is_whole(path: Path, entry: FileEntry) -> bool:
    try:
        return path.lstat().st_size == entry.size and digest.of_file(path, limit=entry.size) == entry.blake3
    except FileNotFoundError:
        return False


def _remove_others(folder: Path, manifest: Manifest) -> None:
    listed = {entry.path for entry in manifest.files}
    for path in folder.iterdir():
        if path.name not in listed:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
