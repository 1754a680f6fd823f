"""Samples of a node of H100s that trains and is healthy; whatever a test names is otherwise."""

from everstep.core.gpu import Driver, GpuSample, NvLink, Sweep, XidEvent
from everstep.core.host import HostSample, Memory, Mount
from everstep.core.judgement import Evidence, Offence, judge

NOW = 1_000_000.0
LINKS = tuple(
    NvLink(number=number, active=True, replay_errors=0, recovery_errors=0, crc_errors=0) for number in range(18)
)
HEALTHY = {
    "model": "NVIDIA H100 80GB HBM3", "utilisation_percent": 97.0, "memory_total_bytes": 80 << 30,
    "memory_used_bytes": 60 << 30, "temperature_c": 55.0, "memory_temperature_c": 65.0, "slowdown_limit_c": 89.0,
    "shutdown_limit_c": 92.0, "memory_limit_c": 95.0, "power_w": 600.0, "power_limit_w": 700.0, "clock_reasons": 0,
    "ecc_enabled": True, "ecc_pending": True, "ecc_corrected_volatile": 3, "ecc_uncorrected_volatile": 0,
    "sram_threshold_exceeded": False, "remapped_uncorrected": 0, "remap_pending": False, "remap_failed": False,
    "pcie_replays": 0, "pcie_width": 16, "pcie_width_max": 16, "pcie_generation": 5, "pcie_generation_max": 5,
    "recovery_action": 0, "links": LINKS, "mig_enabled": False, "mig_pending": False,
}  # fmt: skip


def gpu(number=0, **readings) -> GpuSample:
    """A GPU by the number that it is named after."""
    names = {"time": NOW, "uuid": f"GPU-{number}", "index": number, "bus": f"00000000:{number + 1:02X}:00.0"}
    return GpuSample(**names | HEALTHY | readings)


def sweep(*gpus, time=NOW, **more) -> Sweep:
    dated = tuple(one.model_copy(update={"time": time}) for one in gpus)
    return Sweep(**{"time": time, "seconds": 0.01, "driver": Driver.present, "gpus": dated} | more)


def series(seconds, step=1.0, gpus=8, **of_time) -> tuple[Sweep, ...]:
    """Sweeps until now, one each `step` seconds; `of_time` gives readings of GPU 3 by seconds ago."""
    found = []
    for at in range(int(seconds / step) + 1):
        ago = seconds - at * step
        readings = {name: value(ago) for name, value in of_time.items()}
        found.append(sweep(*(gpu(index, **(readings if index == 3 else {})) for index in range(gpus)), time=NOW - ago))
    return tuple(found)


def host(**more) -> HostSample:
    mount = Mount(path="/data", kind="ext4", read_only=False, total_bytes=1000, free_bytes=600)
    values = {"time": NOW, "node": "n1", "seconds": 0.01, "mounts": (mount,), "memory": Memory(oom_kills=0)}
    return HostSample(**values | more)


def evidence(*sweeps, **more) -> Evidence:
    return Evidence(**{"now": NOW, "node": "n1", "sweeps": sweeps, "hosts": (host(),), "training": True} | more)


def one(**readings):
    """The verdict on a GPU with such readings at one moment."""
    return judge(evidence(sweep(gpu(**readings)))).gpus["GPU-0"]


def xid(number, ago=1.0, index=0) -> XidEvent:
    return XidEvent(time=NOW - ago, last=NOW - ago, uuid=f"GPU-{index}", xid=number, index=index)


def past(number, ago, part="", index=0, job="") -> Offence:
    return Offence(time=NOW - ago, node="n1", uuid=f"GPU-{index}", cause=f"xid-{number}", part=part, job=job)


def remedy(action, ago, index=None) -> Offence:
    return Offence(time=NOW - ago, node="n1", uuid="" if index is None else f"GPU-{index}", remedy=action)
