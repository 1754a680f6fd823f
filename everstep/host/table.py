"""Looks into the files of a data set, a little of each: columns, dtypes, and a sample of rows.

Bounded whatever the files hold: of each file `PIECE` bytes at most are read besides its header, of all files of a kind
`SAMPLE` bytes are kept, and nothing is unpickled. A file that cannot be read is described, not raised. pandas, NumPy
and pyarrow are imported late.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from everstep.core.columns import EMPTY, canonical
from everstep.core.gate import clip, is_marker
from everstep.host import arrays
from everstep.host.arrays import Unreadable

PIECE = 4 << 20
SAMPLE = 64 << 20
CELLS = 4_000_000
FILES = 2_000
"""Of a kind with more files so many are opened, evenly spread."""
COLUMNS = 50_000
LINE = 10_000
"""Characters of a line of text that are kept."""

KINDS = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv",
    ".safetensors": "tensors", ".npz": "tensors", ".npy": "tensors",
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".jsonl": "text", ".py": "text",
}  # fmt: skip
TENSOR_COLUMNS = ("path", "name", "dtype", "shape")
MISSING = frozenset(("", "na", "n/a", "nan", "null", "none"))

Schema = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Opened:
    """A file's columns or tensors, its rows if the format tells (of CSV: those that were read), or its trouble."""

    path: str
    schema: Schema = ()
    rows: int | None = None
    trouble: str = ""


@dataclass
class Sample:
    """What was read of the files of one kind. `frame` is a pandas data frame, `origins` has the path of each row."""

    kind: str
    total: int
    opened: list[Opened] = field(default_factory=list)
    frame: Any = None
    origins: list[str] = field(default_factory=list)


def kind_of(path: str) -> str | None:
    """Which kind of table a file is by its name; None for one that is not looked into."""
    return None if is_marker(path) else KINDS.get(PurePosixPath(path).suffix.lower())


def look(root: Path, paths: Sequence[str], kind: str, rows: int) -> Sample:
    """Read up to `rows` rows of the files of one kind, spread over all of them. Raises OSError of a disk."""
    import pandas as pd

    chosen = spread(paths, min(FILES, rows))
    share = -(-rows // max(1, len(chosen)))
    found = Sample(kind, len(paths))
    frames, kept = [], 0
    for path in chosen:
        try:
            opened, frame = _READERS[kind](root / path, path, share if kept < SAMPLE else 0)
        except (Unreadable, MemoryError) as error:
            opened, frame = Opened(path, trouble=clip(str(error)) or "needs too much memory to be read"), None
        found.opened.append(opened)
        if frame is not None and len(frame):
            frames.append(frame)
            kept += int(frame.memory_usage(deep=True).sum())
            found.origins += [path] * len(frame)
    found.frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return found


def spread(paths: Sequence[str], most: int) -> list[str]:
    """At most `most` of the paths, evenly spread, the first and the last among them."""
    if len(paths) <= most:
        return list(paths)
    if most == 1:
        return [paths[0]]
    return [paths[round(index * (len(paths) - 1) / (most - 1))] for index in range(most)]


# -- CSV --------------------------------------------------------------------------------------------------------------


def _csv(file: Path, path: str, share: int) -> tuple[Opened, Any]:
    """CSV has no types: a column's dtype is the narrowest of int64, float64, bool and string that its values allow."""
    import pandas as pd

    text, whole = _piece(file)
    if not whole:
        head, newline, _ = text.rpartition("\n")
        if not newline:
            raise Unreadable(f"its first line is longer than {PIECE >> 20} MiB")
        text = head
    table = list(_records(text, path, max(1, share) + 1, whole=whole))
    if not table:
        raise Unreadable("has no line")
    named = not all(_is_number(cell) for cell in table[0])
    names = _names(table[0]) if named else [str(index) for index in range(len(table[0]))]
    if len(names) > COLUMNS:
        raise Unreadable(f"has {len(names):,} columns, more than {COLUMNS:,}")
    body = table[1:] if named else table[: max(1, share)]
    body = body[: max(1, CELLS // len(names))]
    columns = {name: _typed([row[index] for row in body]) for index, name in enumerate(names)}
    schema = tuple((name, dtype) for name, (dtype, _) in columns.items())
    frame = pd.DataFrame({name: values for name, (_, values) in columns.items()}) if share else None
    return Opened(path, schema, len(body)), frame


def _records(text: str, path: str, most: int, *, whole: bool) -> Iterator[list[str]]:
    """The first records; of a piece of a file the last one may be torn, and is left out."""
    csv.field_size_limit(PIECE)
    held: list[str] | None = None
    width = 0
    try:
        for record in csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text, path)):
            if not record:
                continue
            if held is not None:
                yield _of_width(held, width)
                most -= 1
                if most <= 0:
                    return
            held, width = record, width or len(record)
    except csv.Error as error:
        raise Unreadable(f"is not CSV ({error})") from None
    if held is not None and whole:
        yield _of_width(held, width)


def _of_width(record: list[str], width: int) -> list[str]:
    if len(record) != width:
        raise Unreadable(f"has a record of {len(record)} cells where the first has {width}")
    return record


def _delimiter(text: str, path: str) -> str:
    if path.lower().endswith(".tsv"):
        return "\t"
    first = text[:PIECE].partition("\n")[0]
    return "," if "," in first else max(";\t", key=first.count) if ";" in first or "\t" in first else ","


def _names(header: Sequence[str]) -> list[str]:
    """The names of columns, each once."""
    seen: dict[str, int] = {}
    names = []
    for name in header:
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}.{seen[name] - 1}")
    return names if len(set(names)) == len(names) else [f"{index}:{name}" for index, name in enumerate(header)]


def _typed(cells: list[str]) -> tuple[str, Any]:
    """The dtype of a column, and its values as pandas holds them."""
    import pandas as pd

    values = [None if cell.strip().lower() in MISSING else cell.strip() for cell in cells]
    there = [value for value in values if value is not None]
    if not there:
        return EMPTY, pd.Series(values, dtype="object")
    if all(value.lower() in ("true", "false") for value in there):
        return "bool", pd.Series([value and value.lower() == "true" for value in values], dtype="boolean")
    if all(_is_number(value) for value in there):
        numbers = pd.to_numeric(pd.Series(values, dtype="object"), errors="coerce")
        return ("int64" if numbers.dtype.kind in "iu" else "float64"), numbers
    return "string", pd.Series([None if value is None else cell for value, cell in zip(values, cells, strict=True)])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


# -- Parquet ----------------------------------------------------------------------------------------------------------


def _parquet(file: Path, path: str, share: int) -> tuple[Opened, Any]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        texts = _text_columns(parquet.read_schema(file))
        with parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20, read_dictionary=texts) as table:
            schema = tuple((name, _arrow_word(kind)) for name, kind in _arrow_fields(table.schema_arrow))
            if len(schema) > COLUMNS:
                raise Unreadable(f"has {len(schema):,} columns, more than {COLUMNS:,}")
            rows = int(table.metadata.num_rows)
            frame = _arrow_rows(table, min(share, max(1, CELLS // max(1, len(schema))))) if share and rows else None
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Unreadable(f"is not readable as Parquet ({clip(str(error), 100)})") from None
    if len({name for name, _ in schema}) != len(schema):
        raise Unreadable("has two columns of one name")
    return Opened(path, schema, rows), frame


def _arrow_fields(schema: Any) -> Iterator[tuple[str, Any]]:
    for one in schema:
        yield one.name, one.type


def _arrow_word(kind: Any) -> str:
    """NumPy's word for a type of Arrow where there is one, else Arrow's own."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return canonical({"float": "float32", "halffloat": "float16"}.get(str(kind), str(kind)))


def _text_columns(schema: Any) -> list[str]:
    """Columns of text or bytes. They are read as dictionaries: a long value that many rows share is there once."""
    return [name for name, kind in _arrow_fields(schema) if _is_text(kind)]


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _arrow_rows(table: Any, most: int) -> Any:
    """The first rows, read in small batches until there are enough, or enough bytes; one row at least."""
    import pandas as pd

    frames, rows, left = [], 0, PIECE
    for batch in table.iter_batches(batch_size=min(most, 256)):
        sizes = _row_sizes(batch)
        enough = int((sizes.cumsum() < left).sum()) + 1
        kept = batch.slice(0, min(enough, most - rows))
        frames.append(_plain(kept).to_pandas())
        rows, left = rows + kept.num_rows, left - int(sizes[: kept.num_rows].sum())
        if rows >= most or left <= 0:
            break
    return pd.concat(frames, ignore_index=True) if frames else None


def _row_sizes(batch: Any) -> Any:
    """About how many bytes each row takes once its dictionaries are spelled out."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    sizes = np.zeros(batch.num_rows)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type) and _is_text(column.type.value_type):
            lengths = compute.take(compute.binary_length(column.dictionary), column.indices)
            sizes += lengths.fill_null(0).to_numpy(zero_copy_only=False)
        else:
            sizes += column.nbytes / max(1, batch.num_rows)
    return sizes


def _plain(batch: Any) -> Any:
    """The rows with their dictionaries spelled out."""
    import pyarrow as pa

    columns = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


# -- tensors ----------------------------------------------------------------------------------------------------------


def _tensors(file: Path, path: str, share: int) -> tuple[Opened, Any]:
    """The names, dtypes and shapes of tensors; no values."""
    import pandas as pd

    found = arrays.headers(file)
    if not found:
        raise Unreadable("holds no tensor")
    rows = [(path, name, dtype, "x".join(map(str, shape))) for name, dtype, shape in found[: max(share, 1)]]
    frame = pd.DataFrame(rows, columns=list(TENSOR_COLUMNS)) if share else None
    return Opened(path, tuple((name, dtype) for name, dtype, _ in found)), frame


# -- text -------------------------------------------------------------------------------------------------------------


def _text(file: Path, path: str, share: int) -> tuple[Opened, Any]:
    """Lines as rows: the text (clipped), its length in characters, and whether the line is UTF-8."""
    import pandas as pd

    with file.open("rb") as stream:
        data = stream.read(PIECE)
    lines = data.removesuffix(b"\n").split(b"\n", max(1, share))[: max(1, share)]
    texts = [line.decode(errors="replace").rstrip("\r") for line in lines]
    clean = [_is_utf8(line) for line in lines]
    frame = pd.DataFrame({
        "text": [text[:LINE] for text in texts], "length": [len(text) for text in texts], "utf8": clean
    })  # fmt: skip
    schema = (("text", "string"), ("length", "int64"), ("utf8", "bool"))
    return Opened(path, schema, len(lines)), frame if share else None


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _piece(file: Path) -> tuple[str, bool]:
    """The beginning of a file as text, and whether that is all of it."""
    with file.open("rb") as stream:
        data = stream.read(PIECE + 1)
    whole = len(data) <= PIECE
    return data[:PIECE].decode("utf-8-sig", errors="replace"), whole


_READERS = {"parquet": _parquet, "csv": _csv, "tensors": _tensors, "text": _text}
