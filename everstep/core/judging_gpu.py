"""What the samples of one GPU say, among its peers. Rules of one moment first, then those of duration.

A reading that was not measured is no evidence: no rule sees it. Each rule only ever gets worse with its signal.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from everstep.core.concern import Concern, failed, note, suspect, unknown
from everstep.core.gpu import ClockReason, GpuSample, answering
from everstep.core.health import Action, Severity, State
from everstep.core.health_policy import HealthPolicy

Samples = Sequence[GpuSample]
"""Of one GPU, oldest first; at least one."""

_HELD_BACK = {
    ClockReason.hw_slowdown: Severity.high,
    ClockReason.hw_thermal: Severity.high,
    ClockReason.power_brake: Severity.high,
    ClockReason.sw_thermal: Severity.medium,
}


def judge(samples: Samples, peers: Sequence[Samples], since: float | None, policy: HealthPolicy) -> Iterator[Concern]:
    """All that speaks against the GPU. `peers` are the other GPUs of the node; a training computes since `since`."""
    latest = samples[-1]
    yield from _answer(latest, policy)
    for rule in (_temperature, _memory_errors, _spares, _advice, _configuration, _bus, _clocks, _counters):
        yield from rule(samples, policy)
    yield from _links(samples, peers, policy)
    at_work = _at_work(samples, since)
    if at_work and not latest.mig_enabled:  # the driver counts no utilisation of a GPU in parts
        yield from _work(at_work, [found for peer in peers if (found := _at_work(peer, since))], policy)


def _answer(latest: GpuSample, policy: HealthPolicy) -> Iterator[Concern]:
    state = answering(latest, policy.failed_after_seconds)
    why = latest.why or latest.answer.value
    if state is State.failed:
        action = Action.drain_then_reset_gpu if latest.answer.value == "reset_required" else Action.reboot_node
        yield failed(f"it does not answer: {why}", action, Severity.critical)
    elif state is State.unknown:
        yield unknown(f"it does not answer, for {latest.silent_s:.0f} s so far: {why}")
    for name, words in latest.troubles.items():  # not the same as a reading that it does not offer
        yield suspect(f"{name} could not be read: {words}")
    if state is State.healthy and (missing := [name for name in policy.required if getattr(latest, name) is None]):
        yield unknown(f"it does not measure {', '.join(missing)}")


def _temperature(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    latest = samples[-1]
    here = latest.temperature_c
    if here is not None:
        alarm = min(policy.of(latest.model).alarm_c or policy.alarm_c, latest.slowdown_at_c or policy.alarm_c)
        if latest.shutdown_limit_c is not None and here >= latest.shutdown_limit_c:
            yield failed(
                f"{here:.0f} C: the driver shuts it down from {latest.shutdown_limit_c:.0f}", Action.drain_replace
            )
        elif here >= alarm:
            yield suspect(f"{here:.0f} C: the alarm is at {alarm:.0f}", severity=Severity.high)
        elif here >= policy.throttle_onset_c:
            yield note(f"{here:.0f} C: clocks are held back from about {policy.throttle_onset_c:.0f}")
        elif here > policy.logged_c:
            yield note(f"{here:.0f} C")
    memory, limit = latest.memory_temperature_c, latest.memory_limit_c
    if memory is not None and limit is not None and memory >= limit:
        yield suspect(f"memory {memory:.0f} C: its limit is {limit:.0f}", severity=Severity.high)


def _memory_errors(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    one = samples[-1]
    if one.ecc_uncorrected_volatile:
        yield failed(f"{one.ecc_uncorrected_volatile:,} uncorrectable memory errors", Action.drain_then_reset_gpu)
    if one.sram_threshold_exceeded:
        yield failed("the driver's threshold of SRAM errors is passed", Action.drain_replace)
    if one.ecc_corrected_volatile is not None and one.ecc_corrected_volatile > policy.corrected_errors:
        yield suspect(f"{one.ecc_corrected_volatile:,} corrected memory errors", Action.log_then_reset_gpu_when_idle)


def _spares(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    """Rows and pages of memory that stand in for broken ones, and whether there are any left."""
    one = samples[-1]
    if one.remap_failed:
        yield failed("a memory row could not be remapped", Action.drain_replace)
    if one.remap_pending:
        yield suspect("a memory row waits to be remapped", Action.log_then_reset_gpu_when_idle)
    rows, most = one.remapped_uncorrected, policy.of(one.model).remapped_rows or policy.remapped_rows
    if rows is not None and rows > most:
        yield failed(f"{rows:,} memory rows are remapped; there are {most:,} spare ones", Action.drain_replace)
    pages = (one.retired_single_bit or 0) + (one.retired_double_bit or 0)
    if pages >= policy.retired_pages_failed and one.retired_pending:
        yield failed(f"{pages} memory pages are retired, and another one waits", Action.drain_replace)
    elif pages > policy.retired_pages:
        yield suspect(f"{pages} memory pages are retired", Action.drain_then_reset_gpu)
    elif one.retired_pending:
        yield suspect("a memory page waits to be retired", Action.log_then_reset_gpu_when_idle)


def _advice(samples: Samples, _: HealthPolicy) -> Iterator[Concern]:
    """What the driver advises, by the number that Xid 154 prints (open-gpu-kernel-modules, gpu.c)."""
    number = samples[-1].recovery_action
    why = f"the driver advises recovery action {number}"
    if number == 2:
        yield failed(f"{why}: reboot the node", Action.reboot_node)
    elif number:
        yield failed(f"{why}: reset", Action.reset_gpu if number == 1 else Action.drain_then_reset_gpu)


def _configuration(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    one = samples[-1]
    if one.ecc_enabled is False:
        yield suspect("error correction of its memory is off", Action.fix_config)
    elif one.ecc_pending is not None and one.ecc_enabled is not None and one.ecc_pending != one.ecc_enabled:
        yield suspect("its error correction changes at the next reset", Action.fix_config, Severity.low)
    if one.mig_enabled is not None and one.mig_pending is not None and one.mig_enabled != one.mig_pending:
        yield suspect("its MIG mode changes at the next reset", Action.fix_config, Severity.low)


def _bus(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    one = samples[-1]
    if one.pcie_width and one.pcie_width_max and one.pcie_width < one.pcie_width_max:
        why = f"PCIe has {one.pcie_width} of {one.pcie_width_max} lanes"
        yield suspect(why, Action.drain_replace, Severity.high)
    busy = one.utilisation_percent is not None and one.utilisation_percent >= policy.busy_percent
    if busy and one.pcie_generation and one.pcie_generation_max and one.pcie_generation < one.pcie_generation_max:
        why = f"PCIe runs at generation {one.pcie_generation} of {one.pcie_generation_max} under load"
        yield suspect(why, Action.drain_replace, Severity.high)


def _clocks(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    for reason, severity in _HELD_BACK.items():
        if _held(samples, lambda one, reason=reason: one.reasons and reason in one.reasons, policy.slowdown_seconds):  # type: ignore[misc]
            why = f"clocks are held back for {policy.slowdown_seconds / 60:.0f} minutes: {reason.value}"
            yield suspect(why, severity=severity)


def _counters(samples: Samples, policy: HealthPolicy) -> Iterator[Concern]:
    rate = _per_minute([(one.time, one.pcie_replays) for one in samples])
    if rate > policy.replays_per_minute:
        yield suspect(f"PCIe repeats {rate:,.0f} packets a minute")


def _links(samples: Samples, peers: Sequence[Samples], policy: HealthPolicy) -> Iterator[Concern]:
    latest = samples[-1]
    down, up = set(latest.links_down), sum(1 for link in latest.links or () if link.active)
    if down:
        was_up = {link.number for one in samples[:-1] for link in one.links or () if link.active}
        alike = [peer[-1] for peer in peers if peer[-1].model == latest.model and peer[-1].links]
        usual = [sum(1 for link in peer.links or () if link.active) for peer in alike]
        words = ", ".join(map(str, sorted(down)))
        if down & was_up or (usual and up < median(usual)) or (up < (policy.of(latest.model).links or 0) and up):
            yield failed(f"NVLink {words} is down", Action.drain_then_reset_gpu)
        elif up:
            yield note(f"NVLink {words} is not connected")
    first = {link.number: link for link in next((one.links for one in samples if one.links), ())}
    for link in latest.links or ():
        if first.get(link.number) == link:  # as nearly always: nothing has counted
            continue
        history = [(one.time, was) for one in samples for was in one.links or () if was.number == link.number]
        recoveries = [(time, one.recovery_errors) for time, one in history]
        errors = [(time, _sum(one.replay_errors, one.crc_errors, one.effective_errors)) for time, one in history]
        if _grown(recoveries):
            yield suspect(f"NVLink {link.number} had to recover", Action.drain_then_reset_gpu)
        if (rate := _per_minute(errors)) > policy.link_errors_per_minute:
            yield suspect(f"NVLink {link.number} has {rate:,.0f} errors a minute", Action.drain_then_reset_gpu)


def _at_work(samples: Samples, since: float | None) -> Samples:
    return [] if since is None else [one for one in samples if one.time >= since]


def _work(samples: Samples, peers: Sequence[Samples], policy: HealthPolicy) -> Iterator[Concern]:
    """What a GPU does while a training should compute: judged by duration, never by one sample."""
    if _held(samples, lambda one: _below(one.utilisation_percent, 0.0, equal=True), policy.idle_seconds):
        yield suspect(f"it has computed nothing for {policy.idle_seconds:.0f} s of training", severity=Severity.high)
    elif _held(samples, lambda one: _below(one.utilisation_percent, policy.busy_percent), policy.low_seconds):
        yield suspect(
            f"it has been busy for less than {policy.busy_percent:.0f} % over {policy.low_seconds / 60:.0f} minutes",
            severity=Severity.low,
        )
    own = _typical(samples, policy.peer_seconds)
    others = [found for peer in peers if (found := _typical(peer, policy.peer_seconds)) is not None]
    if own is not None and others:
        usual = median(others)
        if usual >= policy.busy_percent and own < policy.peer_fraction * usual:
            yield suspect(f"it is busy for {own:.0f} % and its peers for {usual:.0f} %", severity=Severity.high)
    used = [one.memory_used_bytes for one in samples if one.memory_used_bytes is not None]
    if len(used) > 1 and used[-1] < policy.memory_kept * median(used[:-1]):
        yield suspect(f"memory in use fell from {median(used[:-1]) / 1e9:.1f} to {used[-1] / 1e9:.1f} GB in training")


def _held(samples: Samples, true: Callable[[GpuSample], object], seconds: float) -> bool:
    """Whether it has been true in every sample for so long, up to the latest; a gap in the samples is no evidence."""
    began = last = None
    for one in reversed(samples):
        if not true(one):
            break
        began, last = one.time, one.time if last is None else last
    return began is not None and last is not None and last - began >= seconds


def _typical(samples: Samples, seconds: float) -> float | None:
    """The median utilisation over the last seconds, if samples reach back so far."""
    end = samples[-1].time
    if end - samples[0].time < seconds:
        return None
    values = [one.utilisation_percent for one in samples if end - one.time <= seconds]
    known = [value for value in values if value is not None]
    return median(known) if len(known) > len(values) / 2 else None


def _below(value: float | None, limit: float, *, equal: bool = False) -> bool:
    return value is not None and (value <= limit if equal else value < limit)


def _sum(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _grown(counts: Sequence[tuple[float, int | None]]) -> int:
    """By how much a counter has grown; one that was set back counts from there."""
    known = [count for _, count in counts if count is not None]
    return sum(max(0, after - before) for before, after in pairwise(known))


def _per_minute(counts: Sequence[tuple[float, int | None]]) -> float:
    """How fast a counter grows, over a minute at least: a short look cannot make a rate out of one packet."""
    known = [(time, count) for time, count in counts if count is not None]
    if len(known) < 2:
        return 0.0
    return 60 * _grown(known) / max(60.0, known[-1][0] - known[0][0])
