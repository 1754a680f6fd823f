"""Checkpoints as folders: write one rank's files, commit them all with the manifest, read them back.

Commit rule: the manifest is written last. A folder without it is not a checkpoint.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from torch import Tensor

from everstep.core.checkpoint import MANIFEST, Manifest, each_once
from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged
from everstep.core.place import is_object
from everstep.store import checkpoint as committed
from everstep.store import contents, object_tier
from everstep.trainer import shards, tree
from everstep.trainer.snapshot import Plan, Snapshot

VERSION = 1
PROGRESS = ("step", "samples", "epoch", "finished")

_KEYS = frozenset({"schema_version", "rank", "world_size", "tree", "aliases", "progress", "probe", "environment"})


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint, read back: its state, and the numbers beside it."""

    state: dict[str, Any]
    world_size: int
    progress: dict[str, Any]
    probe: dict[str, Any]
    environment: dict[str, Any]


def files_of(
    plan: Plan, snapshot: Snapshot, rank: int, world_size: int, environment: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The files of one rank's part, as the writer is told of them: shards first, then JSON for all that is no tensor."""
    document = {
        "schema_version": VERSION,
        "rank": rank,
        "world_size": world_size,
        "tree": plan.tree,
        "aliases": plan.aliases,
        "progress": {
            "step": snapshot.step,
            "samples": snapshot.samples,
            "epoch": snapshot.epoch,
            "finished": snapshot.finished,
        },
        "probe": snapshot.probe,
        "environment": dict(environment),
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    groups = shards.split(plan.placed)
    names = [f"rank-{rank}.safetensors"] if len(groups) == 1 else _numbered(rank, len(groups))
    files: list[dict[str, Any]] = [
        {"path": name, "tensors": [[one.name, one.dtype, one.shape, one.begin, one.size] for one in group]}
        for name, group in zip(names, groups, strict=True)
    ]
    return [*files, {"path": f"rank-{rank}.json", "text": text}]


def remove_part(folder: Path, rank: int) -> None:
    """Take back one rank's files of a checkpoint that could not be committed, and what a dead writer had begun."""
    patterns = [f"rank-{rank}.*", f"rank-{rank}-*", f".rank-{rank}.*.tmp", f".rank-{rank}-*.tmp"]
    for pattern in [*patterns, *([f".{MANIFEST}.*.tmp"] if rank == 0 else [])]:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def read_part(folder: Path, manifest: Manifest, rank: int, threads: int, seen: shards.Seen) -> Part:
    """One rank's part, every byte checked against the manifest while it is read. Raises Damaged."""
    entries = entries_of(manifest, rank)
    name = f"rank-{rank}.json"
    if name not in entries:
        raise Damaged(folder.name, MANIFEST, f"names no {name}")
    document = _document(folder, manifest, rank, shards.read(folder, entries.pop(name), threads))
    tensors: dict[str, Tensor] = {}
    for path, entry in entries.items():
        seen(entry.size)
        tensors |= shards.parse(folder.name, path, shards.read(folder, entry, threads))
    return _part(folder.name, name, document, tensors)


def entries_of(manifest: Manifest, rank: int) -> dict[str, FileEntry]:
    """The files of one rank, by name."""
    ours = (f"rank-{rank}.", f"rank-{rank}-")
    return {entry.path: entry for entry in manifest.files if entry.path.startswith(ours)}


def check_others(folder: Path, manifest: Manifest, ranks: Iterable[int], threads: int, seen: shards.Seen) -> None:
    """Check the files that belong to none of `ranks`: a checkpoint with one damaged member is damaged."""
    known = {path for rank in ranks for path in entries_of(manifest, rank)}
    for entry in manifest.files:
        if entry.path not in known:
            seen(entry.size)
            shards.read(folder, entry, threads)


def load_checkpoint(uri: str | Path) -> dict[str, Tensor]:
    """The model's state dict in a checkpoint: a folder's path, a `file://` URI, or an `s3://` URI, which is reached as
    the environment says. Raises Damaged; runs no stored code.
    """
    if is_object(str(uri)):
        with object_tier.nearby(str(uri)) as near:
            return load_checkpoint(near)
    folder = _folder(str(uri))
    manifest = committed.opened(folder, *committed.identity(folder))
    check_others(folder, manifest, (0,), 1, lambda _: None)
    state = read_part(folder, manifest, 0, 1, lambda _: None).state["model"]
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _folder(uri: str) -> Path:
    if "://" not in uri:
        return Path(uri)
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(f"checkpoint {uri!r} is neither a folder nor a file:// URI; fetch it first.")
    return Path(unquote(parts.path))


def _numbered(rank: int, count: int) -> list[str]:
    return [f"rank-{rank}-{index}.safetensors" for index in range(count)]


def _document(folder: Path, manifest: Manifest, rank: int, data: bytes) -> dict[str, Any]:
    name = f"rank-{rank}.json"
    try:
        document = json.loads(data, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise Damaged(folder.name, name, f"is no JSON ({error})") from None
    if not isinstance(document, dict):
        raise Damaged(folder.name, name, "is not a JSON object")
    if missing := _KEYS - set(document):
        raise Damaged(folder.name, name, f"lacks {', '.join(sorted(missing))}")
    if document["schema_version"] != VERSION:
        why = f"has schema version {document['schema_version']}; this Everstep reads version {VERSION}"
        raise Damaged(folder.name, name, why)
    contents.check_rank(folder, rank, document, manifest)
    return document


def _part(folder: str, name: str, document: dict[str, Any], tensors: dict[str, Tensor]) -> Part:
    try:
        tensors |= {alias: tensors[first] for alias, first in document["aliases"].items()}
        state = tree.decode(document["tree"], tensors)
        progress = {key: int(document["progress"][key]) for key in PROGRESS}
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise Damaged(folder, name, f"holds no readable state ({type(error).__name__}: {error})") from None
    return Part(state, int(document["world_size"]), progress, document["probe"], document["environment"])


def files(parts: Iterable[Mapping[str, Any]]) -> Iterator[FileEntry]:
    """The entries that the ranks' writers sent to rank 0."""
    for part in parts:
        for entry in part["files"]:
            yield FileEntry.model_validate(entry)
