"""The lone check of this machine: `python -m everstep.host.check`. What its GPUs and the node say now, and what to do.

It watches for a few seconds, so it sees what a moment shows; what shows only over minutes of training it cannot see. With
`--active` it then puts all GPUs to the test, or the CPU where there is none. Exit code 0: healthy; 1: suspect or failed; 3:
nobody can say (no GPU, no driver, no answer); 2: the command is wrong.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from everstep.core.check import GateReport, Outcome
from everstep.core.exam import CPU
from everstep.core.floors import DEFAULT as FLOORS
from everstep.core.gpu import Answer, Driver, GpuSample, Sweep, XidEvent
from everstep.core.health import State, Verdict
from everstep.core.health_policy import DEFAULT, HealthPolicy
from everstep.core.judgement import Evidence, NodeVerdict, judge
from everstep.core.logs import classify_log
from everstep.host.active_gate import ActiveGate
from everstep.host.floors import load_floors
from everstep.host.gpus import GpuSampler
from everstep.host.health_policy import load_policy
from everstep.host.host_signals import HostSampler

EXITS = {State.healthy: 0, State.suspect: 1, State.failed: 1, State.unknown: 3}
PERIOD = 1.0
COLUMNS = ("GPU", "model", "state", "busy", "memory", "temp", "power", "PCIe", "NVLink", "ECC")


def look(
    seconds: float, expected: int | None = None, log: str = "", policy: HealthPolicy = DEFAULT
) -> tuple[NodeVerdict, Sweep]:
    """Watch this machine for so many seconds and judge it; the verdict, and the last sweep. `log` is a kernel log's text."""
    sweeps: list[Sweep] = []
    xids: list[XidEvent] = []
    with GpuSampler() as gpus, HostSampler() as host:
        hosts = [host.sample()]
        sweeps.append(gpus.start())
        until = time.monotonic() + seconds
        while sweeps[-1].driver is Driver.present and time.monotonic() < until:
            xids += gpus.wait(min(PERIOD, max(0.0, until - time.monotonic())))
            sweeps.append(gpus.sweep())
        hosts.append(host.sample())
    evidence = Evidence(
        now=time.time(),
        node=os.uname().nodename,
        sweeps=tuple(sweeps),
        hosts=tuple(hosts),
        xids=tuple(xids),
        findings=tuple(classify_log(log)),
        gpus_expected=expected,
    )
    return judge(evidence, policy), sweeps[-1]


def table(found: NodeVerdict, sweep: Sweep) -> str:
    """The machine as a table, then what is wrong and what to do."""
    if not sweep.gpus:
        return f"{found.node}: {'; '.join(found.verdict.reasons)}. {_what_to_do(found.verdict)}\n"
    rows = [COLUMNS, *(_row(one, found.gpus[one.uuid]) for one in sweep.gpus if one.uuid in found.gpus)]
    lines = _aligned(rows)
    lines += [
        "",
        f"{found.node} is {found.verdict.state.value}, driver {sweep.driver_version or 'of unknown version'}.",
    ]
    lines += [f"  {reason}" for reason in found.verdict.reasons]
    for uuid, one in found.gpus.items():
        lines += [f"  {uuid}: {reason}" for reason in one.reasons[1 if one.state is not State.healthy else 0 :]]
    missing = sorted({name for names in found.not_measured.values() for name in names})
    if missing:
        lines.append(f"Not measured here: {', '.join(missing)}.")
    return "\n".join([*lines, _what_to_do(found.verdict), ""])


def devices(sweep: Sweep) -> list[str]:
    """What there is to test: the GPUs that answer, and of those that MIG splits their parts. Without GPUs: the CPU."""
    found: list[str] = []
    for one in sweep.gpus:
        if one.answer is Answer.ok:
            found += [part.uuid for part in one.instances or ()] if one.mig_enabled else [one.uuid]
    return found if sweep.gpus else [CPU] * min(2, os.cpu_count() or 1)


def active_table(report: GateReport, sweep: Sweep) -> str:
    """What the active test says, check by check."""
    tested = devices(sweep)
    names = {one.uuid: f"GPU {one.index}" for one in sweep.gpus if one.index is not None}
    where = "the CPU, as there is no GPU" if CPU in tested else f"{len(tested)} GPUs"
    rows = [("check", "says", "because")]
    for one in report.checks:
        name = one.name
        for uuid, short in names.items():
            name = name.replace(uuid, short)
        rows.append((name, one.outcome.value, one.why or one.rule))
    lines = [f"Active test of {where}, {report.seconds:.0f} s: {report.outcome.value}.", "", *_aligned(rows), ""]
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _what_to_do(verdict: Verdict) -> str:
    said = verdict.action.advice if verdict.state is not State.healthy else "nothing needs to be done"
    return f"What to do: {said}."


def _row(one: GpuSample, verdict: Verdict) -> tuple[str, ...]:
    links = [link for link in one.links or () if link.active is not None]
    return (
        "?" if one.index is None else str(one.index),
        one.model or one.uuid,
        verdict.state.value,
        _with(one.utilisation_percent, " %"),
        _of(one.memory_used_bytes, one.memory_total_bytes),
        _with(one.temperature_c, " C"),
        _with(one.power_w, " W"),
        f"gen {one.pcie_generation} x{one.pcie_width}" if one.pcie_generation and one.pcie_width else "-",
        f"{sum(1 for link in links if link.active)}/{len(links)}" if links else "-",
        _with(one.ecc_uncorrected_volatile, " uncorrected"),
    )


def _with(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.0f}{unit}"


def _of(used: int | None, total: int | None) -> str:
    return "-" if used is None or total is None else f"{used / 1e9:.0f}/{total / 1e9:.0f} GB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m everstep.host.check", description="Is this machine healthy?")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to watch; 5 if not given")
    parser.add_argument("--gpus", type=int, help="how many GPUs there should be")
    parser.add_argument("--log", type=Path, help="a kernel log to read, such as the output of dmesg")
    parser.add_argument("--policy", type=Path, help="a YAML file with thresholds of your own")
    parser.add_argument("--json", action="store_true", help="the verdict as JSON")
    parser.add_argument(
        "--active", action="store_true", help="put the GPUs to the test too, or the CPU if there is none"
    )
    parser.add_argument("--active-seconds", type=float, default=20.0, help="what that test may take; 20 if not given")
    parser.add_argument("--floors", type=Path, help="a YAML file with floors of your own for it")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The command line; returns its exit code."""
    parser = _parser()
    given = parser.parse_args(list(arguments))
    if not 0 <= given.seconds <= 3600:
        parser.error(f"--seconds: {given.seconds} is not between 0 and 3600")
    if not 1 <= given.active_seconds <= 3600:
        parser.error(f"--active-seconds: {given.active_seconds} is not between 1 and 3600")
    try:
        log = given.log.read_text(errors="replace") if given.log else ""
        policy = load_policy(given.policy) if given.policy else DEFAULT
    except OSError as error:
        parser.error(f"--log: {given.log} cannot be read: {error.strerror}")
    except ValueError as error:
        parser.error(f"--policy: {error}")
    try:
        floors = load_floors(given.floors) if given.floors else FLOORS
    except ValueError as error:
        parser.error(f"--floors: {error}")
    found, sweep = look(given.seconds, given.gpus, log, policy)
    tested = devices(sweep) if given.active else []
    if not given.json:
        sys.stdout.write(table(found, sweep))
        sys.stdout.flush()
    report = ActiveGate(floors=floors).run(tested, seconds=given.active_seconds) if tested else None
    if given.json:
        sys.stdout.write(_json(found, report))
    elif given.active:
        said = active_table(report, sweep) if report else "No GPU answers, so none was put to the test.\n"
        sys.stdout.write("\n" + said)
    return 1 if report is not None and report.outcome is Outcome.failed else EXITS[found.verdict.state]


def _json(found: NodeVerdict, report: GateReport | None) -> str:
    said = found.model_dump(mode="json")
    if report is not None:
        said["active"] = report.model_dump(mode="json") | {"outcome": report.outcome.value}
    return json.dumps(said, indent=1) + "\n"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
