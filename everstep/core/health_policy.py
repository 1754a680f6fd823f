"""When a signal is noted, when it makes a GPU or node suspect, and when failed: thresholds, by model of GPU.

The defaults are data, `core/data/health_policy.csv`, each with its unit and source. A user's own values go before them; a row
for a model before what holds for all.
"""

import csv
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from everstep.core.gpu import READINGS
from everstep.core.log_rules import Override
from everstep.core.record import Record


class Row(NamedTuple):
    """A threshold as we ship it. `model` is a pattern in the driver's name of a GPU; empty: all models."""

    name: str
    model: str
    value: float
    unit: str
    source: str


@cache
def shipped() -> tuple[Row, ...]:
    """Our own rows."""
    text = files("everstep.core").joinpath("data/health_policy.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple(Row(row["name"], row["model"], float(row["value"]), row["unit"], row["source"]) for row in rows)


@cache
def _defaults() -> Mapping[str, float]:
    return {row.name: row.value for row in shipped() if not row.model}


def _shipped(name: str) -> Any:
    return Field(default_factory=lambda: _defaults()[name], ge=0, allow_inf_nan=False)


class Limits(Record):
    """The thresholds that hold for one model of GPU, and for its node. Units and sources: docs/health.md."""

    failed_after_seconds: float = _shipped("failed_after_seconds")
    silent_periods: float = _shipped("silent_periods")
    silent_seconds: float = _shipped("silent_seconds")
    gap_seconds: float = _shipped("gap_seconds")
    logged_c: float = _shipped("logged_c")
    throttle_onset_c: float = _shipped("throttle_onset_c")
    alarm_c: float = _shipped("alarm_c")
    corrected_errors: float = _shipped("corrected_errors")
    remapped_rows: float = _shipped("remapped_rows")
    retired_pages: float = _shipped("retired_pages")
    retired_pages_failed: float = _shipped("retired_pages_failed")
    held_back_seconds: float = _shipped("held_back_seconds")
    replays_per_minute: float = _shipped("replays_per_minute")
    link_errors_per_minute: float = _shipped("link_errors_per_minute")
    nvlinks: float = _shipped("nvlinks")
    idle_seconds: float = _shipped("idle_seconds")
    busy_percent: float = _shipped("busy_percent")
    low_seconds: float = _shipped("low_seconds")
    peer_fraction: float = _shipped("peer_fraction")
    peer_seconds: float = _shipped("peer_seconds")
    memory_kept: float = _shipped("memory_kept")
    memory_seconds: float = _shipped("memory_seconds")
    disk_percent: float = _shipped("disk_percent")
    files_percent: float = _shipped("files_percent")
    memory_pressure_percent: float = _shipped("memory_pressure_percent")
    memory_available_percent: float = _shipped("memory_available_percent")
    stuck_seconds: float = _shipped("stuck_seconds")
    clock_warn_s: float = _shipped("clock_warn_s")
    clock_fail_s: float = _shipped("clock_fail_s")
    port_down_seconds: float = _shipped("port_down_seconds")
    carrier_changes: float = _shipped("carrier_changes")
    port_errors_per_second: float = _shipped("port_errors_per_second")
    port_discards_per_second: float = _shipped("port_discards_per_second")
    port_timeouts_per_second: float = _shipped("port_timeouts_per_second")
    port_recoveries_per_minute: float = _shipped("port_recoveries_per_minute")
    burst_seconds: float = _shipped("burst_seconds")
    echo_seconds: float = _shipped("echo_seconds")
    fault_seconds: float = _shipped("fault_seconds")
    passing_seconds: float = _shipped("passing_seconds")
    repeat_seconds: float = _shipped("repeat_seconds")
    repeats: float = _shipped("repeats")
    jobs: float = _shipped("jobs")
    fatal_bursts: float = _shipped("fatal_bursts")
    reboots: float = _shipped("reboots")
    return_seconds: float = _shipped("return_seconds")
    link_repeats: float = _shipped("link_repeats")
    lemon_remedies: float = _shipped("lemon_remedies")
    lemon_seconds: float = _shipped("lemon_seconds")
    lemon_window_seconds: float = _shipped("lemon_window_seconds")
    lemon_signals: float = _shipped("lemon_signals")
    lemon_xids: float = _shipped("lemon_xids")
    lemon_faults: float = _shipped("lemon_faults")
    lemon_outages: float = _shipped("lemon_outages")

    @property
    def longest_seconds(self) -> float:
        """How far back samples have to reach so that every duration can be proven."""
        return max(self.held_back_seconds, self.low_seconds, self.idle_seconds, self.port_down_seconds)


class ModelLimits(Record):
    """What differs for one model. `pattern` is searched in the name that the driver gives; the first row counts."""

    pattern: str
    source: str = ""
    logged_c: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    throttle_onset_c: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    alarm_c: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    corrected_errors: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    remapped_rows: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    retired_pages: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    retired_pages_failed: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    held_back_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    replays_per_minute: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    link_errors_per_minute: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    nvlinks: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    idle_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    busy_percent: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    low_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    peer_fraction: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    peer_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    memory_kept: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    memory_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)

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
    def values(self) -> Mapping[str, float]:
        """What this row says."""
        said = {name: getattr(self, name) for name in type(self).model_fields if name not in ("pattern", "source")}
        return {name: value for name, value in said.items() if value is not None}


class HealthPolicy(Limits):
    """The thresholds for all models, rows for single ones, and rules. What is not given is as we ship it.

    `required` are readings without which a GPU is unknown, not healthy; `xids` are rows in place of the catalogue's, as in
    docs/logs.md.
    """

    models: tuple[ModelLimits, ...] = ()
    required: tuple[str, ...] = ()
    xids: dict[int, Override] = {}

    @model_validator(mode="after")
    def _asks_for_known_readings(self) -> Self:
        if unknown := sorted(set(self.required) - set(READINGS)):
            raise ValueError(f"required: {unknown[0]} is no reading; there are {', '.join(READINGS)}")
        return self

    def of(self, model: str = "") -> Limits:
        """The thresholds for a model, by the name that the driver gives it; without a name those for all.

        In this order: a user's row for the model, a user's value for all, our row for the model, ours for all.
        """
        own = {name: getattr(self, name) for name in self.model_fields_set & Limits.model_fields.keys()}
        return _of(model, tuple(sorted(own.items())), self.models)


DEFAULT = HealthPolicy()


@lru_cache(maxsize=256)
def _of(model: str, own: tuple[tuple[str, float], ...], rows: tuple[ModelLimits, ...]) -> Limits:
    ours = {row.name: row.value for row in reversed(shipped()) if row.model and _fits(row.model, model)}
    special = next((row.values for row in rows if _fits(row.pattern, model)), {})
    return Limits.model_validate({**ours, **dict(own), **special})


def _fits(pattern: str, model: str) -> bool:
    return bool(model) and re.search(pattern, model, re.IGNORECASE) is not None
