"""What the stand-in NVML can be told, and how it lies in the state file: one table that the C code is compiled with.

The state file is a header and a record for the system and each GPU, all of fixed size. It is replaced whole, never
written in place, so a reader that opens it sees one state. XID events lie in a file beside it that only grows.
"""

import hashlib
import struct

GPUS = 16
LINKS = 18
PROCESSES = 16
INSTANCES = 7
MAGIC = 0x4C4D564E50455645
FOREVER = -1
UNINTERRUPTIBLE = -2

GIB = 1 << 30

VALUES: dict[str, int] = {
    "present": 1,
    "lost": 0,
    "reset_required": 0,
    "utilisation": 0,
    "memory_utilisation": 0,
    "memory_total": 80 * GIB,
    "memory_reserved": 640 << 20,
    "memory_used": 0,
    "temperature": 34,
    "memory_temperature": 41,
    "shutdown": 92,
    "slowdown": 89,
    "memory_max": 95,
    "gpu_max": 87,
    "headroom": 53,
    "shutdown_headroom": -5,
    "slowdown_headroom": -2,
    "memory_max_headroom": 0,
    "gpu_max_headroom": 0,
    "power": 72_000,
    "power_limit": 700_000,
    "sm_clock": 345,
    "sm_clock_max": 1980,
    "memory_clock": 2619,
    "memory_clock_max": 2619,
    "reasons": 1,
    "ecc_mode": 1,
    "ecc_pending": 1,
    "ecc_corrected_volatile": 0,
    "ecc_corrected_aggregate": 0,
    "ecc_uncorrected_volatile": 0,
    "ecc_uncorrected_aggregate": 0,
    "sram_threshold": 0,
    "remapped_corrected": 0,
    "remapped_uncorrected": 0,
    "remap_pending": 0,
    "remap_failed": 0,
    "retired_single": 0,
    "retired_double": 0,
    "retired_pending": 0,
    "replays": 0,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "recovery": 0,
    "links": LINKS,
    **{f"link_active_{i}": 1 for i in range(LINKS)},
    **{f"link_replay_{i}": 0 for i in range(LINKS)},
    **{f"link_recovery_{i}": 0 for i in range(LINKS)},
    **{f"link_crc_{i}": 0 for i in range(LINKS)},
    **{f"link_effective_{i}": 0 for i in range(LINKS)},
    "processes": 0,
    **{f"process_pid_{i}": 0 for i in range(PROCESSES)},
    **{f"process_memory_{i}": 0 for i in range(PROCESSES)},
    "mig": 0,
    "mig_pending": 0,
    "instances": 0,
    **{f"instance_gi_{i}": i + 1 for i in range(INSTANCES)},
    **{f"instance_ci_{i}": 0 for i in range(INSTANCES)},
    **{f"instance_slices_{i}": 1 for i in range(INSTANCES)},
    **{f"instance_total_{i}": 10 * GIB for i in range(INSTANCES)},
    **{f"instance_used_{i}": 0 for i in range(INSTANCES)},
}
"""Every number of a GPU, with that of an idle, healthy one. Bytes, degrees Celsius, milliwatts, MHz, counts."""

FIELDS: dict[int, tuple[str, str, bool]] = {
    82: ("memory_temperature", "UNSIGNED_INT", False),
    91: ("links", "UNSIGNED_INT", False),
    94: ("replays", "UNSIGNED_INT", False),
    142: ("remapped_corrected", "UNSIGNED_INT", False),
    143: ("remapped_uncorrected", "UNSIGNED_INT", False),
    144: ("remap_pending", "UNSIGNED_INT", False),
    145: ("remap_failed", "UNSIGNED_INT", False),
    161: ("link_replay_0", "UNSIGNED_LONG_LONG", True),
    162: ("link_recovery_0", "UNSIGNED_LONG_LONG", True),
    163: ("link_crc_0", "UNSIGNED_LONG_LONG", True),
    193: ("shutdown_headroom", "SIGNED_INT", False),
    194: ("slowdown_headroom", "SIGNED_INT", False),
    195: ("memory_max_headroom", "SIGNED_INT", False),
    196: ("gpu_max_headroom", "SIGNED_INT", False),
    215: ("link_recovery_0", "UNSIGNED_LONG_LONG", True),
    219: ("link_effective_0", "UNSIGNED_LONG_LONG", True),
    230: ("recovery", "UNSIGNED_INT", False),
}
"""NVML field ids (nvml.h, `NVML_FI_DEV_*`): where the value lies, its type, and whether the scope is a link."""

CALLS: tuple[str, ...] = (
    "any",
    "nvmlInit",
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlEventSetCreate",
    "nvmlEventSetWait_v2",
    "nvmlDeviceRegisterEvents",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetSramEccErrorStatus",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPages",
    "nvmlDeviceGetRetiredPages_v2",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetPcieReplayCounter",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkErrorCounter",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
    "nvmlDeviceIsMigDeviceHandle",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetAttributes_v2",
    *(f"field_{number}" for number in FIELDS),
)
"""What can be made to fail or to hang, each by itself. `any` is every call; `field_<id>` one field of GetFieldValues."""

SIGNALS: dict[str, tuple[str, ...]] = {
    "utilisation": ("nvmlDeviceGetUtilizationRates",),
    "memory": ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"),
    "temperature": ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"),
    "memory_temperature": ("field_82",),
    "limits": ("nvmlDeviceGetTemperatureThreshold",),
    "headroom": ("nvmlDeviceGetMarginTemperature", "field_193", "field_194", "field_195", "field_196"),
    "power": (
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetPowerManagementLimit",
    ),
    "clocks": ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"),
    "reasons": ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
    "ecc": ("nvmlDeviceGetEccMode", "nvmlDeviceGetTotalEccErrors"),
    "sram": ("nvmlDeviceGetSramEccErrorStatus",),
    "remap": ("nvmlDeviceGetRemappedRows", "field_142", "field_143", "field_144", "field_145"),
    "retired": (
        "nvmlDeviceGetRetiredPages",
        "nvmlDeviceGetRetiredPages_v2",
        "nvmlDeviceGetRetiredPagesPendingStatus",
    ),
    "replays": ("nvmlDeviceGetPcieReplayCounter", "field_94"),
    "pcie": (
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetCurrPcieLinkGeneration",
        "nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    "links": ("nvmlDeviceGetNvLinkState", "field_91"),
    "link_errors": (
        "nvmlDeviceGetNvLinkErrorCounter",
        "field_161",
        "field_162",
        "field_163",
        "field_215",
        "field_219",
    ),
    "processes": ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"),
    "mig": ("nvmlDeviceGetMigMode",),
    "recovery": ("field_230",),
    "events": ("nvmlDeviceRegisterEvents",),
}
"""The calls that answer for one signal."""

TEXTS: dict[str, int] = {"uuid": 80, "name": 96, "serial": 32, "bus": 32}
SYSTEM_TEXTS: dict[str, int] = {"driver": 80, "nvml": 80, "stuck": 256}

HEADER = struct.Struct("=QQiiii" + f"{GPUS}i" + "".join(f"{size}s" for size in SYSTEM_TEXTS.values()))
RECORD = struct.Struct(
    "=" + "".join(f"{size}s" for size in TEXTS.values()) + f"{len(VALUES)}q" + f"{len(CALLS)}i" * 2,
)
EVENT = struct.Struct("=iiQQII")


def header_text() -> str:
    """The table as the C header `layout.h`."""
    numbers = {"GPUS": GPUS, "LINKS": LINKS, "PROCESSES": PROCESSES, "INSTANCES": INSTANCES}
    numbers |= {"FOREVER": FOREVER, "UNINTERRUPTIBLE": UNINTERRUPTIBLE}
    lines = [f"#define {name} ({number})" for name, number in numbers.items()]
    lines += [f"#define MAGIC {MAGIC}ULL", f"#define LAYOUT {digest()}ULL"]
    lines += [f"#define {name.upper()}_SIZE {size}" for name, size in (TEXTS | SYSTEM_TEXTS).items()]
    lines.append("#define VALUES(X) " + " ".join(f"X({name})" for name in VALUES))
    lines.append("#define CALLS(X) " + " ".join(f"X({name})" for name in CALLS))
    fields = (f"X({number}, {name}, {kind}, {int(link)})" for number, (name, kind, link) in FIELDS.items())
    lines.append("#define FIELDS(X) " + " ".join(fields))
    return "\n".join(lines) + "\n"


def digest() -> int:
    """A number that differs where the table does: a library of another version reads no state of this one."""
    text = repr((GPUS, LINKS, PROCESSES, INSTANCES, list(VALUES), FIELDS, CALLS, TEXTS, SYSTEM_TEXTS))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
