"""What /proc and /sys say of a node, apart from its GPUs: values as plain dictionaries, for `core.host`.

Every function takes the root under which /proc and /sys lie. What a kernel does not have is None. None of these files
blocks, but `port` (the adapter's firmware is asked) and `space` (a server may be asked), which the probe calls in threads.
"""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_MOUNTS = 64
MAX_TASKS = 20_000
CHRONY_SECONDS = 1.0

_PSEUDO = frozenset(
    {
        "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "cramfs", "debugfs", "devpts", "devtmpfs",
        "efivarfs", "erofs", "fuse.lxcfs", "fusectl", "hugetlbfs", "iso9660", "mqueue", "nfsd", "nsfs", "proc",
        "pstore", "ramfs", "rpc_pipefs", "securityfs", "selinuxfs", "squashfs", "sysfs", "tracefs",
    }
)  # fmt: skip
_CONTAINER_FILES = frozenset({"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"})
_NOT_DATA = re.compile(r"/(proc|sys|run|var/run|var/lib/(kubelet|docker|containers|containerd))(/|$)")
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, include/linux/sched.h
_NIC_COUNTERS = (
    "rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors", "rx_missed_errors",
    "rx_fifo_errors", "tx_carrier_errors", "tx_fifo_errors",
)  # fmt: skip


def mounts(root: Path) -> list[dict[str, Any]]:
    """The mounted file systems that hold data, shortest paths first, at most `MAX_MOUNTS`. Asks no file system."""
    found: dict[str, dict[str, Any]] = {}
    for line in (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, source, *options) = before.split(" "), after.split(" ")
        path = _unescaped(fields[4])
        if kind in _PSEUDO or path in _CONTAINER_FILES or _NOT_DATA.match(path):
            continue
        if kind == "tmpfs" and path.startswith("/dev/") and path != "/dev/shm":  # noqa: S108 - a name, not a use of it
            continue
        read_only = "ro" in fields[5].split(",") or "ro" in (options[-1].split(",") if options else ())
        found[path] = {"path": path, "source": _unescaped(source), "kind": kind, "read_only": read_only}
    return sorted(found.values(), key=lambda one: len(one["path"]))[:MAX_MOUNTS]


def space(root: Path, path: str) -> dict[str, Any]:
    """Room on the file system at `path`. Hangs where its server does; raises OSError."""
    got = os.statvfs(root / path.lstrip("/"))
    counted = got.f_files > 0
    return {
        "total_bytes": (got.f_blocks - got.f_bfree + got.f_bavail) * got.f_frsize,
        "free_bytes": got.f_bavail * got.f_frsize,
        "files_total": got.f_files if counted else None,
        "files_free": got.f_favail if counted else None,
    }


def memory(root: Path) -> dict[str, Any]:
    """Memory, swap, kills for want of memory, and pressure."""
    kilobytes = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        kilobytes[name] = _number(value.split()[0]) if value.split() else None
    names = {
        "total_bytes": "MemTotal",
        "available_bytes": "MemAvailable",
        "swap_total_bytes": "SwapTotal",
        "swap_free_bytes": "SwapFree",
    }
    found: dict[str, Any] = {}
    for field, name in names.items():
        size = kilobytes.get(name)
        found[field] = None if size is None else size * 1024
    kills = re.search(r"^oom_kill (\d+)$", _text(root / "proc/vmstat"), re.MULTILINE)
    found["oom_kills"] = int(kills[1]) if kills else None
    found["pressure"] = pressure(root, "memory")
    found["io_pressure"] = pressure(root, "io")
    return found


def pressure(root: Path, what: str) -> dict[str, Any] | None:
    """Stall information of `memory`, `io` or `cpu`."""
    found: dict[str, float] = {}
    for line in _text(root / "proc/pressure" / what).splitlines():
        kind, *pairs = line.split()
        for pair in pairs:
            name, _, value = pair.partition("=")
            if name in ("avg10", "avg60"):
                found[f"{kind}_{name[3:]}s"] = float(value)
    return found if {"some_10s", "some_60s"} <= set(found) else None


def stuck_tasks(root: Path) -> list[dict[str, Any]]:
    """The tasks in uninterruptible sleep at this moment; `born` tells a task from a later one of the same number.

    Reads `stat` only: other files of such a process can hang themselves.
    """
    found = []
    for number, (pid, folder) in enumerate(_tasks(root / "proc")):
        if number >= MAX_TASKS:
            break
        text = _text(folder / "stat")
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        if len(fields) < 20 or fields[0] != "D":
            continue
        where = _text(folder / "wchan").strip()
        found.append(
            {
                "pid": pid,
                "task": int(folder.name),
                "name": name,
                "kernel": bool(int(fields[6]) & _KERNEL_THREAD),
                "born": int(fields[19]),
                "waits_in": "" if where == "0" else where,
            }
        )
    return found


def nics(root: Path) -> list[dict[str, Any]]:
    """Network interfaces with hardware behind them, and bonds of such."""
    found = []
    for folder in sorted(_folders(root / "sys/class/net")):
        if not (folder / "device").exists() and not (folder / "bonding").exists():
            continue
        state = _text(folder / "operstate").strip()
        carrier = _number(_text(folder / "carrier"))
        speed = _number(_text(folder / "speed"))
        found.append(
            {
                "name": folder.name,
                "up": None if state in ("", "unknown") else state == "up",
                "carrier": None if carrier is None else bool(carrier),
                "speed_mbit": speed if speed is not None and speed > 0 else None,
                "carrier_changes": _number(_text(folder / "carrier_changes")),
                "counters": _counters(folder / "statistics", _NIC_COUNTERS),
            }
        )
    return found


def ports(root: Path) -> list[tuple[str, int]]:
    """The ports of InfiniBand and RoCE adapters, by device and number."""
    return [
        (device.name, int(port.name))
        for device in sorted(_folders(root / "sys/class/infiniband"))
        for port in sorted(_folders(device / "ports"))
        if port.name.isdigit()
    ]


def port(root: Path, device: str, number: int) -> dict[str, Any]:
    """State, rate and counters of a port. May hang with the adapter's firmware."""
    folder = root / "sys/class/infiniband" / device / "ports" / str(number)
    rate = re.match(r"[\d.]+", _text(folder / "rate"))
    return {
        "state": _text(folder / "state").partition(":")[2].strip(),
        "physical": _text(folder / "phys_state").partition(":")[2].strip(),
        "layer": _text(folder / "link_layer").strip(),
        "rate_gbit": float(rate[0]) if rate else None,
        "counters": _counters(folder / "counters") | _counters(folder / "hw_counters"),
    }


def pci_gpus(root: Path) -> list[str]:
    """The PCI addresses of NVIDIA GPUs (display and 3D controllers), whether a driver has them or not."""
    return [
        folder.name
        for folder in sorted(_folders(root / "sys/bus/pci/devices"))
        if _text(folder / "vendor").strip() == "0x10de" and _text(folder / "class").startswith(("0x0300", "0x0302"))
    ]


def boot(root: Path) -> dict[str, Any]:
    uptime = _text(root / "proc/uptime").split()
    return {
        "boot_id": _text(root / "proc/sys/kernel/random/boot_id").strip(),
        "uptime_s": float(uptime[0]) if uptime else None,
    }


def clock() -> dict[str, Any] | None:
    """How far this machine's clock is off: by chrony where it runs, else by the kernel where it may be asked."""
    return _chrony() or _kernel_clock()


def parse_chrony(text: str) -> dict[str, Any] | None:
    """The output of `chronyc tracking`. The bound is chrony's own: offset + root dispersion + root delay / 2."""
    found = dict(re.findall(r"^([A-Z][\w ]*?)\s*: (.+)$", text, re.MULTILINE))
    system = re.fullmatch(r"([\d.]+) seconds (slow|fast) of NTP time", found.get("System time", ""))
    if not system:
        return None
    offset = float(system[1]) * (1 if system[2] == "fast" else -1)
    seconds = [re.match(r"([\d.]+) seconds", found.get(name, "")) for name in ("Root dispersion", "Root delay")]
    known = [float(one[1]) for one in seconds if one]
    return {
        "source": "chrony",
        "synchronised": found.get("Leap status") != "Not synchronised",
        "offset_s": offset,
        "error_bound_s": abs(offset) + known[0] + known[1] / 2 if len(known) == 2 else None,
    }


def _chrony() -> dict[str, Any] | None:
    program = shutil.which("chronyc")
    if not program:
        return None
    try:
        done = subprocess.run(
            [program, "-n", "tracking"],
            capture_output=True,
            text=True,
            check=True,
            timeout=CHRONY_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_chrony(done.stdout)


class _Timex(ctypes.Structure):
    """`struct timex` of adjtimex(2)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


_UNSYNCHRONISED, _NANOSECONDS = 0x40, 0x2000  # STA_UNSYNC, STA_NANO
_NEVER_SET = 16_000_000  # microseconds: what the kernel's maximum error grows to where nobody disciplines the clock


def _kernel_clock() -> dict[str, Any] | None:
    timex = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0:  # modes 0: read only, anybody may
        return None
    synchronised = not timex.status & _UNSYNCHRONISED
    known = synchronised and timex.maxerror < _NEVER_SET
    unit = 1e-9 if timex.status & _NANOSECONDS else 1e-6
    return {
        "source": "kernel",
        "synchronised": synchronised,
        "offset_s": -timex.offset * unit if known else None,  # the kernel's is what it still has to add
        "error_bound_s": timex.maxerror * 1e-6 if known else None,
    }


def _tasks(proc: Path) -> Iterator[tuple[int, Path]]:
    for folder in _folders(proc):
        if folder.name.isdigit():
            for task in _folders(folder / "task"):
                yield int(folder.name), task


def _folders(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _counters(folder: Path, names: tuple[str, ...] | None = None) -> dict[str, int]:
    files = [folder / name for name in names] if names else sorted(_folders(folder))[:128]
    read = {file.name: _number(_text(file)) for file in files}
    return {name: value for name, value in read.items() if value is not None}


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):  # gone meanwhile, not offered by this kernel, or no value now
        return file.read_text(errors="replace")
    return ""


def _number(text: str) -> int | None:
    with contextlib.suppress(ValueError):
        return int(text)
    return None


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
