"""A sweep and a sample of a host as rows of tables: flat, one value a column, absent where nothing was measured. Pure."""

from collections.abc import Iterator
from typing import Any

from everstep.core.gpu import READINGS, GpuSample, Sweep
from everstep.core.host import HostSample

_GROUPED = ("links", "processes", "instances")
_LINK_COUNTERS = ("replay_errors", "recovery_errors", "crc_errors", "effective_errors")
_KINDS = {"float": "float", "int": "int", "bool": "bool"}


def _kind(name: str) -> str:
    """The kind of a reading by its annotation, such as `float | None`."""
    text = str(GpuSample.model_fields[name].annotation)
    return next(kind for word, kind in _KINDS.items() if word in text)


GPU_COLUMNS: dict[str, str] = {
    "time": "time",
    "node": "text",
    "uuid": "text",
    "index": "int",
    "model": "text",
    "answer": "text",
    "silent_s": "float",
    **{name: _kind(name) for name in READINGS if name not in _GROUPED},
    "links_active": "int",
    "links_down": "int",
    **{f"link_{name}": "int" for name in _LINK_COUNTERS},
    "processes": "int",
    "instances": "int",
}
"""One row for a GPU and a moment. Units as in `GpuSample`; link counters are sums over the links."""

HOST_COLUMNS: dict[str, str] = {
    "time": "time",
    "node": "text",
    "seconds": "float",
    "uptime_s": "float",
    "memory_total_bytes": "int",
    "memory_available_bytes": "int",
    "oom_kills": "int",
    "memory_pressure_60s": "float",
    "io_pressure_60s": "float",
    "stuck_tasks": "int",
    "clock_offset_s": "float",
    "fullest_mount": "text",
    "fullest_percent": "float",
    "mounts_hung": "int",
    "mounts_read_only": "int",
    "nics_up": "int",
    "nics_down": "int",
    "ports_active": "int",
    "ports_down": "int",
    "unanswered": "text",
}
"""One row for a node and a moment. Pressure: percent of a minute in which all tasks waited."""


def gpu_rows(sweep: Sweep, node: str) -> Iterator[dict[str, Any]]:
    """A row for each GPU of a sweep."""
    for one in sweep.gpus:
        links = one.links
        row: dict[str, Any] = {
            "time": one.time,
            "node": node,
            "uuid": one.uuid,
            "index": one.index,
            "model": one.model,
            "answer": one.answer.value,
            "silent_s": one.silent_s,
            **{name: getattr(one, name) for name in READINGS if name not in _GROUPED},
            "links_active": None if links is None else sum(1 for link in links if link.active),
            "links_down": None if links is None else len(one.links_down),
            "processes": None if one.processes is None else len(one.processes),
            "instances": None if one.instances is None else len(one.instances),
        }
        for name in _LINK_COUNTERS:
            values = [value for link in links or () if (value := getattr(link, name)) is not None]
            row[f"link_{name}"] = sum(values) if values else None
        yield row


def host_row(one: HostSample) -> dict[str, Any]:
    """The row of a node."""
    memory = one.memory
    mounts = {mount.path: mount.used_percent for mount in one.mounts or () if mount.used_percent is not None}
    fullest = max(mounts, key=lambda path: mounts[path] or 0.0, default=None)
    pressure = memory.pressure if memory else None
    io_pressure = memory.io_pressure if memory else None
    return {
        "time": one.time,
        "node": one.node,
        "seconds": one.seconds,
        "uptime_s": one.uptime_s,
        "memory_total_bytes": memory.total_bytes if memory else None,
        "memory_available_bytes": memory.available_bytes if memory else None,
        "oom_kills": memory.oom_kills if memory else None,
        "memory_pressure_60s": pressure.full_60s if pressure else None,
        "io_pressure_60s": io_pressure.full_60s if io_pressure else None,
        "stuck_tasks": None if one.stuck is None else len(one.stuck),
        "clock_offset_s": one.clock.offset_s if one.clock else None,
        "fullest_mount": fullest,
        "fullest_percent": mounts[fullest] if fullest else None,
        "mounts_hung": None if one.mounts is None else sum(1 for mount in one.mounts if mount.looked.value == "hung"),
        "mounts_read_only": None if one.mounts is None else sum(1 for mount in one.mounts if mount.read_only),
        "nics_up": None if one.nics is None else sum(1 for nic in one.nics if nic.carrier),
        "nics_down": None if one.nics is None else sum(1 for nic in one.nics if nic.up and nic.carrier is False),
        "ports_active": None if one.ports is None else sum(1 for port in one.ports if port.state == "ACTIVE"),
        "ports_down": None if one.ports is None else sum(1 for port in one.ports if port.state not in ("", "ACTIVE")),
        "unanswered": ", ".join(one.unanswered),
    }
