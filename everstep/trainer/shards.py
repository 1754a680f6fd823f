"""Tensors in safetensors files: written piece by piece from where they lie, read with their digests checked.

The library's own writer builds a whole file in memory while it holds the interpreter's lock, which would stall the
training thread; this one hands the kernel views of the tensors. Format: https://huggingface.co/docs/safetensors.
"""

import ctypes
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from blake3 import blake3
from torch import Tensor

from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged
from everstep.store import tensors as stored

LARGEST = 256 << 20  # bytes of tensors in a file; a larger tensor has a file of its own
PIECE = 8 << 20

Seen = Callable[[int], None]


def split(tensors: Mapping[str, Tensor], largest: int = LARGEST) -> list[dict[str, Tensor]]:
    """The tensors in groups of at most `largest` bytes, in their order; at least one group, perhaps empty."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > largest:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups


def write(path: Path, pieces: Iterator[memoryview | bytes], seen: Seen) -> FileEntry:
    """Write a file beside, sync it, give it its name; `seen` is told of every piece's size. Removes what it began."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    digest, size = blake3(), 0
    try:
        with beside.open("xb", buffering=1 << 20) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
                size += len(piece)
                seen(len(piece))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return FileEntry(path=path.name, size=size, blake3=digest.hexdigest())


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file: header, then the tensors, those with the largest elements first."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, at = {}, 0
    for name, tensor in ordered:
        place = [at, at + tensor.nbytes]
        header[name] = {"dtype": stored.word(tensor.dtype), "shape": stored.shape_of(tensor), "data_offsets": place}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        yield from _views(tensor)


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


def _views(tensor: Tensor) -> Iterator[memoryview]:
    if not tensor.nbytes:
        return
    content: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    whole = memoryview(content).cast("B")
    for at in range(0, tensor.nbytes, PIECE):
        yield whole[at : at + PIECE]
