"""The probe of the node: `python -m everstep.host.host_probe <descriptor> <root>`, asked and killed by `host.host_signals`.

Each mount and each port has a thread of its own, so that one whose server or firmware hangs costs the others nothing.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from everstep.host import host_readings, probe_worker
from everstep.host.probe_worker import Look, Notes


def main(arguments: list[str]) -> int:
    voice = probe_worker.Voice(int(arguments[0]))
    root = Path(arguments[1])
    watch = probe_worker.Watch(voice)
    probe_worker.serve(watch, lambda: watch.keep(_looks(root)))
    return 0


def _looks(root: Path) -> dict[str, Look]:
    """What there is to look at just now."""
    looks: dict[str, Look] = {
        "memory": partial(_value, host_readings.memory, root),
        "stuck": partial(_value, host_readings.stuck_tasks, root),
        "nics": partial(_value, host_readings.nics, root),
        "pci_gpus": partial(_value, host_readings.pci_gpus, root),
        "boot": partial(_value, host_readings.boot, root),
    }
    if root == Path("/"):  # there is one clock, whatever root is read
        looks["clock"] = partial(_value, host_readings.clock)
    for mount in host_readings.mounts(root):
        looks[f"mount {mount['path']}"] = partial(_mount, root, mount)
    for device, number in host_readings.ports(root):
        looks[f"port {device}/{number}"] = partial(_port, root, device, number)
    return looks


def _value(read: Any, *arguments: Any) -> None:
    """The last argument are the notes."""
    *rest, notes = arguments
    notes.values["value"] = read(*rest)


def _mount(root: Path, mount: dict[str, Any], notes: Notes) -> None:
    notes.values |= mount
    notes.begin("statvfs")
    notes.values |= host_readings.space(root, mount["path"])


def _port(root: Path, device: str, number: int, notes: Notes) -> None:
    notes.values |= {"device": device, "port": number}
    notes.begin("counters")
    notes.values |= host_readings.port(root, device, number)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
