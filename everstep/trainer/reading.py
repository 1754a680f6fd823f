"""Checkpoints read back: documents and tensors of the ranks, every byte that is used checked against the manifest."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor

from everstep.core.box import Box
from everstep.core.checkpoint import MANIFEST, Manifest, each_once
from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged
from everstep.core.place import is_object
from everstep.store import checkpoint as committed
from everstep.store import contents, object_tier, references, wholes
from everstep.store import tensors as stored
from everstep.store.wholes import Piece, Share, Whole
from everstep.trainer import shards, tree
from everstep.trainer.checkpoint import VERSION
from everstep.trainer.fitting import Fit

PROGRESS = ("step", "samples", "epoch", "finished")

_KEYS = frozenset({"schema_version", "rank", "world_size", "tree", "aliases", "progress", "probe", "environment"})


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint: its state (with a `Piece` for each sharded tensor), and the numbers beside it."""

    state: dict[str, Any]
    world_size: int
    progress: dict[str, Any]
    probe: dict[str, Any]
    environment: dict[str, Any]


class Reading:
    """One checkpoint, as far as somebody asks for it. All of it raises Damaged, naming the file."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int = 1, seen: shards.Seen = shards.deaf) -> None:
        self.folder = folder
        self.manifest = manifest
        self._threads = threads
        self._seen = seen
        self._documents: dict[int, dict[str, Any]] = {}
        self._shares: dict[int, Share] = {}
        self._checked: set[str] = set()
        self._kept: dict[tuple[int, str], Tensor] = {}
        self._given: dict[tuple[str, Box], Tensor] = {}
        self._wanted: dict[tuple[str, Box], Tensor] = {}

    def part(self, rank: int) -> Part:
        """What one rank has for itself; parts of sharded tensors that lie in the same files are kept for `want`."""
        document = self._document(rank)
        state = self._decoded(rank, document["tree"])
        try:
            progress = {key: int(document["progress"][key]) for key in PROGRESS}
        except (KeyError, ValueError, TypeError) as error:
            raise self._unreadable(rank, error) from None
        return Part(state, int(document["world_size"]), progress, document["probe"], document["environment"])

    def member(self, name: str) -> Any:
        """One member of the state that all ranks share: the model, for example."""
        whole = self._document(0)["tree"]
        if not isinstance(whole, dict) or name not in whole:
            raise Damaged(self.folder.name, "rank-0.json", f"has no {name} in its state")
        return self._decoded(0, whole[name])

    @cached_property
    def sharded(self) -> dict[str, Whole]:
        """The sharded tensors by name. Each is whole: no part is missing, none overlaps another."""
        if all(shard is None for shard in self._share(0).named.values()):
            return {}
        ranks = range(self.manifest.world_size)
        with self._blaming(*ranks):
            return wholes.find(self.folder, [self._share(rank) for rank in ranks])

    def want(self, name: str, box: Box) -> Tensor:
        """Memory for a box of a sharded tensor, as stored (complex numbers as pairs). `fill` puts the values there."""
        name = self._share(0).aliases.get(name, name)
        if name not in self.sharded:
            raise Damaged(self.folder.name, "rank-0.json", f"has no part of the sharded tensor {name!r}")
        key = (name, box)
        if key not in self._given:
            pieces = self.sharded[name].pieces
            same = (self._kept.get((one.rank, one.held.tensor.name)) for one in pieces if one.box == box)
            found = next((one for one in same if one is not None), None)
            if found is None:
                found = shards.empty(stored.Tensor(name, pieces[0].held.tensor.dtype, box.shape, 0, 0))
                self._wanted[key] = found
            self._given[key] = found
        return self._given[key]

    def fill(self) -> None:
        """Read what was wanted, file after file; no file twice."""
        sources: dict[str, dict[str, _Source]] = {}
        for (name, box), target in self._wanted.items():
            for piece in self.sharded[name].pieces:
                if (common := piece.box.common(box)) is None:
                    continue
                goal = _Goal(target[common.within(box)], common.within(piece.box))
                kept = self._kept.get((piece.rank, piece.held.tensor.name))
                if kept is not None:
                    goal.take(kept)
                else:
                    files = sources.setdefault(piece.held.path, {})
                    files.setdefault(piece.held.tensor.name, _Source(piece, [])).goals.append(goal)
        for path, wanted in sources.items():
            self._load_into(path, wanted)
        for memory in (self._given, self._wanted, self._kept):
            memory.clear()

    def check_rest(self, others: Iterable[int] = ()) -> None:
        """Check the files that were not read here and belong to none of `others`, who read theirs: a checkpoint with
        one damaged member is damaged.
        """
        known = self._checked | {path for rank in others for path in self._entries(rank)}
        for entry in self.manifest.files:
            if entry.path not in known:
                self._check(entry)

    def _decoded(self, rank: int, encoded: Any) -> Any:
        """A state, or a part of one, with the values of the tensors in it that are not sharded."""
        with self._blaming(rank):
            share = self._share(rank)
            named = [name for name, shard in references.of(encoded).items() if shard is None]
            plain = {share.aliases.get(name, name) for name in named}
            kept = {name for name, shard in share.named.items() if shard is not None}

            def place(tensor: stored.Tensor) -> Tensor | None:
                return shards.empty(tensor) if tensor.name in plain or tensor.name in kept else None

            found: dict[str, Tensor] = {}
            for path in sorted({share.held[name].path for name in plain if name in share.held}):
                found |= self._load(path, place)
            self._kept |= {(rank, name): value for name, value in found.items() if name not in plain}
            try:
                return tree.decode(encoded, {name: found[share.aliases.get(name, name)] for name in named})
            except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
                raise self._unreadable(rank, error) from None

    def _unreadable(self, rank: int, error: Exception) -> Damaged:
        why = f"holds no readable state ({type(error).__name__}: {error})"
        return Damaged(self.folder.name, f"rank-{rank}.json", why)

    @contextmanager
    def _blaming(self, *ranks: int) -> Iterator[None]:
        """Headers are believed before their files are read: one that was altered is blamed, not what it does not fit."""
        try:
            yield
        except Damaged:
            for entry in (one for rank in ranks for one in self._entries(rank).values()):
                if entry.path not in self._checked:
                    self._check(entry)
            raise

    def _check(self, entry: FileEntry) -> None:
        self._seen(entry.size)
        if entry.path.endswith(".safetensors"):
            shards.load(self.folder, entry, shards.nowhere, self._threads, self._seen)
        else:
            shards.read(self.folder, entry, self._threads)
        self._checked.add(entry.path)

    def _entries(self, rank: int) -> dict[str, FileEntry]:
        """The files of one rank, by name."""
        ours = (f"rank-{rank}.", f"rank-{rank}-")
        return {entry.path: entry for entry in self.manifest.files if entry.path.startswith(ours)}

    def _document(self, rank: int) -> dict[str, Any]:
        name = f"rank-{rank}.json"
        if rank not in self._documents:
            entry = self._entries(rank).get(name)
            if entry is None:
                raise Damaged(self.folder.name, MANIFEST, f"names no {name}")
            data = shards.read(self.folder, entry, self._threads)
            self._documents[rank] = _parsed(self.folder, self.manifest, rank, data)
            self._checked.add(name)
        return self._documents[rank]

    def _share(self, rank: int) -> Share:
        if rank not in self._shares:
            document = self._document(rank)
            held = contents.tensors_of(self.folder, self._entries(rank), rank)
            self._shares[rank] = contents.share_of(self.folder, rank, document, held)
        return self._shares[rank]

    def _load(self, path: str, place: Callable[[stored.Tensor], Tensor | None]) -> dict[str, Tensor]:
        entry = next(one for one in self.manifest.files if one.path == path)
        self._seen(0)
        found = shards.load(self.folder, entry, place, self._threads, self._seen)
        self._checked.add(path)
        return found

    def _load_into(self, path: str, wanted: dict[str, "_Source"]) -> None:
        """A part that somebody wants whole is read to where it belongs; others are read aside and cut."""
        direct = {name: memory for name, source in wanted.items() if (memory := source.memory()) is not None}

        def place(tensor: stored.Tensor) -> Tensor | None:
            if tensor.name not in wanted:
                return None
            return direct[tensor.name] if tensor.name in direct else shards.empty(tensor)

        found = self._load(path, place)
        for name, source in wanted.items():
            if name not in direct:
                for goal in source.goals:
                    goal.take(found[name])


@dataclass(frozen=True)
class _Goal:
    """A view of wanted memory, and where in a part its values are."""

    view: Tensor
    where: tuple[slice, ...]

    def take(self, part: Tensor) -> None:
        self.view.copy_(part[self.where])


@dataclass(frozen=True)
class _Source:
    """A part in a file, and all that is wanted of it."""

    piece: Piece
    goals: list[_Goal]

    def memory(self) -> Tensor | None:
        """Where the part may be read to without a copy."""
        (goal, *more) = self.goals
        fits = not more and goal.view.shape == torch.Size(self.piece.box.shape) and goal.view.is_contiguous()
        return goal.view if fits else None


def load_checkpoint(uri: str | Path) -> dict[str, Tensor]:
    """The model's state dict in a checkpoint: a folder's path, a `file://` URI, or an `s3://` URI, which is reached as
    the environment says. Sharded tensors come whole. Raises Damaged; runs no stored code.
    """
    if is_object(str(uri)):
        with object_tier.nearby(str(uri)) as near:
            return load_checkpoint(near)
    folder = _folder(str(uri))
    manifest = committed.opened(folder, *committed.identity(folder))
    reading = Reading(folder, manifest)
    state = Fit(reading.want).fit(reading.member("model"))
    reading.fill()
    reading.check_rest()
    contents.read(folder, manifest)  # what the other members say is believed by nobody, but a checkpoint is good or not
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _folder(uri: str) -> Path:
    if "://" not in uri:
        return Path(uri)
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(f"checkpoint {uri!r} is neither a folder nor a file:// URI; fetch it first.")
    return Path(unquote(parts.path))


def _parsed(folder: Path, manifest: Manifest, rank: int, data: bytes) -> dict[str, Any]:
    """A rank's document. Raises Damaged."""
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
