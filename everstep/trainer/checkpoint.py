"""Checkpoints as folders: what the files of one rank are. The writer writes them; `trainer.reading` reads them back.

Commit rule: the manifest is written last. A folder without it is not a checkpoint.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from everstep.core.checkpoint import MANIFEST
from everstep.core.dataset import FileEntry
from everstep.store import atomic
from everstep.trainer import shards
from everstep.trainer.snapshot import Placed, Plan, Snapshot

VERSION = 1


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
    groups = _groups(plan, rank)
    names = [f"rank-{rank}.safetensors"] if len(groups) == 1 else _numbered(rank, len(groups))
    files: list[dict[str, Any]] = [
        {"path": name, "tensors": [[one.name, one.dtype, one.shape, one.begin, one.size] for one in group]}
        for name, group in zip(names, groups, strict=True)
    ]
    return [*files, {"path": f"rank-{rank}.json", "text": text}]


def withdraw(folder: Path) -> None:
    """Take back a manifest of which nobody knows whether it is there for good; without it the files are no checkpoint."""
    manifest = folder / MANIFEST
    if manifest.exists():
        manifest.unlink()
        atomic.sync_folder(folder)


def remove_drafts(folder: Path) -> None:
    """Remove manifests that a dead writer had begun."""
    for path in folder.glob(f".{MANIFEST}.*.tmp"):
        path.unlink(missing_ok=True)


def remove_part(folder: Path, rank: int) -> None:
    """Take back one rank's files of a checkpoint that could not be committed, and what a dead writer had begun."""
    for pattern in (f"rank-{rank}.*", f"rank-{rank}-*", f".rank-{rank}.*.tmp", f".rank-{rank}-*.tmp"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    if rank == 0:
        remove_drafts(folder)


def _groups(plan: Plan, rank: int) -> list[list[Placed]]:
    """Files of rank 0 that hold parts of sharded tensors hold nothing else: the other ranks need not read them."""
    if rank > 0 or plan.whole in (0, len(plan.placed)):
        return shards.split(plan.placed)
    return [*shards.split(plan.placed[: plan.whole]), *shards.split(plan.placed[plan.whole :])]


def _numbered(rank: int, count: int) -> list[str]:
    return [f"rank-{rank}-{index}.safetensors" for index in range(count)]


def files(parts: Iterable[Mapping[str, Any]]) -> Iterator[FileEntry]:
    """The entries that the ranks' writers sent to rank 0."""
    for part in parts:
        for entry in part["files"]:
            yield FileEntry.model_validate(entry)
