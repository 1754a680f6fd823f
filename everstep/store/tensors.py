"""Tensors in safetensors files, without torch: headers, non-finite values, and the digest of weights.

Format: 8 bytes little-endian header length, JSON header, data (https://huggingface.co/docs/safetensors). A header is
believed only after every offset has been checked against the file's size.
"""

import ctypes
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from blake3 import blake3

from everstep.core.box import Box
from everstep.core.checkpoint import each_once
from everstep.core.errors import Damaged
from everstep.store import digest

if TYPE_CHECKING:
    from everstep.store.wholes import Whole

MODEL = "model/"
HEADER_LIMIT = 100_000_000  # bytes; the same bound as in the safetensors library
DIMENSIONS_LIMIT = 64

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4,
}  # fmt: skip

# How a value that is no number looks: (unit read, mask, what the masked bits are then). IEEE formats have an exponent of
# all ones; E4M3 has only NaN with all bits but the sign set; the FNUZ forms and E8M0 have one pattern. F4 has none.
_NOT_FINITE: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "F64": (np.uint64, 0x7FF0000000000000, 0x7FF0000000000000),
    "F32": (np.uint32, 0x7F800000, 0x7F800000),
    "C64": (np.uint32, 0x7F800000, 0x7F800000),
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
}
FLOATING = frozenset(_NOT_FINITE) | {"F4"}

_WORDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "complex64": "F32", "complex128": "F64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float4_e2m1fn_x2": "F4",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: dtype in safetensors' word, shape, and where its bytes begin and end in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. Raises Damaged, naming the file, for a header that is not sound."""
    with path.open("rb") as file:
        return header_in(path, file)


def header_in(path: Path, file: BinaryIO) -> dict[str, Tensor]:
    """The same of an open file, which stands at its begin and then at the end of its header."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    if len(start) < 8:
        raise _damaged(path, f"has {size} bytes, too few for a safetensors file")
    (length,) = struct.unpack("<Q", start)
    if length > min(size - 8, HEADER_LIMIT):
        raise _damaged(path, f"says that its header has {length} bytes, but the file has {size}")
    text = file.read(length)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in _entries(path, text)]
    _check_layout(path, tensors, 8 + length, size)
    return {tensor.name: tensor for tensor in tensors}


def non_finite(path: Path, names: Iterable[str]) -> list[str]:
    """Which of the named floating tensors in `path` hold NaN or infinity. Reads in bounded memory."""
    header = read_header(path)
    scan = Scan(header[name] for name in names)
    digest.of_file(path, scan.see)
    return sorted(scan.found)


class Scan:
    """Looks for NaN and infinity in the bytes of a file as they pass by, chunk after chunk. `found` has the names."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.found: set[str] = set()
        self._tensors = sorted((one for one in tensors if one.dtype in _NOT_FINITE), key=lambda one: one.begin)
        self._position = 0
        self._rest = b""

    def see(self, chunk: memoryview) -> None:
        """The next bytes of the file."""
        begin, end = self._position, self._position + len(chunk)
        while self._tensors and self._tensors[0].begin < end:
            tensor = self._tensors[0]
            part = chunk[max(tensor.begin, begin) - begin : min(tensor.end, end) - begin]
            self._look(tensor, part)
            if tensor.end > end:
                break
            self._tensors.pop(0)
        self._position = end

    def _look(self, tensor: Tensor, part: memoryview) -> None:
        """Values that lie across two chunks are put together; everything else is looked at where it is."""
        unit, mask, pattern = _NOT_FINITE[tensor.dtype]
        width = unit().itemsize
        if self._rest:
            missing = width - len(self._rest)
            whole, part = self._rest + bytes(part[:missing]), part[missing:]
            self._rest = b""
            if len(whole) < width:
                self._rest = whole
                return
            self._judge(tensor.name, np.frombuffer(whole, unit), mask, pattern)
        tail = len(part) % width
        if tail:
            part, self._rest = part[:-tail], bytes(part[-tail:])
        self._judge(tensor.name, np.frombuffer(part, unit), mask, pattern)

    def _judge(self, name: str, values: "np.ndarray[Any, np.dtype[Any]]", mask: int, pattern: int) -> None:
        if bool(np.any((values & values.dtype.type(mask)) == values.dtype.type(pattern))):
            self.found.add(name)


def weights_digest(state_dict: Mapping[str, Any]) -> str:
    """BLAKE3 over names, dtypes, shapes and bytes of the tensors in a torch state dict, in sorted order of names.

    Where a tensor lies (device, strides, shared storage) does not count; entries that are no tensors are left out.
    """
    total = blake3(max_threads=blake3.AUTO)
    for name in sorted(name for name, value in state_dict.items() if hasattr(value, "data_ptr")):
        tensor = state_dict[name].detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # sharded: the ranks gather it
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        dtype = word(tensor.dtype)
        total.update(_frame(name, dtype, shape_of(tensor)))
        size = tensor.numel() * tensor.element_size()
        if size:
            total.update(memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B"))
    return str(total.hexdigest())


def weights_digest_of(folder: Path) -> str:
    """`weights_digest` of the model in a checkpoint's folder, read from its files; sharded tensors count as wholes."""
    from everstep.store import contents  # it reads headers by way of this module

    model = contents.model_of(folder)
    total = blake3(max_threads=blake3.AUTO)
    for name in sorted(model):
        whole = model[name]
        total.update(_frame(name, whole.dtype, whole.shape))
        if len(whole.pieces) == 1:
            held = whole.pieces[0].held
            _add_bytes(total, folder / held.path, held.tensor)
        else:
            _add_pieces(total, folder, whole)
    return str(total.hexdigest())


def word(dtype: Any) -> str:
    """Safetensors' word for a torch dtype (`torch.float32` is `F32`). Complex numbers are stored as pairs of reals."""
    name = str(dtype).removeprefix("torch.")
    if name not in _WORDS:
        raise ValueError(f"dtype {dtype} has no place in a safetensors file; convert the tensor first")
    return _WORDS[name]


def dtype_of(word: str) -> str | None:
    """The name of the torch dtype whose tensors are stored under safetensors' `word`; None if there is none."""
    return next((name for name, one in _WORDS.items() if one == word and not name.startswith("complex")), None)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """A torch tensor's shape as it is stored: complex numbers get a last dimension of 2, and each element of
    float4_e2m1fn_x2 counts as two.
    """
    shape = tuple(int(length) for length in tensor.shape)
    if tensor.is_complex():
        return (*shape, 2)
    return (*shape[:-1], shape[-1] * 2) if word(tensor.dtype) == "F4" else shape


def _frame(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    return json.dumps([name, dtype, list(shape)]).encode() + b"\n"


def _add_bytes(total: Any, path: Path, tensor: Tensor) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        buffer = memoryview(bytearray(min(left, digest.CHUNK)))
        while left:
            count = file.readinto(buffer[:left])
            if not count:
                raise _damaged(path, f"ends before {tensor.name} is complete")
            total.update(buffer[:count])
            left -= count


def _add_pieces(total: Any, folder: Path, whole: "Whole") -> None:
    """A whole's bytes, row by row as they would lie in one file. Rows that lie together in a part are read at once."""
    pieces = sorted((piece for piece in whole.pieces if piece.box.size), key=lambda piece: piece.box.offset)
    if all(piece.box.shape[1:] == whole.shape[1:] for piece in pieces):
        for piece in pieces:
            _add_bytes(total, folder / piece.held.path, piece.held.tensor)
        return
    unit = np.dtype(f"V{BITS[whole.dtype] // 8}")
    values = np.empty(whole.shape, unit)
    for piece in pieces:
        tensor, path = piece.held.tensor, folder / piece.held.path
        part = np.fromfile(path, unit, count=piece.box.size, offset=tensor.begin)
        if part.size != piece.box.size:
            raise _damaged(path, f"ends before {tensor.name} is complete")
        values[piece.box.within(Box.whole(whole.shape))] = part.reshape(piece.box.shape)
    total.update(values.tobytes())


def _entries(path: Path, text: bytes) -> Iterable[tuple[str, Any]]:
    try:
        header = json.loads(text, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"has no readable header ({error})") from None
    if not isinstance(header, dict):
        raise _damaged(path, "has a header that is not a JSON object")
    return ((name, entry) for name, entry in header.items() if name != "__metadata__")


def _tensor(path: Path, name: str, entry: Any, start: int) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"describes {name!r} in an unknown way")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _damaged(path, f"gives {name!r} the unknown dtype {dtype!r}")
    if not _are_lengths(shape) or len(shape) > DIMENSIONS_LIMIT:
        raise _damaged(path, f"gives {name!r} an impossible shape")
    if not _are_lengths(offsets) or len(offsets) != 2:
        raise _damaged(path, f"gives {name!r} impossible offsets")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise _damaged(path, f"gives {name!r} {end - begin} bytes, which do not fit {dtype} {shape}")
    return Tensor(name, dtype, tuple(shape), start + begin, start + end)


def _are_lengths(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_layout(path: Path, tensors: list[Tensor], start: int, size: int) -> None:
    """Tensors lie one after the other from the header's end to the file's end: no gap, no overlap."""
    at = start
    for tensor in sorted(tensors, key=lambda one: (one.begin, one.end)):
        if tensor.begin != at:
            raise _damaged(path, f"has {tensor.name!r} overlapping another tensor or behind a gap")
        at = tensor.end
    if at != size:
        raise _damaged(path, f"has {size} bytes where its header says {at}")


def _damaged(path: Path, why: str) -> Damaged:
    return Damaged(path.parent.name, path.name, why)
