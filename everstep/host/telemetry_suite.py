"""The Great Expectations suite for the telemetry of a segment, in a process of its own:
`python -m everstep.host.telemetry_suite <folder>`.

Reads `frame.parquet` and `task.json` in the folder, writes `report.json`. Columns that no GPU here offers are not expected
to hold anything: each expectation on them is not measured.
"""

import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from everstep.core.check import Check, GateReport, failed, not_measured, passed
from everstep.core.gate import Finding, GateResult
from everstep.core.record import Versioned
from everstep.host import expectations
from everstep.host.expectations import ADDRESSES, MEMORY
from everstep.host.suites import Subject
from everstep.store import atomic, faults

FRAME, TASK, REPORT = "frame.parquet", "task.json", "report.json"
ABOUT = "telemetry"

ROWS_SHARE = 0.5
"""Samples are missing where fewer than half of those came that the period promises: a starved probe is no sick GPU."""

ANSWERED_SHARE = 0.98
THROTTLED_SHARE = 0.1
"""Azure's node checks only warn of power caps; a slowdown by the hardware for a tenth of a segment is none of those."""

_HELD_BACK = 0x8 | 0x40 | 0x80  # hardware slowdown, hardware thermal, power brake: nvmlClocksEventReasons


class TelemetryTask(Versioned):
    """What the telemetry is to be held against. `hottest_c` is the policy's alarm, `seconds` how long the segment took."""

    step: int | None = None
    segment: int | None = None
    uuids: tuple[str, ...]
    period: float = Field(gt=0)
    span: float = Field(ge=0)
    hottest_c: float
    seconds: float = Field(120.0, gt=0)


def main(folder: Path) -> None:
    """Judge the frame in a folder; see the module."""
    began = time.time()
    task = TelemetryTask.parse((folder / TASK).read_bytes(), str(folder), TASK)
    signal.alarm(int(task.seconds) + 30)  # whoever waits for us has given up by then
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    faults.point("gate.telemetry")
    import pandas as pd

    report = judge(task, pd.read_parquet(folder / FRAME))
    told = report.model_copy(update={"time": began, "seconds": round(time.time() - began, 3)})
    atomic.write(folder / REPORT, told.to_json().encode())


def judge(task: TelemetryTask, frame: Any) -> GateReport:
    """Hold the rows of a segment against what is expected of them, one check for each expectation."""
    found = derived(frame)
    wanted = list(expected(task))
    measured = [one for one in wanted if _is_measured(found, one)]
    blank = GateResult(key=ABOUT, dataset=ABOUT, suite=ABOUT)
    result, _ = expectations.validate(blank, [Subject(ABOUT, found, measured)], None)
    checks = [_check(one, result.findings, found, is_measured=one in measured) for one in wanted]
    if result.trouble:
        checks = [not_measured(ABOUT, "the suite can be evaluated", result.trouble)]
    return GateReport(gate=ABOUT, time=0.0, step=task.step, segment=task.segment, checks=tuple(checks))


def derived(frame: Any) -> Any:
    """The frame with what is judged over a whole segment: growth of counters, shares of bits, the distance to limits."""
    found = frame.copy()
    by_gpu = found.groupby("uuid")
    for name in ("ecc_uncorrected_volatile", "remapped_uncorrected", "link_recovery_errors"):
        found[f"{name}_growth"] = found[name] - by_gpu[name].transform("min")
    found["held_back"] = found["clock_reasons"].map(lambda bits: bool(int(bits) & _HELD_BACK), na_action="ignore")
    found["held_back"] = found["held_back"].astype("float64")
    found["memory_used_share"] = found["memory_used_bytes"] / found["memory_total_bytes"]
    found["power_share"] = found["power_w"] / found["power_limit_w"]
    return found


def expected(task: TelemetryTask) -> Sequence[Any]:
    """The suite. Each expectation's `wanted` is its rule, its `name` that of the check."""
    import great_expectations.expectations as gxe

    def says(name: str, rule: str, remedy: str) -> dict[str, str]:
        return {"name": name, "wanted": rule, "remedy": remedy}

    least = int(ROWS_SHARE * task.span / task.period) * len(task.uuids)
    look = "look at the GPU: python -m everstep.host.check"

    def between(name: str, column: str, low: float | None, high: float, rule: str, **more: Any) -> Any:
        return gxe.ExpectColumnValuesToBeBetween(
            column=column, min_value=low, max_value=high, meta=says(name, rule, look), **more
        )

    return [
        gxe.ExpectTableRowCountToBeBetween(
            min_value=max(1, least),
            meta=says("rows", f"at least half of the samples of {task.span:.0f} s came", "see why the sampler is starved"),
        ),
        gxe.ExpectColumnValuesToNotBeNull(column="time", meta=says("time", "every row has its time", look)),
        gxe.ExpectColumnValuesToBeInSet(
            column="uuid", value_set=list(task.uuids), meta=says("uuid", "rows of the GPUs that the run uses", look)
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="answer",
            value_set=["ok"],
            mostly=ANSWERED_SHARE,
            meta=says("answer", "98 of 100 times the GPU answers", look),
        ),
        between("temperature", "temperature_c", 0, task.hottest_c, f"below {task.hottest_c:g} C in 95 of 100 samples", mostly=0.95),
        between("utilisation", "utilisation_percent", 0, 100, "a percentage"),
        between("memory", "memory_used_share", 0, 1, "no more memory in use than there is"),
        between("power", "power_share", 0, 1.2, "no more than 1.2 times the limit in 95 of 100 samples", mostly=0.95),
        between("ecc", "ecc_uncorrected_volatile_growth", 0, 0, "no uncorrectable error in the segment"),
        between("remapped rows", "remapped_uncorrected_growth", 0, 0, "no row remapped for an uncorrectable error"),
        between("nvlink", "link_recovery_errors_growth", 0, 0, "no link had to recover"),
        gxe.ExpectColumnMeanToBeBetween(
            column="held_back",
            max_value=THROTTLED_SHARE,
            meta=says("clocks", "the hardware holds the clocks back for a tenth of the segment at most", look),
        ),
    ]  # fmt: skip


def _is_measured(frame: Any, expectation: Any) -> bool:
    column = getattr(expectation, "column", None)
    return column is None or bool(frame[column].notna().any())


def _check(expectation: Any, findings: Sequence[Finding], frame: Any, *, is_measured: bool) -> Check:
    name, rule = str(expectation.meta["name"]), str(expectation.meta["wanted"])
    column = str(getattr(expectation, "column", "") or "")
    if not is_measured:
        return not_measured(name, rule, f"no GPU here tells its {column}")
    figures: dict[str, Any] = {"rows": len(frame)}
    if column and frame[column].dtype.kind in "fiu":
        figures |= {"least": float(frame[column].min()), "greatest": float(frame[column].max())}
    kind = type(expectation)
    wrong = [one for one in findings if one.column == column and _same(one.expectation, kind.__name__)]
    if not wrong:
        return passed(name, rule, **figures)
    if not wrong[0].evaluated:
        return not_measured(name, rule, wrong[0].value, **figures)
    return failed(name, rule, f"{wrong[0].value}; {wrong[0].remedy}", **figures)


def _same(snake: str, camel: str) -> bool:
    """Whether `expect_column_values_to_be_between` is `ExpectColumnValuesToBeBetween`."""
    return snake.replace("_", "") == camel.lower()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
