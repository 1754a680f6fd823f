"""What a GPU reads at one moment, how it answered, and the Xid events that its driver raised.

`None` is "not measured": the device, its mode or its driver does not offer the reading. It is never a pass and never a
fail. A reading that should have come and did not is named in `troubles`.
"""

from collections.abc import Iterable
from enum import StrEnum

from pydantic import Field

from everstep.core.health import State
from everstep.core.record import Record

FAILED_AFTER_SECONDS = 60.0
"""A GPU or driver that has not answered for so long has failed; until then it is unknown.

The driver's own patience is shorter: it gives up on a GPU's firmware after some seconds (6 in the Xid 119 lines that were
seen), and says so.
"""

SILENT_PERIODS = 3
"""Telemetry that has been missing for so many periods is itself an alarm."""


class Answer(StrEnum):
    """How a GPU answered. Set by the sampler from what the driver said, not from what was read."""

    ok = "ok"
    unresponsive = "unresponsive"  # a call did not return within its deadline
    lost = "lost"  # the driver says that it fell off the bus
    missing = "missing"  # it was here before; the driver lists it no more
    reset_required = "reset_required"  # the driver refuses calls until it is reset
    error = "error"  # another error that holds for the whole device


class Driver(StrEnum):
    """How the driver answered as a whole."""

    present = "present"
    absent = "absent"  # no NVML library: a machine without GPUs, or without their driver
    refused = "refused"  # the library is there and does not start: driver not loaded, other version
    starting = "starting"  # the probe is not up yet
    starved = "starved"  # the probe gets no processor time; nothing is known of the driver
    silent = "silent"  # the probe did not answer, ended, or said nothing of use


class ClockReason(StrEnum):
    """Why the clocks are below their maximum; bits of `nvmlClocksEventReasons` in nvml.h."""

    idle = "idle"
    application_clocks = "application_clocks"
    power_cap = "power_cap"
    hw_slowdown = "hw_slowdown"
    sync_boost = "sync_boost"
    sw_thermal = "sw_thermal"
    hw_thermal = "hw_thermal"
    power_brake = "power_brake"
    display = "display"


REASON_BITS: dict[ClockReason, int] = {
    ClockReason.idle: 0x1,
    ClockReason.application_clocks: 0x2,
    ClockReason.power_cap: 0x4,
    ClockReason.hw_slowdown: 0x8,
    ClockReason.sync_boost: 0x10,
    ClockReason.sw_thermal: 0x20,
    ClockReason.hw_thermal: 0x40,
    ClockReason.power_brake: 0x80,
    ClockReason.display: 0x100,
}


class NvLink(Record):
    """One NVLink of a GPU. Counters count since the driver's start; those that a generation lacks are None."""

    number: int
    active: bool | None = None
    replay_errors: int | None = None
    recovery_errors: int | None = None
    crc_errors: int | None = None
    effective_errors: int | None = Field(default=None, description="packets with errors after correction; NVLink 5")


class GpuProcess(Record):
    """A process that holds memory of a GPU, as the driver names it.

    In a container the pid may be the host's, which is another process here or none: `host.holders` tells. Never act on
    it without asking there.
    """

    pid: int
    memory_bytes: int | None = None


class MigInstance(Record):
    """A part of a GPU in MIG mode."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    slices: int | None = Field(default=None, description="of the GPU's seven compute slices")
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None


class GpuSample(Record):
    """One GPU at one moment. The UUID is its name: numbers change when a device vanishes or the driver starts anew."""

    time: float = Field(description="Unix seconds, UTC, when the reading ended")
    uuid: str = Field(description="as the driver prints it, or `unknown-<index>` for one that was lost before it told")
    index: int | None = Field(default=None, description="the driver's number at present; None: not listed")
    bus: str = Field(default="", description="PCI address as NVML prints it, 00000000:1B:00.0")
    model: str = ""
    serial: str = ""

    answer: Answer = Answer.ok
    why: str = Field(default="", description="in words, where the answer is not ok: the query that hangs, the error")
    silent_s: float = Field(default=0.0, description="seconds since it last answered, or since it was first asked")
    troubles: dict[str, str] = Field(default={}, description="readings that failed, with the driver's words")
    events_heard: bool | None = Field(default=None, description="whether Xid events of it are listened to")

    utilisation_percent: float | None = Field(default=None, description="of the last driver period with a kernel busy")
    memory_busy_percent: float | None = Field(
        default=None, description="of that time with memory being read or written"
    )
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = Field(default=None, description="without what the driver reserves, where it tells")
    memory_reserved_bytes: int | None = None
    temperature_c: float | None = Field(default=None, description="of the GPU core, degrees Celsius")
    memory_temperature_c: float | None = None
    max_limit_c: float | None = Field(default=None, description="throttled below base clock from here")
    slowdown_limit_c: float | None = Field(default=None, description="slowed down by hardware from here")
    shutdown_limit_c: float | None = None
    memory_limit_c: float | None = None
    headroom_c: float | None = Field(default=None, description="T.Limit: degrees left to the GPU's maximum; can be < 0")
    slowdown_headroom_c: float | None = Field(default=None, description="the T.Limit at which hardware slows down")
    shutdown_headroom_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = Field(default=None, description="the limit in force")
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    clock_reasons: int | None = Field(default=None, description="bits of REASON_BITS, and others of newer drivers")
    ecc_enabled: bool | None = None
    ecc_pending: bool | None = Field(default=None, description="the ECC mode after the next reset")
    ecc_corrected_volatile: int | None = Field(default=None, description="since the driver's start or a reset")
    ecc_corrected_aggregate: int | None = Field(default=None, description="in the device's life")
    ecc_uncorrected_volatile: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    sram_threshold_exceeded: bool | None = Field(default=None, description="the driver's flag for a replacement")
    remapped_corrected: int | None = Field(default=None, description="rows")
    remapped_uncorrected: int | None = Field(default=None, description="rows")
    remap_pending: bool | None = Field(default=None, description="a row is remapped at the next reset")
    remap_failed: bool | None = Field(default=None, description="a row could not be remapped")
    retired_single_bit: int | None = Field(default=None, description="pages; before Ampere")
    retired_double_bit: int | None = Field(default=None, description="pages; before Ampere")
    retired_pending: bool | None = None
    pcie_replays: int | None = Field(default=None, description="since the driver's start")
    pcie_width: int | None = Field(default=None, description="lanes; idle GPUs may lower generation, not width")
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    recovery_action: int | None = Field(default=None, description="the number that Xid 154 prints; 0 is none")
    links: tuple[NvLink, ...] | None = Field(default=None, description="none of them: the device has no NVLink")
    processes: tuple[GpuProcess, ...] | None = None
    mig_enabled: bool | None = None
    mig_pending: bool | None = Field(default=None, description="the MIG mode after the next reset")
    instances: tuple[MigInstance, ...] | None = None

    @property
    def not_measured(self) -> tuple[str, ...]:
        """The readings that this device did not give, by the names of their fields."""
        return tuple(name for name in READINGS if getattr(self, name) is None)

    @property
    def reasons(self) -> tuple[ClockReason, ...] | None:
        """Why the clocks are not at their maximum, as words."""
        bits = self.clock_reasons
        return None if bits is None else tuple(word for word, bit in REASON_BITS.items() if bits & bit)

    @property
    def slowdown_at_c(self) -> float | None:
        """The core temperature from which hardware slows the GPU down.

        The limit that the driver states in degrees, else the one that follows from its headroom. Where a driver states
        both they have been seen to differ by some degrees; the stated one counts.
        """
        if self.slowdown_limit_c is not None:
            return self.slowdown_limit_c
        if self.temperature_c is None or self.headroom_c is None or self.slowdown_headroom_c is None:
            return None
        return self.temperature_c + self.headroom_c - self.slowdown_headroom_c

    @property
    def links_down(self) -> tuple[int, ...]:
        return tuple(one.number for one in self.links or () if one.active is False)


READINGS = tuple(
    name
    for name in GpuSample.model_fields
    if name
    not in {"time", "uuid", "index", "bus", "model", "serial", "answer", "why", "silent_s", "troubles", "events_heard"}
)
"""The fields of a sample that are read from the device."""


class XidEvent(Record):
    """An Xid that the driver reported. Equal ones that came before anybody looked are one record with a `count`."""

    time: float = Field(description="Unix seconds, UTC, when the first of them was heard")
    last: float = Field(description="when the last of them was heard")
    uuid: str
    xid: int
    index: int | None = None
    bus: str = ""
    gpu_instance: int | None = Field(default=None, description="in MIG mode, where the driver can tell")
    compute_instance: int | None = None
    count: int = 1


class Sweep(Record):
    """All GPUs of a node at one moment, each with its own answer, also those that did not answer or are gone."""

    time: float = Field(description="Unix seconds, UTC, when it was asked for")
    seconds: float = Field(description="how long it took")
    driver: Driver
    why: str = Field(default="", description="in words, where the driver is not present")
    driver_version: str = ""
    silent_s: float = Field(default=0.0, description="seconds for which the driver as a whole has not answered")
    left_behind: int = Field(default=0, description="probes that could not be killed and still hang in the driver")
    restarts: int = Field(default=0, description="of the probe, since the sampler began")
    gpus: tuple[GpuSample, ...] = ()


def answering(sample: GpuSample, failed_after: float = FAILED_AFTER_SECONDS) -> State:
    """What the way a GPU answers says about it, whatever it reads. Unknown turns into failed by time alone."""
    if sample.answer is Answer.ok:
        return State.healthy
    if sample.answer in (Answer.lost, Answer.reset_required):
        return State.failed
    return State.failed if sample.silent_s >= failed_after else State.unknown


def driving(sweep: Sweep, failed_after: float = FAILED_AFTER_SECONDS) -> State:
    """What the way the driver answers says about the node.

    Without a driver nothing is known of GPUs that were never seen here: unknown. One that was seen and is gone has its
    own sample in the sweep. A starved probe says nothing of the driver, nor of the GPUs.
    """
    if sweep.driver is Driver.present:
        return State.healthy
    if sweep.driver in (Driver.absent, Driver.starved):
        return State.unknown
    return State.failed if sweep.silent_s >= failed_after else State.unknown


def is_silent(answered: Iterable[float], began: float, now: float, period: float) -> bool:
    """Whether telemetry is missing: nothing came for `SILENT_PERIODS` periods, by the times at which something came."""
    return now - max(answered, default=began) >= SILENT_PERIODS * period
