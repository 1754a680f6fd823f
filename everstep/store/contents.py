"""What the files of a checkpoint say: JSON of each rank, tensors, ties, and whether all that agrees.

These checks read headers and JSON only; the bytes themselves are proved by their digests (`store.checkpoint`).
"""

import errno
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from everstep.core.checkpoint import Manifest, Structure, TensorShape, each_once
from everstep.core.errors import Damaged
from everstep.store import references, tensors, wholes
from everstep.store.wholes import Held, Share, Whole

EIO_PAUSES = (0.1, 0.4)  # seconds before a file that gave an I/O error is read again

_NOT_THERE = {
    errno.ENOENT: "is missing",
    errno.ENOTDIR: "is missing",
    errno.EISDIR: "is a folder",
    errno.ELOOP: "is a symbolic link",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Contents:
    """What each rank has, and the tensors that are sharded over the ranks."""

    folder: Path
    shares: tuple[Share, ...]
    sharded: dict[str, Whole]

    def model(self) -> dict[str, Whole]:
        """The model by the program's own names, tied tensors under each of their names."""
        shared = self.shares[0]
        names = {name: name for name in shared.held} | shared.aliases
        start = tensors.MODEL
        return {
            name.removeprefix(start): self.sharded[name] if name in self.sharded else Whole.of(shared.held[to])
            for name, to in names.items()
            if name.startswith(start)
        }


def read(folder: Path, manifest: Manifest) -> Contents:
    """Read headers and JSON of a checkpoint whose files are all there. Raises Damaged, naming the file."""
    parsed = _read_json(folder, manifest)
    shares = []
    for rank in range(manifest.world_size):
        value = parsed[f"rank-{rank}.json"]
        held = tensors_of(folder, [entry.path for entry in manifest.files], rank)
        check_rank(folder, rank, value, manifest)
        share = share_of(folder, rank, value, held)
        _check_references(folder, rank, share)
        shares.append(share)
    return Contents(folder, tuple(shares), wholes.find(folder, shares))


def model_of(folder: Path) -> dict[str, Whole]:
    """The model in a folder of a checkpoint, without a look at its manifest. Raises Damaged, naming the file."""
    paths = sorted(path.name for path in folder.glob("rank-*.safetensors"))
    share, ranks = _loose_share(folder, 0, paths)
    shares = [share]
    if any(shard is not None for shard in share.named.values()):
        shares += [_loose_share(folder, rank, paths)[0] for rank in range(1, ranks)]
    return Contents(folder, tuple(shares), wholes.find(folder, shares)).model()


def check_structure(content: Contents, structure: Structure) -> None:
    """Names, dtypes and shapes of the model are those of the run. Raises Damaged."""
    model, folder = content.model(), content.folder.name
    for name, wanted in structure.model.items():
        if name not in model:
            raise Damaged(folder, "rank-0.json", f"has no tensor {name!r}, which the run's model has")
        has = model[name]
        if TensorShape(dtype=has.dtype, shape=has.shape) != wanted:
            now, then = f"{has.dtype} {list(has.shape)}", f"{wanted.dtype} {list(wanted.shape)}"
            raise Damaged(folder, _file(has), f"has {name!r} as {now}, but the run's model has it as {then}")
    extra = sorted(model.keys() - structure.model.keys())
    if extra:
        raise Damaged(folder, _file(model[extra[0]]), f"has a tensor {extra[0]!r}, which the run's model has not")


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
    parameters = {piece.held for name in names if name in model for piece in model[name].pieces}
    optimizer = (one for share in content.shares for name, one in share.held.items() if name.startswith("optimizer/"))
    return [*parameters, *optimizer]


def tensors_of(folder: Path, paths: Iterable[str], rank: int) -> dict[str, Held]:
    """The tensors of one rank, by name, from the headers of its files among `paths`. Raises Damaged."""
    found: dict[str, Held] = {}
    own = (f"rank-{rank}.", f"rank-{rank}-")
    for path in paths:
        if not (path.endswith(".safetensors") and path.startswith(own)):
            continue
        for name, tensor in reading(folder, path, lambda path=path: tensors.read_header(folder / path)).items():  # type: ignore[misc]
            if name in found:
                raise Damaged(folder.name, path, f"holds {name} a second time")
            found[name] = Held(path, tensor)
    return found


def share_of(folder: Path, rank: int, value: dict[str, Any], held: dict[str, Held]) -> Share:
    """What a rank has, by its own account (its parsed JSON) and its headers. Raises Damaged."""
    name = f"rank-{rank}.json"
    if "tree" not in value:
        raise Damaged(folder.name, name, "has no state")
    try:
        named = references.of(value["tree"])
    except ValueError as error:
        raise Damaged(folder.name, name, f"holds no readable state ({error})") from None
    return Share(held, named, _aliases(folder, rank, value, held))


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
        parsed[entry.path] = _parsed(folder, entry.path)
    missing = [name for name in (f"rank-{rank}.json" for rank in range(manifest.world_size)) if name not in parsed]
    if missing:
        raise Damaged(folder.name, missing[0], "is not in the manifest")
    return parsed


def _parsed(folder: Path, path: str) -> dict[str, Any]:
    text = reading(folder, path, (folder / path).read_bytes)
    try:
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise Damaged(folder.name, path, f"is not readable JSON ({error})") from None
    if not isinstance(value, dict):
        raise Damaged(folder.name, path, "is not a JSON object")
    return value


def _loose_share(folder: Path, rank: int, paths: Iterable[str]) -> tuple[Share, int]:
    """What a rank has, and the number of ranks that it says there are."""
    name = f"rank-{rank}.json"
    value = _parsed(folder, name)
    share = share_of(folder, rank, value, tensors_of(folder, paths, rank))
    _check_references(folder, rank, share)
    ranks = value.get("world_size")
    if type(ranks) is not int or ranks <= rank:
        raise Damaged(folder.name, name, f"has world_size {ranks!r}")
    return share, ranks


def _check_references(folder: Path, rank: int, share: Share) -> None:
    """The state refers to every tensor, and to none that is not there: either would be lost at the next load."""
    held, named = share.held, share.named.keys()
    lost = sorted(held.keys() - named)
    if lost:
        raise Damaged(folder.name, held[lost[0]].path, f"holds {lost[0]!r}, to which no state refers")
    absent = sorted(named - held.keys() - share.aliases.keys())
    if absent:
        raise Damaged(folder.name, f"rank-{rank}.json", f"refers to {absent[0]!r}, which no file holds")


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


def _file(whole: Whole) -> str:
    return whole.pieces[0].held.path
