"""The probe of the GPUs: `python -m everstep.host.gpu_probe <descriptor> <held>`, asked and killed by `host.gpus`.

Says `{"hello": {...}}` once the driver has answered, what each sweep finds, and `{"xid": {...}}` as events come. `held` is
JSON: seconds by GPU number for which a GPU is left alone, because the driver hung in it.
"""

import contextlib
import ctypes
import json
import sys
import threading
import time
from typing import Any

import pynvml as nvml

from everstep.host import probe_worker
from everstep.host.gpu_queries import Device

WAIT_MILLISECONDS = 1000
SETTLE_SECONDS = 3.0
NO_INSTANCE = 0xFFFFFFFF


class Ears:
    """Hears the Xid events of all GPUs and says them at once."""

    def __init__(self, voice: probe_worker.Voice, watch: probe_worker.Watch) -> None:
        self._voice = voice
        self._watch = watch
        self._known: dict[int, str] = {}
        self._set: Any = None
        with contextlib.suppress(nvml.NVMLError):
            self._set = nvml.nvmlEventSetCreate()

    def register(self, handle: Any, uuid: str) -> bool | None:
        """Whether events of it will be heard; None where the device or the driver does not offer them."""
        if self._set is None:
            return None
        try:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
        except nvml.NVMLError as error:
            return None if error.value == nvml.NVML_ERROR_NOT_SUPPORTED else False
        self._known[_address(handle)] = uuid
        return True

    def listen(self) -> None:
        """Never ends. Begins when all have registered that answer: not every driver lets them do so meanwhile."""
        self._watch.settled(SETTLE_SECONDS)
        pause = 1.0
        while self._set is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, WAIT_MILLISECONDS)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:  # a GPU that was lost spoils the wait for all
                    time.sleep(pause)
                    pause = min(2 * pause, 60.0)
                continue
            pause = 1.0
            self._say(event)

    def _say(self, event: Any) -> None:
        said = {"uuid": self._known.get(_address(event.device), ""), "xid": event.eventData, "time": time.time()}
        for name, number in (("gpu_instance", event.gpuInstanceId), ("compute_instance", event.computeInstanceId)):
            said[name] = None if number == NO_INSTANCE else number
        self._voice.say({"xid": said})


def main(arguments: list[str]) -> int:
    voice = probe_worker.Voice(int(arguments[0]))
    held = {str(number): float(seconds) for number, seconds in json.loads(arguments[1]).items()}
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        hello = {"driver": "present", "count": count, "version": _version()}
    except nvml.NVMLError as error:
        driver = "absent" if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND else "refused"
        voice.say({"hello": {"driver": driver, "why": str(error)}})
        return 0
    watch = probe_worker.Watch(voice)
    ears = Ears(voice, watch)
    devices = {str(index): Device(index, ears.register).look for index in range(count)}
    watch.keep(devices, held)
    watch.begin()
    voice.say({"hello": hello})
    threading.Thread(target=ears.listen, daemon=True).start()
    probe_worker.serve(watch, lambda: None)
    return 0


def _version() -> str:
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return ""


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
