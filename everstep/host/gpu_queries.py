"""What is asked of one GPU through pynvml, and what the answers mean. Runs inside the probe.

Field ids and meanings are those of nvml.h. A call that a device, its mode or its driver does not offer gives no value; one
that fails otherwise gives none either and is named in `troubles`.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import pynvml as nvml

from everstep.host.probe_worker import Notes

NOT_OFFERED = frozenset(
    {
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_NO_PERMISSION,
        nvml.NVML_ERROR_NO_DATA,
        nvml.NVML_ERROR_INVALID_ARGUMENT,
        nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        nvml.NVML_ERROR_DEPRECATED,
        nvml.NVML_ERROR_NOT_READY,
    }
)
MAY_BE_MISSING = frozenset({"mig", "links", "link_errors", "processes"})
"""Queries about a part that may not be there: "not found" is an answer to these, and a trouble of any other."""
OF_THE_WHOLE = {
    nvml.NVML_ERROR_GPU_IS_LOST: "lost",
    nvml.NVML_ERROR_RESET_REQUIRED: "reset_required",
    nvml.NVML_ERROR_UNINITIALIZED: "error",
    nvml.NVML_ERROR_DRIVER_NOT_LOADED: "error",
    nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "error",
}
MAX_LINKS = 36
NVLINK_REPLAY, NVLINK_RECOVERY, NVLINK_CRC = 161, 162, 163  # before NVLink 5
NVLINK5_RECOVERY, NVLINK5_EFFECTIVE = 215, 219
_FIELDS_AT_ONCE = 64


class Gone(Exception):
    """The device as a whole does not answer any more; nothing else need be asked."""

    def __init__(self, answer: str, why: str) -> None:
        super().__init__(why)
        self.answer = answer
        self.why = why


class Device:
    """A GPU of the driver's list. `listen` registers its Xid events, and says whether they will be heard."""

    def __init__(self, index: int, listen: Callable[[Any, str], bool | None]) -> None:
        self.index = index
        self._listen = listen
        self._handle: Any = None
        self._identity: dict[str, Any] = {}
        self._limits: dict[str, Any] = {}

    def look(self, notes: Notes) -> None:
        """All readings, into `notes.values`, with `answer` and `why` for the device as a whole."""
        notes.values |= {"index": self.index, **self._identity}
        try:
            if not self._identity:
                self._open(notes)
            _Reading(self._handle, notes).all(self._limits)
            notes.values["answer"] = "ok"
        except Gone as gone:
            notes.values |= {"answer": gone.answer, "why": gone.why}

    def _open(self, notes: Notes) -> None:
        ask = _Reading(None, notes).must
        handle = ask("handle", nvml.nvmlDeviceGetHandleByIndex, self.index)
        identity = {"uuid": ask("uuid", nvml.nvmlDeviceGetUUID, handle)}
        notes.values |= identity
        reading = _Reading(handle, notes)
        pci = reading.ask("pci", nvml.nvmlDeviceGetPciInfo)
        identity["bus"] = _text(pci.busId) if pci else ""
        identity["model"] = reading.ask("name", nvml.nvmlDeviceGetName) or ""
        identity["serial"] = reading.ask("serial", nvml.nvmlDeviceGetSerial) or ""
        notes.begin("events")
        identity["events_heard"] = self._listen(handle, identity["uuid"])
        self._handle, self._identity = handle, identity
        notes.values |= identity


class _Reading:
    """The queries of one look."""

    def __init__(self, handle: Any, notes: Notes) -> None:
        self._handle = handle
        self._notes = notes
        self._found = notes.values

    def all(self, limits: dict[str, Any]) -> None:
        """Ask all. What never changes is kept in `limits` by the caller and asked once."""
        self._load()
        self._heat()
        self._errors()
        self._power()
        self._bus()
        if not limits:
            limits |= self._never_changing()
        self._found |= limits
        self._nvlink()
        self._users()

    def ask(self, query: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None where the device does not offer it. Raises `Gone` where the device as a whole is."""
        return self._try(query, call, self._handle, *arguments)

    def must(self, query: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer to what every device must answer. Raises `Gone`."""
        self._notes.begin(query)
        try:
            return call(*arguments)
        except nvml.NVMLError as error:
            raise Gone(OF_THE_WHOLE.get(error.value, "error"), f"{query}: {error}") from None

    def _try(self, query: str, call: Callable[..., Any], *arguments: Any) -> Any:
        self._notes.begin(query)
        try:
            return call(*arguments)
        except nvml.NVMLError as error:
            if error.value in OF_THE_WHOLE:
                raise Gone(OF_THE_WHOLE[error.value], f"{query}: {error}") from None
            missing = error.value == nvml.NVML_ERROR_NOT_FOUND and query in MAY_BE_MISSING
            if error.value not in NOT_OFFERED and not missing:
                self._trouble(query, str(error))
            return None

    def _trouble(self, query: str, why: str) -> None:
        self._found.setdefault("troubles", {})[query] = why

    def _number(self, query: str, value: float | None, low: float, high: float, scale: float = 1.0) -> float | None:
        """The value, if a device can have it: what drivers say of a dying GPU can be anything."""
        if value is None or low <= value * scale <= high:
            return None if value is None else value * scale
        self._trouble(query, f"reads {value}, which cannot be")
        return None

    # groups, the most telling ones first: what hangs later leaves their evidence

    def _load(self) -> None:
        rates = self.ask("utilisation", nvml.nvmlDeviceGetUtilizationRates)
        if rates is not None:
            self._found["utilisation_percent"] = self._number("utilisation", rates.gpu, 0, 100)
            self._found["memory_busy_percent"] = self._number("utilisation", rates.memory, 0, 100)
        memory = self.ask("memory", nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2)
        self._found["memory_reserved_bytes"] = memory.reserved if memory else None
        memory = memory or self.ask("memory", nvml.nvmlDeviceGetMemoryInfo)
        if memory:
            self._found |= {"memory_total_bytes": memory.total, "memory_used_bytes": memory.used}

    def _heat(self) -> None:
        query = "temperature"
        value = self.ask(query, nvml.nvmlDeviceGetTemperatureV, nvml.NVML_TEMPERATURE_GPU)
        if value is None:  # drivers before R565
            value = self.ask(query, nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        self._found["temperature_c"] = self._number(query, value, -100, 200)
        self._found["headroom_c"] = self.ask("headroom", nvml.nvmlDeviceGetMarginTemperature)
        got = self._fields("fields", [nvml.NVML_FI_DEV_MEMORY_TEMP, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        value = got.get((nvml.NVML_FI_DEV_MEMORY_TEMP, 0))
        self._found["memory_temperature_c"] = (
            self._number("memory_temperature", value, -100, 200) or None
        )  # 0: no sensor
        self._found["recovery_action"] = got.get((nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0))
        reasons = self.ask("clock_reasons", nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if reasons is None:  # drivers before R535
            reasons = self.ask("clock_reasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        self._found["clock_reasons"] = reasons

    def _errors(self) -> None:
        mode = self.ask("ecc", nvml.nvmlDeviceGetEccMode)
        if mode:
            self._found |= {"ecc_enabled": bool(mode[0]), "ecc_pending": bool(mode[1])}
        for kind, number in (("corrected", 0), ("uncorrected", 1)):
            for since, counter in (("volatile", nvml.NVML_VOLATILE_ECC), ("aggregate", nvml.NVML_AGGREGATE_ECC)):
                value = self.ask("ecc", nvml.nvmlDeviceGetTotalEccErrors, number, counter)
                self._found[f"ecc_{kind}_{since}"] = value
        sram = nvml.c_nvmlEccSramErrorStatus_v1_t()
        if self.ask("sram", nvml.nvmlDeviceGetSramEccErrorStatus, ctypes.byref(sram)) is not None:
            self._found["sram_threshold_exceeded"] = bool(sram.bThresholdExceeded)
        rows = self.ask("remapped_rows", nvml.nvmlDeviceGetRemappedRows)
        if rows:
            self._found |= {"remapped_corrected": rows[0], "remapped_uncorrected": rows[1]}
            self._found |= {"remap_pending": bool(rows[2]), "remap_failed": bool(rows[3])}
        causes = (
            ("retired_single_bit", nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS),
            ("retired_double_bit", nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR),
        )
        for name, cause in causes:
            pages = self.ask("retired_pages", nvml.nvmlDeviceGetRetiredPages, cause)
            self._found[name] = None if pages is None else len(pages)
        pending = self.ask("retired_pages", nvml.nvmlDeviceGetRetiredPagesPendingStatus)
        self._found["retired_pending"] = None if pending is None else bool(pending)

    def _power(self) -> None:
        for name, call in (
            ("power_w", nvml.nvmlDeviceGetPowerUsage),
            ("power_limit_w", nvml.nvmlDeviceGetEnforcedPowerLimit),
        ):
            self._found[name] = self._number(name, self.ask("power", call), 0, 20_000, 0.001)
        for name, clock in (("sm_clock_mhz", nvml.NVML_CLOCK_SM), ("memory_clock_mhz", nvml.NVML_CLOCK_MEM)):
            self._found[name] = self.ask("clocks", nvml.nvmlDeviceGetClockInfo, clock)

    def _bus(self) -> None:
        self._found |= {
            "pcie_replays": self.ask("pcie_replays", nvml.nvmlDeviceGetPcieReplayCounter),
            "pcie_width": self.ask("pcie", nvml.nvmlDeviceGetCurrPcieLinkWidth),
            "pcie_generation": self.ask("pcie", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        }

    def _never_changing(self) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        for name, which in (
            ("max_limit_c", nvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
            ("slowdown_limit_c", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            ("shutdown_limit_c", nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
            ("memory_limit_c", nvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
        ):
            value = self.ask("limits", nvml.nvmlDeviceGetTemperatureThreshold, which)
            limits[name] = self._number("limits", value, 1, 250)
        slowdown, shutdown = nvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT, nvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT
        got = self._fields("limits", [slowdown, shutdown])
        limits |= {"slowdown_headroom_c": got.get((slowdown, 0)), "shutdown_headroom_c": got.get((shutdown, 0))}
        limits |= {
            "sm_clock_max_mhz": self.ask("clocks", nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            "memory_clock_max_mhz": self.ask("clocks", nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM),
            "pcie_width_max": self.ask("pcie", nvml.nvmlDeviceGetMaxPcieLinkWidth),
            "pcie_generation_max": self.ask("pcie", nvml.nvmlDeviceGetMaxPcieLinkGeneration),
        }
        return limits

    def _nvlink(self) -> None:
        count = self._fields("links", [nvml.NVML_FI_DEV_NVLINK_LINK_COUNT]).get((nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0))
        states: dict[int, bool | None] = {}
        for number in range(MAX_LINKS if count is None else min(int(count), MAX_LINKS)):
            state = self.ask("links", nvml.nvmlDeviceGetNvLinkState, number)
            if state is None and count is None:
                break
            states[number] = None if state is None else bool(state)
        if not states:
            self._found["links"] = None if count is None else []
            return
        ids = (NVLINK_REPLAY, NVLINK_RECOVERY, NVLINK_CRC, NVLINK5_RECOVERY, NVLINK5_EFFECTIVE)
        got = self._fields("link_errors", [(one, link) for link in states for one in ids])
        self._found["links"] = [
            {
                "number": link,
                "active": active,
                "replay_errors": self._counted(got, link, nvml.NVML_NVLINK_ERROR_DL_REPLAY, NVLINK_REPLAY),
                "recovery_errors": self._counted(
                    got, link, nvml.NVML_NVLINK_ERROR_DL_RECOVERY, NVLINK_RECOVERY, NVLINK5_RECOVERY
                ),
                "crc_errors": self._counted(got, link, nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, NVLINK_CRC),
                "effective_errors": got.get((NVLINK5_EFFECTIVE, link)),
            }
            for link, active in states.items()
        ]

    def _counted(self, got: dict[tuple[int, int], int], link: int, counter: int, *fields: int) -> int | None:
        """An error counter of a link, by a field of newer drivers or, where there are none, the call of older ones."""
        if not got:
            value: int | None = self.ask("link_errors", nvml.nvmlDeviceGetNvLinkErrorCounter, link, counter)
            return value
        return next((got[field, link] for field in fields if (field, link) in got), None)

    def _users(self) -> None:
        held: dict[int, int | None] = {}
        calls = (nvml.nvmlDeviceGetComputeRunningProcesses_v3, nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3)
        answers = [self.ask("processes", call) for call in calls]
        for process in (one for answer in answers for one in answer or ()):
            held[process.pid] = process.usedGpuMemory
        told = any(answer is not None for answer in answers)
        self._found["processes"] = [{"pid": pid, "memory_bytes": size} for pid, size in held.items()] if told else None
        mode = self.ask("mig", nvml.nvmlDeviceGetMigMode)
        if mode:
            self._found |= {"mig_enabled": bool(mode[0]), "mig_pending": bool(mode[1])}
            self._found["instances"] = self._instances() if mode[0] else []

    def _instances(self) -> list[dict[str, Any]]:
        found = []
        for number in range(self.ask("mig", nvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            handle = self.ask("mig", nvml.nvmlDeviceGetMigDeviceHandleByIndex, number)
            if handle is None:
                continue
            part = _Reading(handle, self._notes)
            uuid = part.ask("mig", nvml.nvmlDeviceGetUUID)
            ids = [
                part.ask("mig", call) for call in (nvml.nvmlDeviceGetGpuInstanceId, nvml.nvmlDeviceGetComputeInstanceId)
            ]
            if uuid is None or None in ids:
                continue  # destroyed between two calls
            attributes = part.ask("mig", nvml.nvmlDeviceGetAttributes_v2)
            memory = part.ask("mig", nvml.nvmlDeviceGetMemoryInfo)
            one = {"uuid": uuid, "gpu_instance": ids[0], "compute_instance": ids[1]}
            one["slices"] = attributes.gpuInstanceSliceCount if attributes else None
            one |= {"memory_total_bytes": memory.total, "memory_used_bytes": memory.used} if memory else {}
            found.append(one)
        return found

    def _fields(self, query: str, wanted: Iterable[int | tuple[int, int]]) -> dict[tuple[int, int], int]:
        """The values of those fields that the device has, by (field, scope)."""
        wanted = list(wanted)
        found: dict[tuple[int, int], int] = {}
        for start in range(0, len(wanted), _FIELDS_AT_ONCE):
            values = self.ask(query, nvml.nvmlDeviceGetFieldValues, wanted[start : start + _FIELDS_AT_ONCE])
            for one in values or ():
                if one.nvmlReturn == nvml.NVML_SUCCESS:
                    found[one.fieldId, one.scopeId] = int(getattr(one.value, _MEMBERS.get(one.valueType, "ullVal")))
                elif one.nvmlReturn in OF_THE_WHOLE:
                    raise Gone(OF_THE_WHOLE[one.nvmlReturn], f"{query}: {nvml.NVMLError(one.nvmlReturn)}")
        return found


_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""`nvmlValueType_t`: the member of the union that holds the value."""


def _text(raw: str | bytes) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw
