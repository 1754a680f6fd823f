"""What GPUs do while a training should compute: judged by duration and among peers, never by one sample. Pure.

A GPU that is split by MIG counts no utilisation, and one that the training does not use has none to show: neither is judged.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median

from everstep.core.concern import Concern, suspect
from everstep.core.gpu import GpuSample
from everstep.core.health import Severity
from everstep.core.health_policy import HealthPolicy, Limits
from everstep.core.judging_series import holds_for, part

Samples = Sequence[GpuSample]
"""Of one GPU, oldest first; at least one."""

_USED_BYTES = 256 << 20
"""Less memory in use than that is no training's: the driver's own on an idle GPU is some MB, a CUDA context some hundred."""

_BUCKET_SECONDS = 30.0
_FEWEST = 3  # samples that make a level


def judge(
    series: Mapping[str, Samples], since: float | None, used: Collection[str] | None, policy: HealthPolicy
) -> Iterator[tuple[str, Concern]]:
    """Concerns by UUID. `since`: when the computing began, as far as that is known; `used`: the GPUs that take part."""
    working: dict[str, Samples] = {}
    for uuid, samples in series.items():
        counted = [one for one in samples if since is None or one.time >= since]
        if counted and not counted[-1].mig_enabled and (uuid in used if used is not None else _is_used(counted)):
            working[uuid] = counted
    levels = {uuid: _levels(samples, policy.of(samples[-1].model)) for uuid, samples in working.items()}
    for uuid, samples in working.items():
        limits = policy.of(samples[-1].model)
        peers = [level for other, level in levels.items() if other != uuid and level is not None]
        for concern in (
            *_utilisation(samples, limits),
            *_beside_peers(levels[uuid], peers, limits),
            *_memory(samples, limits),
        ):
            yield uuid, concern


def _is_used(samples: Samples) -> bool:
    """Whether anybody has used it, by its processes and its memory; yes where neither is measured."""
    measured = False
    for one in reversed(samples):
        if one.processes or (one.memory_used_bytes or 0) >= _USED_BYTES:
            return True
        measured = measured or one.memory_used_bytes is not None
    return not measured


def _utilisation(samples: Samples, limits: Limits) -> Iterator[Concern]:
    now = next((one.utilisation_percent for one in reversed(samples) if one.utilisation_percent is not None), None)
    if now is None or now >= limits.busy_percent:
        return
    readings = ((one.time, one.utilisation_percent) for one in reversed(samples))
    idle = holds_for(((time, None if value is None else value <= 0) for time, value in readings), limits.gap_seconds)
    low = holds_for(
        ((time, value < limits.busy_percent) for time, value in _smoothed(samples)),
        limits.gap_seconds + _BUCKET_SECONDS,
    )
    if idle >= limits.idle_seconds:
        yield suspect(f"it has computed nothing for {idle:.0f} s of training", severity=Severity.high)
    if low >= limits.low_seconds:
        why = f"it has been busy for less than {limits.busy_percent:.0f} % of the time for {low / 60:.0f} minutes"
        yield suspect(why, severity=Severity.low)


def _smoothed(samples: Samples) -> list[tuple[float, float]]:
    """Medians of half minutes, newest first, so that one reading neither makes nor ends a spell. Each is dated twice,
    by its first and its last reading, so that a spell is as long as its readings say.
    """
    end = samples[-1].time
    buckets: dict[int, list[tuple[float, float]]] = {}
    for one in reversed(samples):
        if one.utilisation_percent is not None:
            buckets.setdefault(int((end - one.time) // _BUCKET_SECONDS), []).append((one.time, one.utilisation_percent))
    found = []
    for bucket in buckets.values():
        level = median(value for _, value in bucket)
        found += [(bucket[0][0], level), (bucket[-1][0], level)]
    return found


def _levels(samples: Samples, limits: Limits) -> tuple[float, float] | None:
    """The lower and the upper quarter of the latest utilisation, if the readings reach back far enough."""
    end, values = samples[-1].time, []
    for one in reversed(samples):
        if end - one.time > limits.gap_seconds:
            break
        if one.utilisation_percent is not None:
            values.append(one.utilisation_percent)
        if end - one.time >= limits.peer_seconds and len(values) >= _FEWEST:
            return part(values, 0.25), part(values, 0.75)
    return None


def _beside_peers(
    own: tuple[float, float] | None, peers: Sequence[tuple[float, float]], limits: Limits
) -> Iterator[Concern]:
    """Its better readings beside the worse ones of its peers: while all of them start or stop, none is far below."""
    if own is None or not peers:
        return
    usual = median(low for low, _ in peers)
    if usual >= limits.busy_percent and own[1] < limits.peer_fraction * usual:
        yield suspect(f"it is busy for {own[1]:.0f} % of the time, its peers for {usual:.0f} %", severity=Severity.high)


def _memory(samples: Samples, limits: Limits) -> Iterator[Concern]:
    """A fall at once, from what was usual to far below, that lasts."""
    used = [(one.time, one.memory_used_bytes) for one in samples if one.memory_used_bytes is not None]
    if len(used) < _FEWEST:
        return
    usual = part([size for _, size in used], 0.75)
    least = limits.memory_kept * usual
    low = holds_for(((time, size < least) for time, size in reversed(used)), limits.gap_seconds)
    if low >= limits.memory_seconds:
        why = f"memory in use fell from {usual / 1e9:.1f} to {used[-1][1] / 1e9:.1f} GB in training"
        yield suspect(why, severity=Severity.high)
