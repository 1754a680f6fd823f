"""What the samples of a node say, apart from its GPUs."""

from collections.abc import Iterator, Sequence

from everstep.core.concern import Concern, failed, note, suspect
from everstep.core.health import Action, Severity
from everstep.core.health_policy import HealthPolicy
from everstep.core.host import HostSample, IbPort, Looked, Nic

Samples = Sequence[HostSample]
"""Of one node, oldest first; at least one."""

_FATAL = ("link_downed", "local_link_integrity_errors", "excessive_buffer_overrun_errors", "rnr_nak_retry_err")
"""Counters of a port of which any growth is a fault (NVSentinel, link-counter-detection)."""

_RATED = ("symbol_error", "port_rcv_errors", "roce_slow_restart")
"""Counters that are a fault from so many a second on (same)."""


def judge(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    """All that speaks against the node."""
    yield from _mounts(samples, policy)
    yield from _memory(samples, policy)
    yield from _stuck(samples[-1], policy)
    yield from _clock(samples[-1], policy)
    yield from _network(samples, policy)


def _mounts(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    """A mount that was read-only from the start may be meant so; one that became so has met an error."""
    was_written = {mount.path for one in samples[:-1] for mount in one.mounts or () if mount.read_only is False}
    for mount in samples[-1].mounts or ():
        if mount.looked is Looked.hung:
            yield suspect(f"{mount.path} does not answer", Action.check_storage, Severity.high)
        elif mount.looked is Looked.error:
            yield suspect(f"{mount.path}: {mount.why or 'an error'}", Action.check_storage, Severity.high)
        if mount.read_only:
            if mount.path in was_written:
                yield suspect(f"{mount.path} has become read-only", Action.remount_then_restart, Severity.high)
            continue
        used = mount.used_percent
        if used is not None and used >= policy.disk_percent:
            yield suspect(f"{mount.path} is full to {used:.0f} %", Action.free_space)
        if mount.files_total and mount.files_free is not None and mount.files_free < 0.01 * mount.files_total:
            yield suspect(f"{mount.path} has {mount.files_free:,} files left to give", Action.free_space)


def _memory(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    memory = samples[-1].memory
    if memory is None:
        return
    if memory.pressure and (memory.pressure.full_60s or 0.0) >= policy.memory_pressure_percent:
        yield suspect(f"all tasks waited for memory in {memory.pressure.full_60s:.0f} % of a minute", Action.fix_app)
    kills = [one.memory.oom_kills for one in samples if one.memory and one.memory.oom_kills is not None]
    if kills and kills[-1] > kills[0]:
        yield suspect(f"the kernel has killed {kills[-1] - kills[0]} processes for want of memory", Action.fix_app)


def _stuck(one: HostSample, policy: HealthPolicy) -> Iterator[Concern]:
    for task in one.stuck or ():
        if task.seconds < policy.stuck_seconds:
            continue
        why = f"{task.name} (pid {task.pid}) is stuck in the kernel for {task.seconds / 60:.0f} minutes"
        if task.name.startswith(("nvidia", "nv_")) or task.waits_in.startswith(("nv", "os_acquire")):
            yield failed(f"{why}, in the GPU driver", Action.reboot_node)
        else:
            yield suspect(why, Action.check_storage)


def _clock(one: HostSample, policy: HealthPolicy) -> Iterator[Concern]:
    offset = one.clock.offset_s if one.clock else None
    if offset is not None and abs(offset) >= policy.clock_fail_s:
        yield suspect(f"its clock is off by {abs(offset):.2f} s", Action.fix_config)
    elif offset is not None and abs(offset) >= policy.clock_warn_s:
        yield note(f"its clock is off by {abs(offset) * 1000:.0f} ms")
    elif one.clock and one.clock.synchronised is False:
        yield note("its clock is not synchronised")


def _network(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    """A port that nobody has plugged in is no fault: it counts once it has been up."""
    earlier, latest = samples[:-1], samples[-1]
    for nic in latest.nics or ():
        if nic.carrier is False and any((then := _nic(one, nic.name)) and then.carrier for one in earlier):
            yield suspect(f"{nic.name} has lost its link", Action.check_network, Severity.high)
    for port in latest.ports or ():
        name = f"{port.device}:{port.port}"
        past = [was for one in earlier if (was := _port(one, port))]
        if port.looked is not Looked.ok:
            yield suspect(f"{name} {port.why or 'does not answer'}", Action.check_network, Severity.high)
        elif port.state and port.state != "ACTIVE" and any(was.state == "ACTIVE" for was in past):
            yield suspect(f"{name} is {port.state}", Action.check_network, Severity.high)
        if not past:
            continue
        seconds = max(60.0, latest.time - samples[0].time)
        for counter, count in port.counters.items():
            grown = count - past[0].counters.get(counter, count)
            if counter in _FATAL and grown > 0:
                yield suspect(f"{name} {counter}: {grown:,} more", Action.check_network, Severity.high)
            elif counter in _RATED and grown / seconds > policy.port_errors_per_second:
                yield suspect(f"{name} {counter}: {grown / seconds:,.0f} a second", Action.check_network)


def _nic(sample: HostSample, name: str) -> Nic | None:
    return next((one for one in sample.nics or () if one.name == name), None)


def _port(sample: HostSample, port: IbPort) -> IbPort | None:
    return next((one for one in sample.ports or () if (one.device, one.port) == (port.device, port.port)), None)
