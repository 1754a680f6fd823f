"""Thresholds of the health judgement, each with its source. A user's own values replace single ones."""

import csv
import re
from functools import cache
from importlib.resources import files
from typing import Self

from pydantic import Field, field_validator, model_validator

from everstep.core.gpu import READINGS
from everstep.core.record import Record


class ModelLimits(Record):
    """What holds for one model of GPU. `pattern` is searched in the name that the driver gives; the first row counts."""

    pattern: str
    alarm_c: float | None = None
    remapped_rows: int | None = None
    links: int | None = Field(default=None, description="NVLinks that are active on a healthy one in its usual board")
    source: str = ""

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


class HealthPolicy(Record):
    """When a signal is noted, when it makes a GPU or node suspect, and when failed. Temperatures in degrees Celsius."""

    failed_after_seconds: float = Field(60.0, description="without an answer; see core.gpu")
    logged_c: float = Field(80.0, description="A100 fleets: P99.9 of the core is 71 to 72, the highest 80 (Acme)")
    throttle_onset_c: float = Field(83.0, description="where clocks of H100 and A100 begin to be held back")
    alarm_c: float = Field(85.0, description="or the driver's slowdown limit, whichever comes first")
    corrected_errors: int = Field(20_000_000, description="Azure NHC, azure_gpu_ecc.nhc, DRAM")
    remapped_rows: int = Field(512, description="spare rows of an H100; Azure NHC and NCSA Delta")
    retired_pages: int = Field(10, description="Meta GCM")
    retired_pages_failed: int = Field(62, description="Azure NHC, with a page pending")
    slowdown_seconds: float = Field(600.0, description="gpud, hw-slowdown: ten minutes of clocks held back")
    replays_per_minute: float = Field(60.0, description="no public number; of our own")
    link_errors_per_minute: float = Field(60.0, description="no public number; of our own")
    idle_seconds: float = Field(120.0, description="utilisation 0 for so long while a training should compute")
    busy_percent: float = Field(80.0, description="below it for `low_seconds` in training is low")
    low_seconds: float = 600.0
    peer_fraction: float = Field(0.5, description="of its peers' utilisation; one at 30 % beside 95 % is far below")
    peer_seconds: float = 60.0
    memory_kept: float = Field(0.5, description="memory in use that falls below this share of what it was")
    disk_percent: float = Field(95.0, description="Imbue: a disk that is so full fails")
    memory_pressure_percent: float = Field(20.0, description="of a minute in which all tasks waited (PSI); of our own")
    stuck_seconds: float = Field(300.0, description="D state; Meta GCM")
    clock_warn_s: float = Field(0.05, description="EROICA: 10 ms already spoil a comparison of events")
    clock_fail_s: float = 0.5
    port_errors_per_second: float = Field(10.0, description="NVSentinel, link-counter-detection: symbol errors")
    burst_seconds: float = Field(180.0, description="NVSentinel: quiet that ends a burst")
    echo_seconds: float = Field(5.0, description="NCSA Delta (arXiv 2503.11901): identical errors are one")
    repeat_seconds: float = Field(86_400.0, description="NVSentinel: Xid 13 on one TPC, 31 on one GPU, twice: hardware")
    repeats: int = 2
    fatal_bursts: int = Field(5, description="NVSentinel: so many bursts of a fatal Xid on one GPU in a day")
    reboots: int = Field(2, description="gpud: an Xid that is back after so many reboots is a replacement")
    lemon_remedies: int = Field(5, description="NVSentinel: so many remedies on a node in seven days")
    lemon_seconds: float = 7 * 86_400.0
    models: tuple[ModelLimits, ...] = ()
    required: tuple[str, ...] = Field(default=(), description="readings without which a GPU is unknown, not healthy")

    @model_validator(mode="after")
    def _is_sensible(self) -> Self:
        if unknown := sorted(set(self.required) - set(READINGS)):
            raise ValueError(f"required: {unknown[0]} is no reading; there are {', '.join(READINGS)}")
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; give a number above 0")
        return self

    def of(self, model: str) -> ModelLimits:
        """The row of a model: the user's own, then ours, then an empty one."""
        for row in (*self.models, *_ours()):
            if re.search(row.pattern, model, re.IGNORECASE):
                return row
        return ModelLimits(pattern="")


DEFAULT = HealthPolicy()


@cache
def _ours() -> tuple[ModelLimits, ...]:
    text = files("everstep.core").joinpath("data/health_models.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple(ModelLimits.model_validate({key: value for key, value in row.items() if value}) for row in rows)
