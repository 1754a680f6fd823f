"""Columns and their dtypes, whichever format they are in: what they are called, and whether two files agree."""

from collections import Counter
from collections.abc import Sequence

from everstep.core.gate import clip

Schema = Sequence[tuple[str, str]]
"""Names and dtypes."""

_ALIASES = {
    "str": "string", "object": "string", "text": "string", "utf8": "string", "large_string": "string",
    "double": "float64", "half": "float16", "boolean": "bool", "long": "int64", "halffloat": "float16",
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
    "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8",
    "u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8",
}  # fmt: skip
_NUMBERS = ("int", "uint", "float", "bfloat")
EMPTY = "empty"
"""The dtype of a CSV column without a value: it agrees with every other."""


def canonical(dtype: str) -> str:
    """One word for a dtype, whoever names it: NumPy, Arrow, safetensors or a person."""
    word = dtype.strip().lower()
    return _ALIASES.get(word, word)


def fits(wanted: str, found: str, *, typed: bool = True) -> bool:
    """Whether a found dtype is what a job asks for. `int`, `float` and `number` mean any of their kind.

    A format without types of its own (CSV) knows `int64`, `float64`, `bool` and `string` only: there any width fits.
    """
    wanted, found = canonical(wanted), canonical(found)
    if wanted == found or (found == EMPTY and not typed):
        return True
    if wanted in ("int", "float", "number"):
        kinds = {"int": ("int", "uint"), "float": ("float", "bfloat"), "number": _NUMBERS}[wanted]
        return found.startswith(kinds) or (wanted == "float" and not typed and found == "int64")
    if typed or not wanted.startswith(_NUMBERS):
        return False
    return found == "int64" or (found == "float64" and wanted.startswith(("float", "bfloat")))


def difference(schema: Schema, other: Schema, *, typed: bool = True) -> str:
    """How a file's columns differ from those of the others; empty if they agree. Their order does not count."""
    mine, theirs = dict(schema), dict(other)
    for name in theirs:
        if name not in mine:
            return f"the column {clip(name, 60)!r} is missing"
    for name, dtype in mine.items():
        if name not in theirs:
            return f"there is a column {clip(name, 60)!r} besides"
        if not _agree(dtype, theirs[name], typed=typed):
            return f"the column {clip(name, 60)!r} is {dtype}, not {theirs[name]}"
    return ""


def _agree(one: str, other: str, *, typed: bool) -> bool:
    if one == other or typed:
        return one == other
    return EMPTY in (one, other) or (one in ("int64", "float64") and other in ("int64", "float64"))


def reference(schemas: Sequence[Schema]) -> Schema:
    """What most of the files have, the first such one: columns without a value count as what others have there."""
    if not schemas:
        return ()
    names = Counter(frozenset(name for name, _ in schema) for schema in schemas)
    most = max(names.values())
    same = [one for one in schemas if names[frozenset(name for name, _ in one)] == most]
    same = [one for one in same if set(dict(one)) == set(dict(same[0]))]
    dtypes: dict[str, Counter[str]] = {name: Counter() for name, _ in same[0]}
    for schema in same:
        for name, dtype in schema:
            dtypes[name][dtype] += dtype != EMPTY
    return tuple((name, max(counts, key=lambda dtype: counts[dtype])) for name, counts in dtypes.items())
