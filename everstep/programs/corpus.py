"""A corpus that every machine has: the source of Python's own standard library, in shards of bytes.

`python -m everstep.programs.corpus PLACE` writes it once; PLACE is a directory or s3://bucket/prefix. Its files are
`train-000.bin`, `train-001.bin`, ... and `held-000.bin`: the text of the modules one after the other, a zero byte after
each. One module in about twenty is held out, chosen by its path alone. `PLACE.manifest.json` is written last: with it
the corpus is there, without it it is made again.
"""

import hashlib
import os
import re
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from everstep.core import place
from everstep.core.dataset import DatasetManifest, FileEntry
from everstep.core.errors import EverstepError
from everstep.core.place import ObjectPlace, S3Settings
from everstep.store import atomic, digest
from everstep.store.objects import ObjectStore

SHARD_BYTES = 1 << 20
SHARD = re.compile(r"(train|held)-\d{3}\.bin")
HELD_OUT = 13
"""A module is held out if the first byte of its path's SHA-256 is below this: 13 in 256."""

LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")  # no part of the library
    + ("tkinter", "idlelib", "turtledemo", "ensurepip", "lib2to3", "distutils")  # not on every machine or version
    + ("encodings", "pydoc_data")  # tables rather than code
)


def write(where: str, library: Path | None = None) -> DatasetManifest:
    """Make the corpus at `where`, unless one stands there. `library` is the folder of the standard library's modules.

    Raises ValueError for a place or credentials that the user must mend, StoreUnavailable where the store gives up.
    """
    place.check(where)
    library = library or Path(sysconfig.get_path("stdlib"))
    if not place.is_object(where):
        return _standing(Path(where)) or _write_folder(Path(where), shards_of(library))
    from everstep.store import s3

    target = ObjectPlace.parse(where)
    if not target.prefix:
        raise ValueError(
            f"{where} names a whole bucket; give the corpus a prefix in it, as s3://{target.bucket}/corpus"
        )
    with closing(s3.open_store(target.bucket, s3.access(S3Settings()))) as store:
        return _uploaded(store, target) or _upload(store, target, shards_of(library))


def shards_of(library: Path) -> dict[str, bytes]:
    """The files of the corpus by name, the same for the same modules."""
    texts: dict[str, list[bytes]] = {"train": [], "held": []}
    for path in modules(library):
        name = path.relative_to(library).as_posix()
        held = hashlib.sha256(name.encode()).digest()[0] < HELD_OUT
        texts["held" if held else "train"].append(path.read_bytes() + b"\0")
    if not all(texts.values()):
        raise EverstepError(f"{library} holds too few modules with their source; use a Python with its library.")
    return {f"{split}-{number:03d}.bin": part for split in texts for number, part in _cut(b"".join(texts[split]))}


def modules(library: Path) -> Iterator[Path]:
    """The library's Python files in the order of their paths, tests and what is not everywhere left out."""
    for folder, below, names in os.walk(library):
        below[:] = sorted(name for name in below if name not in LEFT_OUT and not name.startswith("config-"))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def _cut(text: bytes) -> Iterator[tuple[int, bytes]]:
    yield from enumerate(text[start : start + SHARD_BYTES] for start in range(0, len(text), SHARD_BYTES))


def _manifest(where: str, shards: dict[str, bytes]) -> DatasetManifest:
    entries = (FileEntry(path=name, size=len(data), blake3=digest.of_bytes(data)) for name, data in shards.items())
    return DatasetManifest(source=where, files=tuple(entries))


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.manifest.json")


def _standing(folder: Path) -> DatasetManifest | None:
    """The manifest of a corpus that stands there whole. It may be another Python's: a run must find what it began with."""
    try:
        data = _beside(folder).read_bytes()
        manifest = DatasetManifest.parse(data, str(folder.parent), _beside(folder).name)
        sizes = {entry.path: (folder / entry.path).stat().st_size for entry in manifest.files}
    except FileNotFoundError:
        return None
    return manifest if sizes == {entry.path: entry.size for entry in manifest.files} else None


def _write_folder(folder: Path, shards: dict[str, bytes]) -> DatasetManifest:
    _refuse_foreign(str(folder), (path.name for path in (folder.iterdir() if folder.exists() else ())))
    new = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    new.mkdir(parents=True)
    try:
        for name, data in shards.items():
            atomic.write(new / name, data)
        _beside(folder).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    atomic.sync_folder(folder.parent)
    manifest = _manifest(str(folder), shards)
    atomic.write(_beside(folder), manifest.to_json().encode())
    return manifest


def _uploaded(store: ObjectStore, target: ObjectPlace) -> DatasetManifest | None:
    """The manifest of a corpus that stands whole in the object store."""
    stat = store.head(_key_beside(target))
    if stat is None:
        return None
    data = store.read(stat.key, etag=stat.etag)
    manifest = DatasetManifest.parse(data, f"s3://{target.bucket}", stat.key)
    sizes = {one.key: one.size for one in store.list(target.prefix)}
    whole = all(sizes.get(target.key(entry.path)) == entry.size for entry in manifest.files)
    return manifest if whole else None


def _upload(store: ObjectStore, target: ObjectPlace, shards: dict[str, bytes]) -> DatasetManifest:
    """Shards of an older corpus go, so that nothing foreign is trained on."""
    _refuse_foreign(target.uri, (one.key.removeprefix(f"{target.prefix}/") for one in store.list(target.prefix)))
    store.delete(_key_beside(target))
    for name, data in shards.items():
        store.put(target.key(name), data)
    wanted = {target.key(name) for name in shards}
    for left in [one.key for one in store.list(target.prefix) if one.key not in wanted]:
        store.delete(left)
    manifest = _manifest(target.uri, shards)
    store.put(_key_beside(target), manifest.to_json().encode())
    return manifest


def _refuse_foreign(where: str, names: Iterable[str]) -> None:
    """What stands there is replaced, so it must be ours."""
    foreign = next((name for name in names if not SHARD.fullmatch(name)), None)
    if foreign is not None:
        raise ValueError(f"{where} holds {foreign!r}, which is no part of a corpus; choose another place")


def _key_beside(target: ObjectPlace) -> str:
    return f"{target.prefix}.manifest.json"


def main(arguments: list[str]) -> int:
    """The command line: a place, a line on what stands there, exit code 2 with one sentence for a wrong one."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m everstep.programs.corpus FOLDER-OR-s3://bucket/prefix", file=sys.stderr)
        return 2
    try:
        manifest = write(arguments[0])
    except (ValueError, OSError, EverstepError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(
        f"corpus: {manifest.bytes / 1e6:.1f} MB of Python's standard library in {len(manifest.files)} shards, in {arguments[0]}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
