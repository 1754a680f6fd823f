"""Headers of files of arrays: safetensors, .npz and .npy. No data is read, and nothing is unpickled."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO

from everstep.core.columns import canonical
from everstep.core.errors import Damaged
from everstep.core.gate import clip
from everstep.store import tensors

MEMBERS = 50_000

Header = tuple[str, str, tuple[int, ...]]
"""Name, dtype in NumPy's word, and shape."""


class Unreadable(Exception):
    """A file is not what its name says; the text says why."""


def headers(file: Path) -> list[Header]:
    """The arrays in a file by its suffix. Raises Unreadable for what is none, OSError of a disk."""
    read = {".safetensors": _safetensors, ".npz": _npz, ".npy": _npy}[file.suffix.lower()]
    return read(file)


def _safetensors(file: Path) -> list[Header]:
    try:
        header = tensors.read_header(file)
    except Damaged as error:
        raise Unreadable(error.why) from None
    return [(name, canonical(one.dtype), one.shape) for name, one in header.items()]


def _npy(file: Path) -> list[Header]:
    with file.open("rb") as stream:
        return [_array(stream, file.stem, file.stat().st_size)]


def _npz(file: Path) -> list[Header]:
    try:
        with zipfile.ZipFile(file) as archive:
            found = []
            for member in archive.infolist()[:MEMBERS]:
                name = member.filename.removesuffix(".npy")
                if name == member.filename:
                    raise Unreadable(f"holds {clip(name, 60)!r}, which is no array")
                with archive.open(member) as stream:
                    found.append(_array(stream, name, member.file_size))
            return found
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        raise Unreadable(f"is not a readable .npz ({clip(str(error), 80)})") from None


def _array(stream: IO[bytes], name: str, size: int) -> Header:
    """An array's header. `size` is how many bytes it takes with it; the data itself is not read."""
    import numpy as np

    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except (ValueError, TypeError, EOFError, zlib.error) as error:
        raise Unreadable(f"array {clip(name, 60)!r} has no sound header ({clip(str(error), 80)})") from None
    if dtype.hasobject:
        raise Unreadable(f"array {clip(name, 60)!r} holds pickled Python objects, which are not loaded")
    if any(length < 0 for length in shape):
        raise Unreadable(f"array {clip(name, 60)!r} has an impossible shape")
    expected = stream.tell() + dtype.itemsize * math.prod(map(int, shape))
    if expected > size:
        raise Unreadable(f"array {clip(name, 60)!r} has {size:,} bytes where its header says {expected:,}")
    return name, canonical(dtype.newbyteorder("=").name), tuple(int(length) for length in shape)
