"""Reads rows of a growing JSON-lines file, from where it stood to the last whole line."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class Tail:
    """Where a reader of one file stands."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def rewind(self) -> None:
        """Begin at the file's start again."""
        self._offset = 0

    def batches(self, size: int, weight: Callable[[Row], int], wanted: Callable[[Row], bool]) -> Iterator[list[Row]]:
        """The wanted rows since the last time, in batches of at most `size` by weight, or of one heavier row.

        The place moves on when the next batch is asked for, so what failed to be handled is read again after `rewind`.
        Lines that are torn or no objects are passed over.
        """
        batch: list[Row] = []
        load = 0
        for row in self._rows():
            if not wanted(row):
                continue
            if batch and load + weight(row) > size:
                yield batch
                batch, load = [], 0
            batch.append(row)
            load += weight(row)
        if batch:
            yield batch

    def _rows(self) -> Iterator[Row]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row
