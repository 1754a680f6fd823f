"""Metrics for Prometheus: by HTTP, and as a file for the node exporter's textfile collector.

GPUs are labelled by UUID; `everstep_gpu_info` maps it to number, model and bus. What was not measured is absent, never 0.
Readings older than three periods are absent, too: a scrape never shows a monitor's last words as the present.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from everstep.core.gpu import SILENT_PERIODS, GpuSample, Sweep
from everstep.core.health import State
from everstep.core.host import HostSample
from everstep.core.judgement import NodeVerdict
from everstep.core.telemetry import host_row
from everstep.store import atomic

AT_LEAST_SECONDS = 10.0
MOST_XIDS = 500
"""Pairs of GPU and Xid that are counted each by itself; a node has a few."""


class Gauge(NamedTuple):
    """A metric of a GPU: its name, the reading, what to multiply it by, and what it is."""

    name: str
    reading: str
    factor: float
    help: str


GAUGES = (
    Gauge("utilization_ratio", "utilisation_percent", 0.01, "Share of time in which a kernel ran."),
    Gauge("memory_busy_ratio", "memory_busy_percent", 0.01, "Share of time in which memory was read or written."),
    Gauge("memory_total_bytes", "memory_total_bytes", 1, "Memory of the device."),
    Gauge("memory_used_bytes", "memory_used_bytes", 1, "Memory in use."),
    Gauge("temperature_celsius", "temperature_c", 1, "Temperature of the core."),
    Gauge("memory_temperature_celsius", "memory_temperature_c", 1, "Temperature of the memory."),
    Gauge("slowdown_celsius", "slowdown_limit_c", 1, "Temperature from which hardware slows the GPU down."),
    Gauge("headroom_celsius", "headroom_c", 1, "Degrees left to the maximum (T.Limit)."),
    Gauge("power_watts", "power_w", 1, "Power drawn."),
    Gauge("power_limit_watts", "power_limit_w", 1, "Limit in force."),
    Gauge("sm_clock_hertz", "sm_clock_mhz", 1e6, "Clock of the multiprocessors."),
    Gauge("memory_clock_hertz", "memory_clock_mhz", 1e6, "Clock of the memory."),
    Gauge("clock_event_reasons", "clock_reasons", 1, "Bits that say why clocks are held back."),
    Gauge("ecc_enabled", "ecc_enabled", 1, "1 with ECC."),
    Gauge("sram_threshold_exceeded", "sram_threshold_exceeded", 1, "1: the driver asks for a replacement."),
    Gauge("row_remap_pending", "remap_pending", 1, "1: a row is remapped at the next reset."),
    Gauge("row_remap_failed", "remap_failed", 1, "1: a row could not be remapped."),
    Gauge("pcie_width_lanes", "pcie_width", 1, "Lanes in use."),
    Gauge("pcie_generation", "pcie_generation", 1, "Generation in use."),
    Gauge("recovery_action", "recovery_action", 1, "The number of Xid 154; 0 is none."),
    Gauge("mig_enabled", "mig_enabled", 1, "1 in MIG mode."),
)
COUNTERS: tuple[tuple[str, dict[str, str], str], ...] = (
    ("ecc_errors", {"kind": "corrected", "scope": "volatile"}, "ecc_corrected_volatile"),
    ("ecc_errors", {"kind": "corrected", "scope": "aggregate"}, "ecc_corrected_aggregate"),
    ("ecc_errors", {"kind": "uncorrected", "scope": "volatile"}, "ecc_uncorrected_volatile"),
    ("ecc_errors", {"kind": "uncorrected", "scope": "aggregate"}, "ecc_uncorrected_aggregate"),
    ("remapped_rows", {"kind": "corrected"}, "remapped_corrected"),
    ("remapped_rows", {"kind": "uncorrected"}, "remapped_uncorrected"),
    ("retired_pages", {"kind": "single_bit"}, "retired_single_bit"),
    ("retired_pages", {"kind": "double_bit"}, "retired_double_bit"),
    ("pcie_replays", {}, "pcie_replays"),
)
COUNTED = {
    "ecc_errors": "Memory errors: volatile since the driver's start or a reset, aggregate in the device's life.",
    "remapped_rows": "Memory rows that were remapped.",
    "retired_pages": "Memory pages that were retired, before Ampere.",
    "pcie_replays": "Packets that PCIe repeated.",
}
LINK_ERRORS = ("replay_errors", "recovery_errors", "crc_errors", "effective_errors")
HOST_GAUGES = {
    "memory_available_bytes": ("memory_available_bytes", "The kernel's estimate of the memory that can be had."),
    "memory_pressure_percent": ("memory_pressure_60s", "Of a minute in which all tasks waited for memory (PSI full)."),
    "stuck_tasks": ("stuck_tasks", "Tasks in uninterruptible sleep."),
    "clock_offset_seconds": ("clock_offset_s", "By which the clock is off, as its daemon estimates."),
    "mounts_hung": ("mounts_hung", "Mounts that do not answer."),
    "nics_down": ("nics_down", "Network interfaces that are up and have no link."),
    "ports_down": ("ports_down", "Ports of InfiniBand or RoCE adapters that are not active."),
}
OWN = {
    "cpu_seconds_total": "Processor time of the monitor, without its probes.",
    "events_total": "Events that it has told.",
    "lost_rows_total": "Rows of telemetry that no disk has taken.",
    "lost_samples_total": "Samples that waited too long for the disk.",
    "lost_log_total": "Records and bytes of logs that came faster than they could be read.",
    "probe_restarts_total": "How often the probe of the GPUs was started anew.",
    "log_behind": "1: more of a log waits than may be read at once.",
    "logs_read": "1: logs and heartbeats are read.",
    "writes": "1: telemetry, ledger and textfile are written.",
}
"""The monitor's own figures, and what they are."""


@dataclass(frozen=True)
class Snapshot:
    """What the monitor knows at a moment; replaced whole, so that a scrape sees one state."""

    period: float = 1.0
    sweep: Sweep | None = None
    host: HostSample | None = None
    verdict: NodeVerdict | None = None
    xids: dict[tuple[str, int], int] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    """Figures of the monitor itself; names that end in `_total` are counters."""


class Exporter(Collector):
    """Shows the newest `Snapshot`. `show` may be called from any thread and costs nothing until somebody scrapes."""

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._shown = Snapshot()
        self._server: tuple[WSGIServer, Thread] | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def show(self, snapshot: Snapshot) -> None:
        self._shown = snapshot

    def serve(self, port: int, address: str = "127.0.0.1") -> int:
        """Answer scrapes at `http://address:port/metrics`; returns the port, a free one for 0.

        Raises ValueError where the port cannot be had.
        """
        try:
            self._server = start_http_server(port, address, self.registry)
        except OSError as error:
            raise ValueError(
                f"metrics_port: {port} on {address} cannot be had ({error.strerror}); give another one."
            ) from None
        return int(self._server[0].server_port)

    def write(self, path: Path) -> None:
        """Put the metrics into a file in one step. Raises OSError."""
        atomic.write(path, self.text(), sync=False)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(timeout=1.0)
            self._server = None

    def collect(self) -> Iterator[Metric]:
        shown = self._shown
        yield from _own(shown)
        yield from _xids(shown)
        old = max(AT_LEAST_SECONDS, SILENT_PERIODS * shown.period)
        if shown.sweep is not None and self._wall() - shown.sweep.time <= old:
            yield from _gpus(shown.sweep)
            if shown.verdict is not None:
                yield from _states(shown.verdict)
        if shown.host is not None and self._wall() - shown.host.time <= max(60.0, old):
            yield from _host(shown.host)


def _own(shown: Snapshot) -> Iterator[Metric]:
    up = GaugeMetricFamily("everstep_monitor_info", "The monitor.", labels=("node",))
    up.add_metric((shown.verdict.node if shown.verdict else os.uname().nodename,), 1)
    yield up
    for name, value in shown.own.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        yield kind(f"everstep_monitor_{name}", OWN.get(name, "Of the monitor itself."), value=value)
    if shown.sweep is not None:
        last = "everstep_monitor_last_sweep_timestamp_seconds"
        yield GaugeMetricFamily(last, "When GPUs were last sampled, Unix seconds.", value=shown.sweep.time)
        took = "everstep_monitor_sweep_seconds"
        yield GaugeMetricFamily(took, "How long that took.", value=shown.sweep.seconds)
        driver = GaugeMetricFamily("everstep_driver_info", "How the driver answers.", labels=("answer", "version"))
        driver.add_metric((shown.sweep.driver.value, shown.sweep.driver_version), 1)
        yield driver


def _xids(shown: Snapshot) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "everstep_gpu_xid", "Xid events of the driver since the monitor's start.", labels=("uuid", "xid"),
    )  # fmt: skip
    for (uuid, xid), count in sorted(shown.xids.items())[:MOST_XIDS]:
        family.add_metric((uuid, str(xid)), count)
    yield family


def _gpus(sweep: Sweep) -> Iterator[Metric]:
    info = GaugeMetricFamily("everstep_gpu_info", "Names of a GPU.", labels=("uuid", "gpu", "model", "bus"))
    answer = GaugeMetricFamily("everstep_gpu_answers", "1: it answers; 0: it does not.", labels=("uuid",))
    for one in sweep.gpus:
        info.add_metric((one.uuid, "" if one.index is None else str(one.index), one.model, one.bus), 1)
        answer.add_metric((one.uuid,), one.answer.value == "ok")
    yield info
    yield answer
    for gauge in GAUGES:
        family = GaugeMetricFamily(f"everstep_gpu_{gauge.name}", gauge.help, labels=("uuid",))
        for one in sweep.gpus:
            value = getattr(one, gauge.reading)
            if value is not None:
                family.add_metric((one.uuid,), value * gauge.factor)
        yield family
    yield from _counters(sweep)
    yield from _links(sweep.gpus)


def _counters(sweep: Sweep) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily] = {}
    for name, labels, reading in COUNTERS:
        said = COUNTED[name]
        family = families.setdefault(name, CounterMetricFamily(f"everstep_gpu_{name}", said, labels=("uuid", *labels)))
        for one in sweep.gpus:
            value = getattr(one, reading)
            if value is not None:
                family.add_metric((one.uuid, *labels.values()), value)
    yield from families.values()


def _links(gpus: tuple[GpuSample, ...]) -> Iterator[Metric]:
    active = GaugeMetricFamily("everstep_gpu_nvlinks_active", "NVLinks that are up.", labels=("uuid",))
    errors = CounterMetricFamily(
        "everstep_gpu_nvlink_errors", "Errors of all NVLinks of a GPU.", labels=("uuid", "kind")
    )
    for one in gpus:
        if one.links is None:
            continue
        active.add_metric((one.uuid,), sum(1 for link in one.links if link.active))
        for name in LINK_ERRORS:
            values = [value for link in one.links if (value := getattr(link, name)) is not None]
            if values:
                errors.add_metric((one.uuid, name), sum(values))
    yield active
    yield errors


def _states(verdict: NodeVerdict) -> Iterator[Metric]:
    node = GaugeMetricFamily("everstep_node_state", "1 for the state of the node.", labels=("state",))
    gpus = GaugeMetricFamily("everstep_gpu_state", "1 for the state of a GPU.", labels=("uuid", "state"))
    for state in State:
        node.add_metric((state.value,), verdict.verdict.state is state)
        for uuid, one in sorted(verdict.gpus.items()):
            gpus.add_metric((uuid, state.value), one.state is state)
    yield node
    yield gpus


def _host(host: HostSample) -> Iterator[Metric]:
    row = host_row(host)
    for name, (column, said) in HOST_GAUGES.items():
        if row[column] is not None:
            yield GaugeMetricFamily(f"everstep_node_{name}", said, value=row[column])
    used = GaugeMetricFamily("everstep_node_disk_used_ratio", "Share in use, as df counts.", labels=("mount",))
    for mount in host.mounts or ():
        if mount.used_percent is not None:
            used.add_metric((mount.path,), mount.used_percent / 100)
    yield used
