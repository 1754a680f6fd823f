"""A node's own signals: each raised and cleared in a /proc and /sys of the test's, and read from the real ones."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.core.host import HostSample, Looked
from everstep.host import host_readings
from everstep.host.host_signals import HostSampler

MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 259:1 / /data rw,relatime shared:1 - xfs /dev/nvme0n1 {options}
31 27 0:50 / /mnt/with\\040space rw,relatime - nfs4 server:/export rw,vers=4.2
32 27 0:26 / /dev/shm rw - tmpfs tmpfs rw
33 27 0:27 / /run/lock rw - tmpfs tmpfs rw
34 27 254:0 /x /etc/hosts rw - ext4 /dev/vda rw
35 27 7:1 / /snap/core ro - squashfs /dev/loop1 ro
"""
MEMINFO = "MemTotal:       2000 kB\nMemFree: 1 kB\nMemAvailable:   {available} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
PRESSURE = "some avg10={some} avg60=1.50 avg300=0.00 total=1\nfull avg10=0.25 avg60=0.10 avg300=0.00 total=0\n"
PORT = "sys/class/infiniband/mlx5_0/ports/1/"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def stat(name: str, state: str, flags: int = 0x400000, born: int = 77) -> str:
    """/proc/<pid>/stat: the state is field 3, flags 9, start time 22 (proc(5))."""
    return f"9 ({name}) {state} 1 1 1 0 -1 {flags} " + " ".join(["0"] * 12) + f" {born} 0 0\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for folder in ("data", "mnt/with space", "dev/shm"):
        (root / folder).mkdir(parents=True)
    write(
        root,
        {
            "proc/self/mountinfo": MOUNTINFO.format(options="rw"),
            "proc/meminfo": MEMINFO.format(available=1500),
            "proc/vmstat": "pgfault 5\noom_kill 0\n",
            "proc/pressure/memory": PRESSURE.format(some="0.00"),
            "proc/uptime": "3600.5 7000.0\n",
            "proc/sys/kernel/random/boot_id": "b0071d\n",
            "proc/9/task/9/stat": stat("python", "S"),
            "proc/10/task/10/stat": stat("a) (b", "R"),
            "sys/class/net/eth0/device/vendor": "0x15b3\n",
            "sys/class/net/eth0/operstate": "up\n",
            "sys/class/net/eth0/carrier": "1\n",
            "sys/class/net/eth0/speed": "100000\n",
            "sys/class/net/eth0/carrier_changes": "2\n",
            "sys/class/net/eth0/statistics/rx_errors": "0\n",
            "sys/class/net/lo/operstate": "unknown\n",
            PORT + "state": "4: ACTIVE\n",
            PORT + "phys_state": "5: LinkUp\n",
            PORT + "rate": "400 Gb/sec (4X NDR)\n",
            PORT + "link_layer": "InfiniBand\n",
            PORT + "counters/symbol_error": "0\n",
            PORT + "counters/link_downed": "0\n",
            PORT + "counters/no_pma": "N/A (no PMA)\n",
            PORT + "hw_counters/rnr_nak_retry_err": "0\n",
            "sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n",
            "sys/bus/pci/devices/0000:1b:00.0/class": "0x030200\n",
            "sys/bus/pci/devices/0000:1b:00.1/vendor": "0x10de\n",
            "sys/bus/pci/devices/0000:1b:00.1/class": "0x040300\n",
            "sys/bus/pci/devices/0000:2b:00.0/vendor": "0x15b3\n",
        },
    )
    return root


@pytest.fixture
def sampler(root: Path, tmp_path: Path) -> Iterator[HostSampler]:
    with HostSampler(root, within=5.0, log=tmp_path / "log") as made:
        yield made


def stuck(sample: HostSample) -> list[tuple[int, int, str, bool]]:
    return [(one.pid, one.task, one.name, one.kernel) for one in sample.stuck or ()]


def port(sample: HostSample) -> object:
    (one,) = sample.ports or ()
    return one.state, one.physical, one.counters["link_downed"], one.counters["rnr_nak_retry_err"]


def nic(sample: HostSample) -> object:
    (one,) = sample.nics or ()
    return one.up, one.carrier, one.speed_mbit, one.carrier_changes, one.counters


SIGNALS = {
    "read-only mount": (
        {"proc/self/mountinfo": MOUNTINFO.format(options="ro")},
        {"proc/self/mountinfo": MOUNTINFO.format(options="rw")},
        lambda s: s.mount_of("/data/x").read_only,
        False,
        True,
    ),
    "memory": (
        {"proc/meminfo": MEMINFO.format(available=3)},
        {"proc/meminfo": MEMINFO.format(available=1500)},
        lambda s: s.memory.available_bytes,
        1500 * 1024,
        3 * 1024,
    ),
    "memory pressure": (
        {"proc/pressure/memory": PRESSURE.format(some="43.21")},
        {"proc/pressure/memory": PRESSURE.format(some="0.00")},
        lambda s: (s.memory.pressure.some_10s, s.memory.pressure.full_60s),
        (0.0, 0.1),
        (43.21, 0.1),
    ),
    "kills for memory": (
        {"proc/vmstat": "oom_kill 2\n"},
        {"proc/vmstat": "oom_kill 0\n"},
        lambda s: s.memory.oom_kills,
        0,
        2,
    ),
    "stuck task": (
        {"proc/9/task/9/stat": stat("python", "D"), "proc/10/task/11/stat": stat("nvidia) D 1", "D", 0x208040)},
        {"proc/9/task/9/stat": stat("python", "S"), "proc/10/task/11/stat": stat("nvidia) D 1", "S", 0x208040)},
        stuck,
        [],
        [(9, 9, "python", False), (10, 11, "nvidia) D 1", True)],
    ),
    "network link": (
        {f"sys/class/net/eth0/{name}": text for name, text in
         {"operstate": "down\n", "carrier": "0\n", "speed": "-1\n", "carrier_changes": "3\n", "statistics/rx_errors": "8\n"}.items()},
        {f"sys/class/net/eth0/{name}": text for name, text in
         {"operstate": "up\n", "carrier": "1\n", "speed": "100000\n", "carrier_changes": "2\n", "statistics/rx_errors": "0\n"}.items()},
        nic,
        (True, True, 100_000, 2, {"rx_errors": 0}),
        (False, False, None, 3, {"rx_errors": 8}),
    ),
    "InfiniBand port": (
        {PORT + "state": "1: DOWN\n", PORT + "phys_state": "2: Polling\n", PORT + "counters/link_downed": "1\n", PORT + "hw_counters/rnr_nak_retry_err": "5\n"},
        {PORT + "state": "4: ACTIVE\n", PORT + "phys_state": "5: LinkUp\n", PORT + "counters/link_downed": "0\n", PORT + "hw_counters/rnr_nak_retry_err": "0\n"},
        port,
        ("ACTIVE", "LinkUp", 0, 0),
        ("DOWN", "Polling", 1, 5),
    ),
    "GPU on the bus": (
        {"sys/bus/pci/devices/0000:1b:00.0/vendor": "\n"},
        {"sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n"},
        lambda s: s.pci_gpus,
        ("0000:1b:00.0",),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_comes_and_goes(root, sampler, name):
    raised, cleared, read, quiet, loud = SIGNALS[name]
    write(root, cleared)
    assert read(sampler.sample()) == quiet
    write(root, raised)
    assert read(sampler.sample()) == loud
    write(root, cleared)
    got = sampler.sample()
    assert read(got) == quiet
    assert (got.unanswered, got.troubles, got.left_behind) == ((), {}, 0)


def test_mounts_that_hold_data_are_read_and_others_are_not(sampler):
    got = sampler.sample()
    assert {one.path: one.kind for one in got.mounts or ()} == {
        "/": "ext4",
        "/data": "xfs",
        "/dev/shm": "tmpfs",
        "/mnt/with space": "nfs4",
    }
    assert got.mount_of("/data/deep/down").path == "/data"
    assert got.mount_of("/database").path == "/"
    data = got.mount_of("/data")
    assert 0 < data.free_bytes <= data.total_bytes
    assert 0 <= data.used_percent <= 100
    assert (got.boot_id, got.uptime_s) == ("b0071d", 3600.5)
    assert got.clock is None  # another root has no clock


def test_mount_that_fails_or_vanishes_is_told_and_the_others_are_read(root, sampler):
    (root / "mnt/with space").rmdir()
    got = sampler.sample()
    gone = got.mount_of("/mnt/with space")
    assert (gone.looked, gone.total_bytes) == (Looked.error, None)
    assert "No such file" in gone.why
    assert got.mount_of("/data").looked is Looked.ok
    write(root, {"proc/self/mountinfo": MOUNTINFO.format(options="rw").replace("/mnt/with", "/mnt/other")})
    (root / "mnt/other space").mkdir()
    assert {one.path for one in sampler.sample().mounts or ()} == {"/", "/data", "/dev/shm", "/mnt/other space"}


def test_what_a_kernel_lacks_is_not_measured(tmp_path):
    write(tmp_path, {"proc/self/mountinfo": ""})
    with HostSampler(tmp_path, within=5.0) as sampler:
        got = sampler.sample()
    assert (got.mounts, got.nics, got.ports, got.pci_gpus, got.stuck) == ((), (), (), (), ())
    assert got.memory.total_bytes is None
    assert got.memory.pressure is None
    assert (got.unanswered, got.troubles) == ((), {})


def test_stuck_task_ages_until_it_moves_or_is_another(root, tmp_path):
    clock = [100.0]
    with HostSampler(root, within=5.0, clock=lambda: clock[0]) as sampler:
        write(root, {"proc/9/task/9/stat": stat("python", "D"), "proc/9/task/9/wchan": "rpc_wait_bit_killable"})
        (one,) = sampler.sample().stuck
        assert (one.seconds, one.waits_in) == (0, "rpc_wait_bit_killable")
        clock[0] += 300
        assert [one.seconds for one in sampler.sample().stuck] == [300]
        write(root, {"proc/9/task/9/stat": stat("python", "D", born=78)})  # the number is another task's now
        clock[0] += 5
        assert [one.seconds for one in sampler.sample().stuck] == [0]
        write(root, {"proc/9/task/9/stat": stat("python", "R", born=78)})
        assert sampler.sample().stuck == ()


def test_this_machine_is_read(tmp_path):
    with HostSampler(within=5.0, log=tmp_path / "log") as sampler:
        got = sampler.sample()
    assert got.mount_of("/").total_bytes > 0
    assert got.memory.total_bytes >= got.memory.available_bytes > 0
    assert got.node == os.uname().nodename
    assert got.clock is None or got.clock.source in ("chrony", "kernel")
    assert HostSample.model_validate_json(got.model_dump_json()) == got


def test_full_disk_and_read_only_mount(tmp_path, mount):
    mount(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs")
    with HostSampler(within=5.0) as sampler:
        at = str(tmp_path / "small")
        before = sampler.sample().mount_of(at)
        assert (before.path, before.read_only) == (at, False)
        (tmp_path / "small" / "file").write_bytes(bytes(1 << 20))
        assert sampler.sample().mount_of(at).used_percent == 100
        mount(tmp_path / "small", "-o", "remount,ro")
        assert sampler.sample().mount_of(at).read_only is True


def test_mount_that_hangs_is_told_and_delays_nothing_twice(tmp_path):
    from rigs import fuse

    why = fuse.why_not()
    if why:
        pytest.skip(why)
    with fuse.mount(tmp_path / "fuse") as tier, HostSampler(within=1.0) as sampler:
        at = str(tier.path)
        assert sampler.sample().mount_of(at).looked is Looked.ok
        tier.plan(fuse.Fault("hang", "statfs"))
        try:
            begun = time.monotonic()
            first = sampler.sample()
            assert time.monotonic() - begun < 1.0 + 0.5 + 2.0
            assert first.mount_of(at).looked is Looked.hung
            assert f"mount {at}" in first.unanswered
            assert first.mount_of("/").looked is Looked.ok
            waits = []
            for _ in range(5):
                begun = time.monotonic()
                assert sampler.sample().mount_of(at).looked is Looked.hung
                waits.append(time.monotonic() - begun)
            assert min(waits) < 0.9  # it is not waited for again
        finally:
            tier.clear()
        end = time.monotonic() + 30
        while sampler.sample().mount_of(at).looked is not Looked.ok:
            assert time.monotonic() < end


def test_probe_that_says_nothing_is_told(tmp_path):
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with HostSampler(within=0.2, argv=argv, start_seconds=0.5) as sampler:
        got = sampler.sample()
        assert got.unanswered == ("probe",)
        assert "no answer" in got.troubles["probe"]
        assert got.mounts is None
        assert got.memory is None


TRACKING = """\
Reference ID    : A9FEA97B (169.254.169.123)
Stratum         : 4
Ref time (UTC)  : Tue Dec 01 10:00:00 2026
System time     : 0.012000000 seconds {side} of NTP time
Last offset     : -0.000001234 seconds
RMS offset      : 0.000004321 seconds
Frequency       : 5.123 ppm slow
Residual freq   : -0.000 ppm
Skew            : 0.012 ppm
Root delay      : 0.000400000 seconds
Root dispersion : 0.000300000 seconds
Update interval : 16.1 seconds
Leap status     : {leap}
"""


@pytest.mark.parametrize(("side", "offset"), [("slow", -0.012), ("fast", 0.012)])
def test_clock_by_chrony(side, offset):
    got = host_readings.parse_chrony(TRACKING.format(side=side, leap="Normal"))
    assert got["offset_s"] == offset
    assert got["synchronised"] is True
    assert got["error_bound_s"] == pytest.approx(0.0125)


def test_clock_that_nobody_sets_and_chrony_that_does_not_answer(tmp_path, monkeypatch):
    assert host_readings.parse_chrony(TRACKING.format(side="fast", leap="Not synchronised"))["synchronised"] is False
    assert host_readings.parse_chrony("506 Cannot talk to daemon\n") is None
    program = tmp_path / "chronyc"
    program.write_text(
        "#!/bin/sh\ntest \"$*\" = '-n tracking' && cat <<'EOF'\n"
        + TRACKING.format(side="slow", leap="Normal")
        + "EOF\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert host_readings.clock()["source"] == "chrony"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(host_readings, "CHRONY_SECONDS", 0.2)
    got = host_readings.clock()
    assert got is None or got["source"] == "kernel"


def test_nothing_is_left_behind(root):
    with HostSampler(root) as sampler:
        sampler.sample()
        pid = sampler._probe.pid
        assert subprocess.run(["kill", "-0", str(pid)], check=False).returncode == 0
    assert not Path(f"/proc/{pid}").exists()
