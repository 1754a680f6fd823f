"""What an NVML says to the calls that the sampler makes, as JSON on stdout: of the real driver, or of the stand-in.

For each structure: the return code, how many of its bytes were written, whether any beyond its end, and what becomes of a
version that there is not. For each field: its type. Run in a process of its own, as a driver may hang.
"""

import ctypes
import json

import pynvml as nvml

from everstep.sim.nvml import layout

UNTOUCHED = 0xA5
BEYOND = 64

STRUCTURES = {
    "nvmlDeviceGetUtilizationRates": (nvml.c_nvmlUtilization_t, None),
    "nvmlDeviceGetMemoryInfo": (nvml.c_nvmlMemory_t, None),
    "nvmlDeviceGetMemoryInfo_v2": (nvml.c_nvmlMemory_v2_t, nvml.nvmlMemory_v2),
    "nvmlDeviceGetPciInfo_v3": (nvml.nvmlPciInfo_t, None),
    "nvmlDeviceGetTemperatureV": (nvml.c_nvmlTemperature_v1_t, nvml.nvmlTemperature_v1),
    "nvmlDeviceGetMarginTemperature": (nvml.c_nvmlMarginTemperature_v1_t, nvml.nvmlMarginTemperature_v1),
    "nvmlDeviceGetSramEccErrorStatus": (nvml.c_nvmlEccSramErrorStatus_v1_t, nvml.nvmlEccSramErrorStatus_v1),
}
"""Each call: the structure that it fills, and the version that it carries in its first word, if it has one."""

TYPES = {"UNSIGNED_INT": 1, "UNSIGNED_LONG_LONG": 3, "SIGNED_INT": 5}
"""`nvmlValueType_t`, by the names in the stand-in's table."""


def look() -> dict[str, object]:
    """Everything, of the first GPU."""
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "model": _text(nvml.nvmlDeviceGetName(handle)),
        "structures": {name: _structure(name, handle, *what) for name, what in STRUCTURES.items()},
        "fields": {str(number): _field(handle, number) for number in layout.FIELDS},
    }


def _structure(name, handle, kind, version) -> dict[str, object]:
    size = ctypes.sizeof(kind)
    code, written, beyond = _call(name, handle, size, version)
    said = {"size": size, "code": code, "written": written, "beyond": beyond}
    if version is not None:
        said |= {"version": version, "unknown_version": _call(name, handle, size, version + 0x5000000)[0]}
    return said


def _call(name, handle, size, version) -> tuple[int, int, bool]:
    """The return code, the end of the last byte that was written, and whether any was beyond the structure."""
    try:
        function = nvml._nvmlGetFunctionPointer(name)
    except nvml.NVMLError as error:
        return error.value, 0, False
    buffer = (ctypes.c_ubyte * (size + BEYOND))(*[UNTOUCHED] * (size + BEYOND))
    if version is not None:
        ctypes.memmove(buffer, version.to_bytes(4, "little") + bytes(4), 8 if size > 8 else 4)
    before = bytes(buffer)
    code = function(handle, ctypes.byref(buffer))
    changed = [at for at, (old, new) in enumerate(zip(before, bytes(buffer), strict=True)) if old != new]
    return code, 1 + max((at for at in changed if at < size), default=-1), any(at >= size for at in changed)


def _field(handle, number) -> dict[str, int]:
    (got,) = nvml.nvmlDeviceGetFieldValues(handle, [(number, 0)])
    return {"code": got.nvmlReturn, "type": got.valueType}


def differences(real, stand_in) -> list[str]:
    """Where the stand-in would let code pass that the driver would not understand, in words."""
    found = []
    for name, said in real["structures"].items():
        ours = stand_in["structures"][name]
        if said["beyond"]:
            found.append(f"{name}: the driver writes beyond the {said['size']} bytes that pynvml gives it")
        if said["code"] == nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH and ours["code"] == 0:
            found.append(f"{name}: the driver does not know version {said['version']:#x}")
        if said["code"] == ours["code"] == 0 and said["written"] > ours["written"] and ours["written"] == 0:
            found.append(f"{name}: the driver fills {said['written']} bytes, the stand-in none")
        if said.get("unknown_version", 1) == 0 != ours["unknown_version"]:
            found.append(f"{name}: the driver takes any version, the stand-in does not")
    for number, (name, kind, _) in layout.FIELDS.items():
        said = real["fields"][str(number)]
        if said["code"] == 0 and said["type"] != TYPES[kind]:
            found.append(f"field {number} ({name}): the driver's type is {said['type']}, the stand-in's {TYPES[kind]}")
    return found


def _text(raw) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


if __name__ == "__main__":
    print(json.dumps(look()))
