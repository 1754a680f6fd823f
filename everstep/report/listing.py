"""The table of a run's checkpoints: for a terminal, for a notebook, as a data frame, and as rows for Prefect."""

import html
import time
from collections.abc import Iterator, Sequence
from typing import Any, overload

from everstep.core import words
from everstep.core.listing import CheckpointRow

TIERS = ("local", "persistent", "object")
WHY = 60
"""So many characters of a reason are shown in a line; `rows` and `frame` have all of it."""


class CheckpointTable(Sequence[CheckpointRow]):
    """The checkpoints of a run, newest first. Print it, or let a notebook show it; `frame` is a pandas data frame."""

    def __init__(self, rows: Sequence[CheckpointRow], title: str, now: float | None = None) -> None:
        self._rows = tuple(rows)
        self._title = title
        self._now = time.time() if now is None else now
        self._tiers = [tier for tier in TIERS if any(tier in row.tiers for row in rows)]
        self._metric = next((row.metric_name for row in rows if row.metric is not None), "")

    @overload
    def __getitem__(self, index: int) -> CheckpointRow: ...
    @overload
    def __getitem__(self, index: slice) -> "CheckpointTable": ...
    def __getitem__(self, index: int | slice) -> "CheckpointRow | CheckpointTable":
        if isinstance(index, slice):
            return CheckpointTable(self._rows[index], self._title, self._now)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def frame(self) -> Any:
        """The table as a pandas data frame by checkpoint, newest first: a column for each tier, sizes in bytes."""
        import pandas as pd

        columns = ["step", "attempt", *self._tiers, "bytes", "saved", *([self._metric] if self._metric else []), "why"]
        made = [
            {
                "checkpoint": row.checkpoint, "step": row.step, "attempt": row.attempt, "bytes": row.bytes,
                "saved": row.saved, "why": row.why, **{tier: row.tiers.get(tier, "") for tier in self._tiers},
                **({self._metric: row.metric} if self._metric else {}),
            }
            for row in self._rows
        ]  # fmt: skip
        return pd.DataFrame(made, columns=["checkpoint", *columns]).set_index("checkpoint")

    def rows(self) -> list[dict[str, Any]]:
        """The table as a list of plain rows, as Prefect's table artifacts take it."""
        head = self._head
        return [dict(zip(head, cells, strict=True)) for cells in self._lines(0)]

    def __str__(self) -> str:
        lines = [tuple(self._head), *self._lines(WHY)]
        width = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        text = ["  ".join(cell.ljust(width[at]) for at, cell in enumerate(line)).rstrip() for line in lines]
        return "\n".join([self._title, *(text if self._rows else ["no checkpoint yet"])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = [f"<th>{html.escape(cell)}</th>" for cell in self._head]
        body = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in self._lines(0)]
        rows = "".join(f"<tr>{row}</tr>" for row in ["".join(lines), *body])
        return f"<table><caption>{html.escape(self._title)}</caption>{rows}</table>"

    @property
    def _head(self) -> list[str]:
        return ["checkpoint", *self._tiers, "size", "age", *([self._metric] if self._metric else []), "why"]

    def _lines(self, most: int) -> Iterator[tuple[str, ...]]:
        for row in self._rows:
            age = "" if row.saved is None else words.duration(max(0.0, self._now - row.saved))
            metric = [] if not self._metric else ["" if row.metric is None else words.figure(row.metric)]
            why = words.first_line(row.why, most) if most else " ".join(row.why.split())
            yield (
                row.checkpoint,
                *(row.tiers.get(tier, "") for tier in self._tiers),
                words.size(row.bytes),
                age,
                *metric,
                why,
            )
