"""What the samples of a node say, apart from its GPUs. Pure.

What was not measured is no evidence. What was never up, or always read-only, may be meant so: it counts once it changes.
"""

from collections.abc import Iterator, Sequence

from everstep.core.concern import Concern, failed, note, suspect
from everstep.core.health import Action, Severity
from everstep.core.health_policy import HealthPolicy, Limits
from everstep.core.host import HostSample, IbPort, Looked, Mount, Nic, StuckTask
from everstep.core.judging_series import growth, holds_for, rate

Samples = Sequence[HostSample]
"""Of one node, oldest first; at least one."""

_OF_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"})
"""File systems that the kernel makes read-only when their disk fails."""

_ANY = ("link_downed", "local_link_integrity_errors", "excessive_buffer_overrun_errors", "rnr_nak_retry_err")
"""Counters of a port of which any growth is a fault (NVSentinel, link-counter-detection)."""

_RATED: dict[str, tuple[str, float]] = {
    "symbol_error": ("port_errors_per_second", 1.0),
    "port_rcv_errors": ("port_errors_per_second", 1.0),
    "roce_slow_restart": ("port_errors_per_second", 1.0),
    "port_xmit_discards": ("port_discards_per_second", 1.0),
    "local_ack_timeout_err": ("port_timeouts_per_second", 1.0),
    "link_error_recovery": ("port_recoveries_per_minute", 60.0),
}
"""Counters of a port that are a fault above a rate: the threshold, and the seconds it counts (same source)."""


def judge(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    """All that speaks against the node."""
    limits = policy.of()
    yield from _mounts(samples, limits)
    yield from _memory(samples, limits)
    for task in samples[-1].stuck or ():
        yield from _stuck(task, limits)
    yield from _clock(samples[-1], limits)
    for nic in samples[-1].nics or ():
        yield from _nic(nic, samples, limits)
    for port in samples[-1].ports or ():
        yield from _port(port, samples, limits)


def _mounts(samples: Samples, limits: Limits) -> Iterator[Concern]:
    written = {mount.path for one in samples[:-1] for mount in one.mounts or () if mount.read_only is False}
    for mount in samples[-1].mounts or ():
        if mount.looked is not Looked.ok:
            why = mount.why or ("does not answer" if mount.looked is Looked.hung else "cannot be read")
            yield suspect(f"{mount.path}: {why}", Action.check_storage, Severity.high)
        turned = mount.read_only and mount.path in written
        if turned:
            yield suspect(f"{mount.path} has become read-only", Action.remount_then_restart, Severity.high)
        elif mount.read_only and mount.kind in _OF_DISKS:
            yield note(f"{mount.path} is mounted read-only")
        if turned or not mount.read_only:
            yield from _room(mount, limits)


def _room(mount: Mount, limits: Limits) -> Iterator[Concern]:
    used = mount.used_percent
    if used is not None and used >= limits.disk_percent:
        yield suspect(f"{mount.path} is full to {used:.0f} %", Action.free_space)
    if mount.files_total and mount.files_free is not None:
        files = 100 * (1 - mount.files_free / mount.files_total)
        if files >= limits.files_percent:
            yield suspect(f"{mount.path} has {mount.files_free:,} files left to give", Action.free_space)


def _memory(samples: Samples, limits: Limits) -> Iterator[Concern]:
    memory = samples[-1].memory
    if memory is None:
        return
    waited = memory.pressure.full_60s if memory.pressure else None
    if waited is not None and waited >= limits.memory_pressure_percent:
        yield suspect(f"all tasks waited for memory in {waited:.0f} % of a minute", Action.fix_app, Severity.high)
    if memory.total_bytes and memory.available_bytes is not None:
        free = 100 * memory.available_bytes / memory.total_bytes
        if free <= limits.memory_available_percent:
            yield suspect(f"{free:.1f} % of its memory can still be had", Action.fix_app, Severity.high)
    kills, _ = growth([(one.time, one.memory.oom_kills if one.memory else None) for one in samples])
    if kills:
        yield note(f"the kernel has killed {kills} processes for want of memory")


def _stuck(task: StuckTask, limits: Limits) -> Iterator[Concern]:
    if task.seconds < limits.stuck_seconds:
        return
    why = f"{task.name} (pid {task.pid}) is stuck in the kernel for {task.seconds / 60:.0f} minutes"
    if task.name.startswith(("nvidia", "nv_")) or task.waits_in.startswith(("nv", "os_acquire", "_nv")):
        yield failed(f"{why}, in the GPU driver", Action.reboot_node)
    elif task.kernel:
        yield note(why)  # some drivers' own threads wait so all their life
    else:
        yield suspect(why, Action.check_storage)


def _clock(one: HostSample, limits: Limits) -> Iterator[Concern]:
    offset = one.clock.offset_s if one.clock else None
    if offset is not None and abs(offset) >= limits.clock_fail_s:
        yield suspect(f"its clock is off by {abs(offset):.2f} s", Action.fix_config)
    elif offset is not None and abs(offset) >= limits.clock_warn_s:
        yield note(f"its clock is off by {abs(offset) * 1000:.0f} ms")
    elif one.clock and one.clock.synchronised is False:
        yield note("its clock is not synchronised")


def _nic(nic: Nic, samples: Samples, limits: Limits) -> Iterator[Concern]:
    past = [(one.time, found) for one in samples for found in one.nics or () if found.name == nic.name]
    if nic.carrier is False and any(found.carrier for _, found in past):
        yield suspect(f"{nic.name} has lost its link", Action.check_network, Severity.high)
    changes, _ = growth([(time, found.carrier_changes) for time, found in past])
    if changes > limits.carrier_changes:
        yield suspect(f"the link of {nic.name} came or went {changes} times", Action.check_network, Severity.high)
    speeds = [found.speed_mbit for _, found in past if found.speed_mbit]
    if nic.speed_mbit and nic.speed_mbit < max(speeds):
        yield suspect(f"{nic.name} runs at {nic.speed_mbit:,} of {max(speeds):,} Mbit/s", Action.check_network)


def _port(port: IbPort, samples: Samples, limits: Limits) -> Iterator[Concern]:
    name, key = f"{port.device}:{port.port}", (port.device, port.port)
    past = [(one.time, found) for one in samples for found in one.ports or () if (found.device, found.port) == key]
    if port.looked is not Looked.ok:
        yield suspect(f"{name} {port.why or 'does not answer'}", Action.check_network, Severity.high)
    elif port.state and port.state != "ACTIVE" and any(found.state == "ACTIVE" for _, found in past):
        readings = ((time, found.state != "ACTIVE" if found.state else None) for time, found in reversed(past))
        seconds = holds_for(readings, limits.gap_seconds)
        why = f"{name} is {port.state} and was ACTIVE"
        if seconds >= limits.port_down_seconds:
            yield failed(f"{why}, {seconds / 60:.0f} minutes ago", Action.check_network)
        else:
            yield suspect(why, Action.check_network, Severity.high)
    rates = [found.rate_gbit for _, found in past if found.rate_gbit]
    if port.rate_gbit and port.rate_gbit < max(rates):
        yield suspect(f"{name} runs at {port.rate_gbit:g} of {max(rates):g} Gbit/s", Action.check_network)
    yield from _counters(name, port, past, limits)


def _counters(name: str, port: IbPort, past: Sequence[tuple[float, IbPort]], limits: Limits) -> Iterator[Concern]:
    for counter in port.counters:
        if counter in _ANY:
            grown, _ = growth([(time, found.counters.get(counter)) for time, found in past])
            if grown:
                yield suspect(f"{name} {counter}: {grown:,} more", Action.check_network, Severity.high)
        elif counter in _RATED:
            threshold, per = _RATED[counter]
            found_rate = rate([(time, found.counters.get(counter)) for time, found in past], per)
            if found_rate > getattr(limits, threshold):
                unit = "a second" if per == 1.0 else "a minute"
                yield suspect(f"{name} {counter}: {found_rate:,.0f} {unit}", Action.check_network)
