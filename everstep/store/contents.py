"""What the files of a checkpoint say: JSON of each rank, tensors, ties, and whether all that agrees.

These checks read headers and JSON only; the bytes themselves are proved by their digests (`store.checkpoint`).
"""

import errno
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from everstep.core.checkpoint import Manifest, Structure, TensorShape, each_once
from everstep.core.errors import Damaged
from everstep.store import tensors

EIO_PAUSES = (0.1, 0.4)  # seconds before a file that gave an I/O error is read again

_NOT_THERE = {
    errno.ENOENT: "is missing",
    errno.ENOTDIR: "is missing",
    errno.EISDIR: "is a folder",
    errno.ELOOP: "is a symbolic link",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """A tensor and the file that holds it."""

    path: str
    tensor: tensors.Tensor


@dataclass(frozen=True)
class Contents:
    """The tensors of each rank by name, and the names under which rank 0's tied tensors are stored."""

    folder: Path
    ranks: tuple[dict[str, Held], ...]
    aliases: dict[str, str]

    def model(self) -> dict[str, Held]:
        """Rank 0's model by the program's own names, tied ones under each of their names."""
        shared = self.ranks[0]
        names = {name: name for name in shared} | self.aliases
        start = tensors.MODEL
        return {name.removeprefix(start): shared[to] for name, to in names.items() if name.startswith(start)}


def read(folder: Path, manifest: Manifest) -> Contents:
    """Read headers and JSON of a checkpoint whose files are all there. Raises Damaged, naming the file."""
    parsed = _read_json(folder, manifest)
    ranks = tuple(_tensors_of(folder, manifest, rank) for rank in range(manifest.world_size))
    for rank, held in enumerate(ranks):
        value = parsed[f"rank-{rank}.json"]
        check_rank(folder, rank, value, manifest)
        _check_references(folder, rank, value, held)
    return Contents(folder, ranks, _aliases(folder, 0, parsed["rank-0.json"], ranks[0]))


def check_structure(content: Contents, structure: Structure) -> None:
    """Names, dtypes and shapes of the model are those of the run. Raises Damaged."""
    model, folder = content.model(), content.folder.name
    for name, wanted in structure.model.items():
        if name not in model:
            raise Damaged(folder, "rank-0.json", f"has no tensor {name!r}, which the run's model has")
        tensor = model[name].tensor
        if TensorShape(dtype=tensor.dtype, shape=tensor.shape) != wanted:
            now, then = f"{tensor.dtype} {list(tensor.shape)}", f"{wanted.dtype} {list(wanted.shape)}"
            raise Damaged(folder, model[name].path, f"has {name!r} as {now}, but the run's model has it as {then}")
    extra = sorted(model.keys() - structure.model.keys())
    if extra:
        raise Damaged(folder, model[extra[0]].path, f"has a tensor {extra[0]!r}, which the run's model has not")


def check_rank(folder: Path, rank: int, value: dict[str, Any], manifest: Manifest) -> None:
    """A rank's own account agrees with the manifest: a default position is never filled in. Raises Damaged."""
    name, progress = f"rank-{rank}.json", value.get("progress")
    if not isinstance(progress, dict):
        raise Damaged(folder.name, name, "has no progress")
    for field, said, should in (
        ("schema_version", value.get("schema_version"), 1),
        ("rank", value.get("rank"), rank),
        ("world_size", value.get("world_size"), manifest.world_size),
        ("progress.step", progress.get("step"), manifest.step),
        ("progress.samples", progress.get("samples"), manifest.samples),
    ):
        if said != should or type(said) is not int:
            raise Damaged(folder.name, name, f"has {field} {said!r} where {should} belongs")
    epoch = progress.get("epoch")
    if type(epoch) is not int or epoch < 0:
        raise Damaged(folder.name, name, f"has progress.epoch {epoch!r}, which is no epoch")


def must_be_finite(content: Contents, structure: Structure | None) -> list[Held]:
    """The tensors in which NaN or infinity is a fault: parameters and the optimizer's state.

    Without a structure nobody knows which of the model's tensors are parameters, and all of them count.
    """
    model = content.model()
    names = model.keys() if structure is None else structure.parameters
    optimizer = [one for held in content.ranks for name, one in held.items() if name.startswith("optimizer/")]
    return [*{model[name] for name in names if name in model}, *optimizer]


def reading(folder: Path, name: str, read: Callable[[], T]) -> T:
    """What `read` gives. A missing file and one that the device cannot read are damage; other errors stay errors."""
    for pause in (*EIO_PAUSES, None):
        try:
            return read()
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise Damaged(folder.name, name, _NOT_THERE[error.errno]) from None
            if error.errno != errno.EIO:
                raise
            if pause is None:
                raise Damaged(folder.name, name, "cannot be read: the device gives an I/O error") from error
            time.sleep(pause)
    raise AssertionError


def _read_json(folder: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    parsed: dict[str, dict[str, Any]] = {}
    for entry in (one for one in manifest.files if one.path.endswith(".json")):
        text = reading(folder, entry.path, (folder / entry.path).read_bytes)
        try:
            value = json.loads(text, parse_constant=_no_number, object_pairs_hook=each_once)
        except (ValueError, RecursionError) as error:
            raise Damaged(folder.name, entry.path, f"is not readable JSON ({error})") from None
        if not isinstance(value, dict):
            raise Damaged(folder.name, entry.path, "is not a JSON object")
        parsed[entry.path] = value
    missing = [name for name in (f"rank-{rank}.json" for rank in range(manifest.world_size)) if name not in parsed]
    if missing:
        raise Damaged(folder.name, missing[0], "is not in the manifest")
    return parsed


def _tensors_of(folder: Path, manifest: Manifest, rank: int) -> dict[str, Held]:
    found: dict[str, Held] = {}
    own = (f"rank-{rank}.", f"rank-{rank}-")
    for entry in manifest.files:
        if not (entry.path.endswith(".safetensors") and entry.path.startswith(own)):
            continue
        path = folder / entry.path
        for name, tensor in reading(folder, entry.path, lambda path=path: tensors.read_header(path)).items():  # type: ignore[misc]
            if name in found:
                raise Damaged(folder.name, entry.path, f"holds {name} a second time")
            found[name] = Held(entry.path, tensor)
    return found


def _check_references(folder: Path, rank: int, value: dict[str, Any], held: dict[str, Held]) -> None:
    """The state refers to every tensor, and to none that is not there: either would be lost at the next load."""
    name = f"rank-{rank}.json"
    if "tree" not in value:
        raise Damaged(folder.name, name, "has no state")
    named = _named(value["tree"])
    lost = sorted(held.keys() - named)
    if lost:
        raise Damaged(folder.name, held[lost[0]].path, f"holds {lost[0]!r}, to which no state refers")
    absent = sorted(named - held.keys() - _aliases(folder, rank, value, held).keys())
    if absent:
        raise Damaged(folder.name, name, f"refers to {absent[0]!r}, which no file holds")


def _named(tree: Any) -> set[str]:
    """The names of all tensors and arrays in an encoded tree (the words are those of `trainer.tree`)."""
    named: set[str] = set()
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            named |= {one[word] for word in ("$tensor", "$array") if isinstance(one.get(word), str)}
            waiting += one.values()
    return named


def _aliases(folder: Path, rank: int, value: dict[str, Any], held: dict[str, Held]) -> dict[str, str]:
    found, path = value.get("aliases", {}), f"rank-{rank}.json"
    if not isinstance(found, dict):
        raise Damaged(folder.name, path, "has aliases that are not a map of names")
    for name, target in found.items():
        if not isinstance(target, str) or target not in held or name in held:
            raise Damaged(folder.name, path, f"ties {name!r} to {target!r}, which is not stored once")
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
