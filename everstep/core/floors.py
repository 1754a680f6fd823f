"""How fast a healthy GPU is at least, by its model: the floors of the active gate. Pure.

Ours are data, `core/data/floors.csv`, each with its unit and source. They catch broken parts; how far a fleet is from its
own best is for a soak to say. A model without a row has no floor: its figures are given, and not judged.
"""

import csv
import re
from enum import StrEnum
from functools import cache, lru_cache
from importlib.resources import files
from typing import NamedTuple

from pydantic import Field, field_validator

from everstep.core.record import Record


class Speed(StrEnum):
    """What is measured; TFLOP/s and GB/s (1e9 bytes). `all_reduce` is bus bandwidth, as nccl-tests defines it."""

    bf16 = "bf16_tflops"
    fp16 = "fp16_tflops"
    fp32 = "fp32_tflops"
    memory = "memory_gb_per_second"
    h2d = "h2d_gb_per_second"
    d2h = "d2h_gb_per_second"
    all_reduce = "all_reduce_gb_per_second"

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.value.endswith("tflops") else "GB/s"


class Row(NamedTuple):
    """A floor as we ship it. `model` is a pattern in the GPU's name; `ranks`: it holds for so many of them together."""

    model: str
    speed: Speed
    value: float
    unit: str
    ranks: int | None
    source: str


@cache
def shipped() -> tuple[Row, ...]:
    """Our own rows."""
    text = files("everstep.core").joinpath("data/floors.csv").read_text(encoding="utf-8")
    return tuple(
        Row(
            row["model"],
            Speed(row["speed"]),
            float(row["value"]),
            row["unit"],
            int(row["ranks"]) if row["ranks"] else None,
            row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    )


class ModelFloors(Record):
    """A user's floors for one model. `pattern` is searched in its name; the first row counts; 0 is no floor."""

    pattern: str
    source: str = ""
    bf16_tflops: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    fp16_tflops: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    fp32_tflops: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    memory_gb_per_second: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    h2d_gb_per_second: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    d2h_gb_per_second: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    all_reduce_gb_per_second: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{pattern!r} is no regular expression ({error}); give a part of the model's name"
            ) from None
        return pattern

    @property
    def values(self) -> dict[Speed, float]:
        """What this row says."""
        said = {speed: getattr(self, speed.value) for speed in Speed}
        return {speed: value for speed, value in said.items() if value is not None}


class Floors(Record):
    """The floors in force. What is not given is as we ship it.

    `peer_fraction` is the share of the median of its peers on the node below which a GPU fails, whatever its model;
    0 compares nobody. NVRx takes 0.75 for a straggler and Aegis 0.8 of operation times: ours is the laxer one.
    """

    peer_fraction: float = Field(default=0.7, ge=0, le=1, allow_inf_nan=False)
    models: tuple[ModelFloors, ...] = ()

    def of(self, model: str, ranks: int = 1) -> dict[Speed, float]:
        """The floors of a model by its name, for so many ranks together: a user's row first, then ours.

        A part of a GPU (MIG) has none: it is as fast as its share.
        """
        return dict(_of(model, ranks, self.models))


DEFAULT = Floors()


@lru_cache(maxsize=256)
def _of(model: str, ranks: int, rows: tuple[ModelFloors, ...]) -> tuple[tuple[Speed, float], ...]:
    if not model or re.search(r"\bMIG\b", model):
        return ()
    ours = {
        row.speed: row.value for row in reversed(shipped()) if _fits(row.model, model) and row.ranks in (None, ranks)
    }
    special = next((row.values for row in rows if _fits(row.pattern, model)), {})
    return tuple((speed, value) for speed, value in {**ours, **special}.items() if value > 0)


def _fits(pattern: str, model: str) -> bool:
    return re.search(pattern, model, re.IGNORECASE) is not None
