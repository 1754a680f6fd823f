"""Reads the rows of `metrics.jsonl` that the training gates look at: little, whatever its length.

Of a long file the newest part is read, what lies around the newest restore, and small blocks before: some at distances
that grow, so that each span of time has its rows, and some evenly over the file, so that the whole run has.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from everstep.core.training_gates import StepSeen

NEWEST_BYTES = 96 * 1024  # about 650 rows
BLOCK_BYTES = 8 * 1024
GROWTH = 2
EVEN_BYTES = 4 * 1024  # about 27 rows
EVEN_BLOCKS = 64
RESTORE_BYTES = 32 * 1024  # about 200 rows: 13 gradient norms, where one row in 16 has one
LINE_BYTES = 4 * 1024


def read(metrics: Path, newest: int, resumed: Mapping[int, int]) -> tuple[list[StepSeen], bool]:
    """Rows of attempts up to the newest one, and whether that one uses a gradient scaler.

    `resumed` has the step from which each attempt went on.
    """
    at = resumed.get(newest, 0)
    left = max((number for number, step in resumed.items() if number < newest and step < at), default=0)
    found: list[StepSeen] = []
    scaled = False
    for lines in _blocks(metrics, [(left, at), (newest, at)] if left else []):
        for row in _parsed(lines):
            step = _step(row)
            if step is not None and step.attempt <= newest:
                found.append(step)
                scaled = scaled or (step.attempt == newest and row.get("scaled") is True)
    return found, scaled


def _step(row: Any) -> StepSeen | None:
    """A row, or None for what is none. Values that are no numbers rest as words in the file."""
    try:
        attempt, step, when, norm = row["attempt"], row["step"], float(row["time"]), row.get("grad_norm")
        if type(attempt) is not int or type(step) is not int or not math.isfinite(when):
            return None
        return StepSeen(
            attempt,
            step,
            when,
            float(row["loss"]),
            float(row.get("samples", 0)),
            None if norm is None else float(norm),
            "eval" in row,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _blocks(path: Path, around: Sequence[tuple[int, int]]) -> Iterator[list[bytes]]:
    """The lines of each part of the file that is read; also of what lies around rows of such an attempt and step."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = file.seek(0, 2)
        for begin, end in _parts(size, [_place(file, size, key) for key in around] if size > NEWEST_BYTES else []):
            file.seek(begin)
            lines = file.read(end - begin).split(b"\n")
            yield [line for line in lines[1 if begin else 0 : None if end == size else -1] if line]


def _place(file: BinaryIO, size: int, key: tuple[int, int]) -> int:
    """About where the first row beyond this attempt and step begins: rows are appended in their order."""
    low, high = 0, size
    while high - low > LINE_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline(LINE_BYTES)
        row = next((one for one in map(_step, _value(file.readline(LINE_BYTES))) if one is not None), None)
        if row is None or (row.attempt, row.step) > key:  # a foreign line: what is before it will do
            high = middle
        else:
            low = middle
    return low


def _parts(size: int, places: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Where to read in a file of so many bytes: begins and ends, in order, none of them twice."""
    wanted = [(max(0, size - NEWEST_BYTES), size)]
    wanted += [(place - RESTORE_BYTES, place + RESTORE_BYTES) for place in places]
    distance = NEWEST_BYTES
    while distance < size:
        distance = distance * GROWTH + BLOCK_BYTES
        wanted.append((size - distance, size - distance + BLOCK_BYTES))
    wanted += [(size * at // EVEN_BLOCKS, size * at // EVEN_BLOCKS + EVEN_BYTES) for at in range(EVEN_BLOCKS)]
    found: list[tuple[int, int]] = []
    for begin, end in sorted((max(0, begin), min(size, end)) for begin, end in wanted):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _parsed(lines: list[bytes]) -> list[Any]:
    """The values in some lines. Many at once are read in a third of the time; torn ones cost only themselves."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and len(found) == len(lines):
        return found
    return [value for line in lines for value in _value(line)]


def _value(line: bytes) -> list[Any]:
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        return []
