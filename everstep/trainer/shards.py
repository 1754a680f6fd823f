"""Tensors in safetensors files: shared out over files, and read with their digests checked.

The writing is done by `everstep.trainer.writer`. Format: https://huggingface.co/docs/safetensors.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors.torch
from blake3 import blake3
from torch import Tensor

from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged
from everstep.trainer.snapshot import Placed

LARGEST = 256 << 20  # bytes of tensors in a file; a larger tensor has a file of its own

Seen = Callable[[int], None]


def split(placed: Sequence[Placed], largest: int = LARGEST) -> list[list[Placed]]:
    """The tensors in groups of at most `largest` bytes, in their order; at least one group, perhaps empty."""
    groups: list[list[Placed]] = [[]]
    size = 0
    for one in placed:
        if groups[-1] and size + one.size > largest:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.size
    return groups


def read(folder: Path, entry: FileEntry, threads: int = 1) -> bytes:
    """A file's bytes, if they are those that the manifest names. Raises Damaged."""
    path = folder / entry.path
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Damaged(folder.name, entry.path, "is missing") from None
    if len(data) != entry.size:
        raise Damaged(folder.name, entry.path, f"has {len(data)} bytes; the manifest says {entry.size}")
    if blake3(data, max_threads=threads).hexdigest() != entry.blake3:
        raise Damaged(folder.name, entry.path, "has other bytes than the manifest says")
    return data


def parse(folder: str, path: str, data: bytes) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file."""
    try:
        found: dict[str, Tensor] = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise Damaged(folder, path, f"is no safetensors file ({error})") from None
    return found
