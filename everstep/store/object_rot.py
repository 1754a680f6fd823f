"""Finds what is wrong with a committed checkpoint on the object tier, and sets it aside without losing it."""

import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

from blake3 import blake3

from everstep.core.checkpoint import MANIFEST, Key
from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged
from everstep.store import faults
from everstep.store.object_tier import ObjectTier, parse
from everstep.store.objects import Moved, NotThere

ASIDE = "aside"


def find(tier: ObjectTier, key: Key, there: Mapping[str, int], run: str, job: str, moved: Moved) -> dict[str, str]:
    """Read a checkpoint back, every byte of it; what is wrong, by file. `there` has the sizes that a listing showed.

    `moved` is told of the bytes as they are read, and may take its time. Raises StoreUnavailable where the store does not
    answer: unknown is not rotten.
    """
    try:
        manifest = parse(key, tier.manifest(key))
    except NotThere:
        return {MANIFEST: "is missing"}
    except Damaged as error:
        return {MANIFEST: error.why}
    if (manifest.run, manifest.job) != (run, job):
        return {MANIFEST: f"is that of {manifest.job}/{manifest.run}"}
    wrong = {}
    for entry in manifest.files:
        why = _lacks(entry, there.get(entry.path)) or _differs(tier, key, entry, moved)
        if why:
            wrong[entry.path] = why
    return wrong


def set_aside(tier: ObjectTier, key: Key, names: Collection[str], scratch: Path) -> str:
    """Keep a copy of these files as evidence, and take the checkpoint's commit back; the URI of the evidence.

    What is a checkpoint no longer may be written to again: the manifest goes first, as it does in a removal. `scratch`
    is a file of this machine that may be used meanwhile.
    """
    there = tier.look(f"checkpoints/{key.folder}").files(key)
    begin = f"{ASIDE}/{key.folder}-{secrets.token_hex(4)}"
    try:
        for name in sorted(there.keys() & {*names, MANIFEST}):
            with scratch.open("wb") as file:
                for piece in tier.stream(f"checkpoints/{key.folder}/{name}", there[name]):
                    file.write(piece)
            tier.write_file(f"{begin}/{name}", scratch)
    finally:
        scratch.unlink(missing_ok=True)
    faults.point("scrub.aside")
    for name in (MANIFEST, *(name for name in names if name != MANIFEST)):
        tier.delete(f"checkpoints/{key.folder}/{name}")
    return f"{tier.uri}/{begin}"


def _lacks(entry: FileEntry, size: int | None) -> str:
    if size is None:
        return "is missing"
    return "" if size == entry.size else f"has {size} bytes where the manifest says {entry.size}"


def _differs(tier: ObjectTier, key: Key, entry: FileEntry, moved: Moved) -> str:
    found = blake3()
    try:
        for piece in tier.stream(f"checkpoints/{key.folder}/{entry.path}", entry.size):
            found.update(piece)
            moved(len(piece))
            faults.point("scrub.reading")
    except NotThere:
        return "is missing"
    return "" if found.hexdigest() == entry.blake3 else "does not match its BLAKE3 digest in the manifest"
