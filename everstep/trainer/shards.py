"""Tensors in safetensors files: shared out over files, and read with their digests checked.

The writing is done by `everstep.trainer.writer`. Format: https://huggingface.co/docs/safetensors.
"""

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Self

import torch
from blake3 import blake3
from torch import Tensor

from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged
from everstep.store import contents
from everstep.store import tensors as stored
from everstep.trainer.snapshot import Placed

LARGEST = 256 << 20  # bytes of tensors in a file; a larger tensor has a file of its own

PIECE = 8 << 20
_OTHER_BYTES = "has other bytes than the manifest says"

Seen = Callable[[int], None]


def deaf(_: int) -> None:
    """For whom it is all the same how many bytes were read."""


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

    def whole() -> bytes:
        with _open(folder, entry) as file:
            return file.read()

    data = contents.reading(folder, entry.path, whole)
    if blake3(data, max_threads=threads).hexdigest() != entry.blake3:
        raise Damaged(folder.name, entry.path, _OTHER_BYTES)
    return data


def load(
    folder: Path, entry: FileEntry, place: Callable[[stored.Tensor], Tensor | None], threads: int = 1, seen: Seen = deaf
) -> dict[str, Tensor]:
    """Tensors of a safetensors file, if its bytes are those that the manifest names. Raises Damaged.

    `place` gives the memory for a tensor, contiguous and of its size, or None for one that is not wanted. Bytes go from
    the file to where they belong, without a copy between; another thread computes the digest meanwhile.
    """
    return contents.reading(folder, entry.path, lambda: _load(folder, entry, place, threads, seen))


def nowhere(_: stored.Tensor) -> None:
    """The place of tensors that are read for their digest alone."""


def empty(tensor: stored.Tensor) -> Tensor:
    """Memory for a stored tensor."""
    name = stored.dtype_of(tensor.dtype)
    dtype = getattr(torch, name or "", None)
    if dtype is None:
        raise TypeError(f"{tensor.name!r} has the dtype {tensor.dtype}, which this PyTorch does not know")
    shape = tensor.shape
    return torch.empty((*shape[:-1], shape[-1] // 2) if tensor.dtype == "F4" else shape, dtype=dtype)


def _load(
    folder: Path, entry: FileEntry, place: Callable[[stored.Tensor], Tensor | None], threads: int, seen: Seen
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with _open(folder, entry) as file:
        tensors = sorted(stored.header_in(folder / entry.path, file).values(), key=lambda one: one.begin)
        start = file.tell()
        file.seek(0)
        with _Digest(threads, entry.size) as digest:
            _through(file, start, None, digest, seen)
            for tensor in tensors:
                try:
                    memory = place(tensor)
                except TypeError as error:
                    raise Damaged(folder.name, entry.path, f"holds what cannot be read here: {error}") from None
                if memory is not None:
                    found[tensor.name] = memory
                _through(file, tensor.end - tensor.begin, memory, digest, seen)
        if digest.hexdigest() != entry.blake3:
            raise Damaged(folder.name, entry.path, _OTHER_BYTES)
    return found


def _open(folder: Path, entry: FileEntry) -> FileIO:
    file = FileIO(os.open(folder / entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        file.close()
        raise Damaged(folder.name, entry.path, f"has {size} bytes; the manifest says {entry.size}")
    return file


def _through(file: FileIO, size: int, memory: Tensor | None, digest: "_Digest", seen: Seen) -> None:
    """Read the next `size` bytes of a file into `memory`, or to nowhere, and to the digest. A file that ends early has
    another digest.
    """
    view = _bytes(memory) if memory is not None and size else None
    for at in range(0, size, PIECE):
        length = min(PIECE, size - at)
        piece = view[at : at + length] if view is not None else memoryview(bytearray(length))
        done = 0
        while done < length and (count := file.readinto(piece[done:])):
            done += count
        digest.update(piece[:done])
        seen(done)


class _Digest:
    """BLAKE3 of what it is shown, in its order. For a large file another thread computes it."""

    def __init__(self, threads: int, size: int) -> None:
        self._digest = blake3(max_threads=threads)
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(4)
        self._thread = threading.Thread(target=self._run, name="digest", daemon=True) if size > 2 * PIECE else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()

    def update(self, piece: memoryview) -> None:
        if self._thread is not None:
            self._pieces.put(piece)
        else:
            self._digest.update(piece)

    def hexdigest(self) -> str:
        return str(self._digest.hexdigest())

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._digest.update(piece)


def _bytes(tensor: Tensor) -> memoryview:
    content: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(content).cast("B")
