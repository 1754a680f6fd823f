"""What the samples of one GPU say by themselves: rules of a moment, and of counters that grow. Pure.

A reading that was not measured is no evidence: no rule sees it. Each rule only ever gets worse with its signal.
"""

from collections.abc import Callable, Iterator, Sequence

from everstep.core.concern import Concern, failed, note, suspect, unknown
from everstep.core.gpu import REASON_BITS, Answer, ClockReason, GpuSample, NvLink, answering
from everstep.core.health import Action, Severity, State
from everstep.core.health_policy import HealthPolicy, Limits
from everstep.core.judging_series import growth, holds_for, rate

Samples = Sequence[GpuSample]
"""Of one GPU, oldest first; at least one."""

_HELD_BACK = {
    ClockReason.hw_slowdown: Severity.high,
    ClockReason.hw_thermal: Severity.high,
    ClockReason.power_brake: Severity.high,
    ClockReason.sw_thermal: Severity.medium,
}
"""The others are no fault: idle, clocks that someone has set, the power cap of a GPU at full load."""

_ANY_HELD_BACK = sum(REASON_BITS[reason] for reason in _HELD_BACK)


def judge(samples: Samples, policy: HealthPolicy, *, has_peers: bool) -> Iterator[Concern]:
    """All that speaks against the GPU, whatever it is used for."""
    latest, limits = samples[-1], policy.of(samples[-1].model)
    known = latest
    if latest.answer is not Answer.ok:
        known = next((one for one in reversed(samples) if one.answer is Answer.ok), latest)
        yield from _answer(latest, known, limits)
    for one in (latest, known) if known is not latest else (latest,):  # the last evidence of one that is silent stays
        for rule in (_temperature, _memory_errors, _spare_rows, _configuration):
            yield from rule(one, limits)
    yield from _unread(latest, policy)
    yield from _bus(samples, limits)
    yield from _clocks(samples, limits)
    yield from _links(samples, limits, has_peers=has_peers)


def _answer(latest: GpuSample, known: GpuSample, limits: Limits) -> Iterator[Concern]:
    silent = max(latest.silent_s, latest.time - known.time)
    state = answering(latest.model_copy(update={"silent_s": silent}), limits.failed_after_seconds)
    why = latest.why or latest.answer.value
    if state is State.failed:
        action = Action.drain_then_reset_gpu if latest.answer is Answer.reset_required else Action.reboot_node
        yield failed(f"{_ANSWERS[latest.answer]}: {why}", action, Severity.critical)
    elif state is State.unknown:
        yield unknown(f"{_ANSWERS[latest.answer]}, for {silent:.0f} s so far: {why}")


_ANSWERS = {
    Answer.unresponsive: "it does not answer",
    Answer.lost: "it fell off the bus",
    Answer.missing: "it is missing",
    Answer.reset_required: "it has to be reset",
    Answer.error: "it cannot be read",
}


def _temperature(one: GpuSample, limits: Limits) -> Iterator[Concern]:
    here, slowdown = one.temperature_c, one.slowdown_at_c
    if here is not None:
        alarm = limits.alarm_c if slowdown is None else min(limits.alarm_c, slowdown)
        if one.shutdown_limit_c is not None and here >= one.shutdown_limit_c:
            why = f"{here:.0f} C: the driver shuts it down from {one.shutdown_limit_c:.0f} C"
            yield failed(why, Action.drain_replace, Severity.critical)
        elif here >= alarm:
            yield suspect(f"{here:.0f} C: the alarm is at {alarm:.0f} C", severity=Severity.high)
        elif here >= limits.throttle_onset_c:
            yield note(f"{here:.0f} C: clocks are held back from about {limits.throttle_onset_c:.0f} C")
        elif here > limits.logged_c:
            yield note(f"{here:.0f} C")
    if one.headroom_c is not None and one.slowdown_headroom_c is not None and one.headroom_c <= one.slowdown_headroom_c:
        yield suspect(f"{one.headroom_c:.0f} C of headroom: its hardware slows down", severity=Severity.high)
    memory, most = one.memory_temperature_c, one.memory_limit_c
    if memory is not None and most is not None and memory >= most:
        yield suspect(f"memory {memory:.0f} C: its limit is {most:.0f} C", severity=Severity.high)


def _memory_errors(one: GpuSample, limits: Limits) -> Iterator[Concern]:
    if one.ecc_uncorrected_volatile:
        why = f"{one.ecc_uncorrected_volatile:,} uncorrectable memory errors"
        yield failed(why, Action.drain_then_reset_gpu, Severity.critical)
    elif one.ecc_uncorrected_aggregate and one.ecc_uncorrected_volatile is None:
        yield note(f"{one.ecc_uncorrected_aggregate:,} uncorrectable memory errors in its life")
    if one.sram_threshold_exceeded:
        yield failed("the driver's threshold of SRAM errors is passed", Action.drain_replace, Severity.critical)
    if one.ecc_corrected_volatile is not None and one.ecc_corrected_volatile > limits.corrected_errors:
        yield suspect(f"{one.ecc_corrected_volatile:,} corrected memory errors", Action.log_then_reset_gpu_when_idle)
    if one.recovery_action:
        yield _advised(one.recovery_action)


def _spare_rows(one: GpuSample, limits: Limits) -> Iterator[Concern]:
    """Rows that are remapped, from Ampere on; pages that are retired, before it."""
    if one.remap_failed:
        yield failed("a memory row could not be remapped", Action.drain_replace, Severity.critical)
    if one.remap_pending:
        yield suspect("a memory row waits to be remapped", Action.log_then_reset_gpu_when_idle)
    rows = one.remapped_uncorrected
    if rows is not None and rows > limits.remapped_rows:
        why = f"{rows:,} memory rows are remapped; there are {limits.remapped_rows:,.0f} spare ones"
        yield failed(why, Action.drain_replace, Severity.critical)
    pages = (one.retired_single_bit or 0) + (one.retired_double_bit or 0)
    if pages >= limits.retired_pages_failed and one.retired_pending:
        yield failed(f"{pages} memory pages are retired, and another one waits", Action.drain_replace)
    elif pages > limits.retired_pages:
        yield suspect(f"{pages} memory pages are retired", Action.drain_then_reset_gpu)
    elif one.retired_pending:
        yield suspect("a memory page waits to be retired", Action.log_then_reset_gpu_when_idle)


def _advised(number: int) -> Concern:
    """What the driver advises, by the number that Xid 154 prints (open-gpu-kernel-modules, gpu.c)."""
    if number == 1:
        return failed("the driver says that it has to be reset", Action.reset_gpu, Severity.critical)
    if number == 2:
        return failed("the driver says that the node has to be rebooted", Action.reboot_node, Severity.critical)
    return failed(f"the driver says that it has to be drained (action {number})", Action.drain_then_reset_gpu)


def _configuration(one: GpuSample, limits: Limits) -> Iterator[Concern]:
    if one.ecc_enabled is False:
        yield suspect("the error correction of its memory is off", Action.fix_config)
    elif one.ecc_enabled and one.ecc_pending is False:
        yield suspect("the error correction of its memory goes off at the next reset", Action.fix_config, Severity.low)
    if one.mig_enabled is not None and one.mig_pending is not None and one.mig_enabled != one.mig_pending:
        yield suspect("its MIG mode changes at the next reset", Action.fix_config, Severity.low)


def _unread(latest: GpuSample, policy: HealthPolicy) -> Iterator[Concern]:
    """What should have been read. A query that fails is no pass; what a device does not offer is no matter."""
    for query, why in sorted(latest.troubles.items()):
        yield suspect(f"{query} cannot be read: {why}")
    if latest.answer is Answer.ok:
        for name in policy.required:
            if getattr(latest, name) is None:
                yield unknown(f"{name} is required here, and not measured")


def _bus(samples: Samples, limits: Limits) -> Iterator[Concern]:
    latest = samples[-1]
    if latest.pcie_width is not None and latest.pcie_width_max and latest.pcie_width < latest.pcie_width_max:
        yield suspect(f"PCIe has {latest.pcie_width} of {latest.pcie_width_max} lanes", severity=Severity.high)
    slow = [_is_slow(one, limits) for one in samples[-2:] if one.answer is Answer.ok]
    if slow and all(slow):  # a link that goes to sleep at the end of a burst is seen busy and slow once
        why = f"PCIe runs at generation {latest.pcie_generation} of {latest.pcie_generation_max} under load"
        yield suspect(why, severity=Severity.high)
    replays = rate([(one.time, one.pcie_replays) for one in (samples[0], *samples[-2:])])
    if replays > limits.replays_per_minute:
        yield suspect(f"PCIe repeats {replays:,.0f} packets a minute")


def _is_slow(one: GpuSample, limits: Limits) -> bool:
    busy = one.utilisation_percent is not None and one.utilisation_percent >= limits.busy_percent
    here, most = one.pcie_generation, one.pcie_generation_max
    return busy and here is not None and most is not None and here < most


def _clocks(samples: Samples, limits: Limits) -> Iterator[Concern]:
    now = samples[-1].clock_reasons
    if now is None or not now & _ANY_HELD_BACK:
        return
    for reason, severity in _HELD_BACK.items():
        bit = REASON_BITS[reason]
        seconds = holds_for(_with_bit(samples, bit), limits.gap_seconds)
        words = reason.value.replace("_", " ")
        if seconds >= limits.held_back_seconds:
            why = f"its clocks are held back for {seconds / 60:.0f} minutes: {words}"
            yield suspect(why, severity=severity)
        elif seconds >= 0:
            yield note(f"its clocks are held back: {words}")


def _with_bit(samples: Samples, bit: int) -> Iterator[tuple[float, bool | None]]:
    for one in reversed(samples):
        yield one.time, None if one.clock_reasons is None else bool(one.clock_reasons & bit)


def _links(samples: Samples, limits: Limits, *, has_peers: bool) -> Iterator[Concern]:
    """A link that went down, or that is down where all of them are up on such a board; and errors of links.

    On boards with bridges, or none, links that nobody connected are down for ever: that is no fault, and a GPU that is
    let alone, without its board's other GPUs, has none that is up.
    """
    read = [one for one in samples if one.links is not None]
    if not read:
        return
    first, latest = read[0], read[-1]
    down = latest.links_down
    if down:
        words = f"NVLink {', '.join(map(str, down))} is down" if len(down) < len(latest.links or ()) else _ALL_DOWN
        was_up = {link.number for one in read[:-1] for link in one.links or () if link.active}
        up = sum(1 for link in latest.links or () if link.active)
        if was_up & set(down) or ((up or has_peers) and up < limits.nvlinks):
            yield failed(words, Action.drain_then_reset_gpu, Severity.critical)
        else:
            yield note(words)
    if first.links != latest.links:
        before = {link.number: link for link in first.links or ()}
        for link in latest.links or ():
            if link.number in before:
                yield from _link_errors(before[link.number], link, (first.time, latest.time), limits)


_ALL_DOWN = "none of its NVLinks is up; without a fabric manager that is so on boards with switches"


def _link_errors(before: NvLink, after: NvLink, times: tuple[float, float], limits: Limits) -> Iterator[Concern]:
    def counted(count: Callable[[NvLink], int | None]) -> list[tuple[float, int | None]]:
        return [(times[0], count(before)), (times[1], count(after))]

    if growth(counted(lambda link: link.recovery_errors))[0]:
        yield suspect(f"NVLink {after.number} had to recover", Action.drain_then_reset_gpu)
    errors = rate(counted(_errors))
    if errors > limits.link_errors_per_minute:
        yield suspect(f"NVLink {after.number} has {errors:,.0f} errors a minute", Action.drain_then_reset_gpu)


def _errors(link: NvLink) -> int | None:
    known = [count for count in (link.replay_errors, link.crc_errors, link.effective_errors) if count is not None]
    return sum(known) if known else None
