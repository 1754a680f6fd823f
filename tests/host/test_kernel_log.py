"""Logs that are followed: the kernel's ring, the journal, files that rotate; a storm costs little and is one finding."""

import os
import socket
import subprocess
import sys
import time
import tracemalloc

import pytest

from everstep.core.log_lines import Origin
from everstep.host.kernel_log import JournalPipe, Kmsg, open_kernel_log, place_of
from everstep.host.log_file import LONGEST_LINE, LogFile, LogFiles
from everstep.host.log_follower import BURST_SECONDS, LogFollower

XID = "NVRM: Xid (PCI:0000:3b:00): {code}, pid={pid}, name=python, Ch 00000008"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


class Ring:
    """Records as /dev/kmsg gives them, one at a read."""

    def __init__(self):
        self.near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.handle = far.detach()
        self.serial = 0

    def print(self, message, priority=3, ago=0.0):
        self.serial += 1
        micro = int((time.clock_gettime(time.CLOCK_MONOTONIC) - ago) * 1e6)
        self.near.send(f"{priority},{self.serial},{micro},-;{message}\n SUBSYSTEM=pci\n".encode())


@pytest.fixture
def ring():
    made = Ring()
    yield made
    made.near.close()


class Ticks:
    """A clock that is passed: each look moves it by `step`."""

    def __init__(self, now=1000.0, step=0.0):
        self.now = now
        self.step = step

    def __call__(self):
        self.now += self.step
        return self.now


def follow(*sources, **more):
    return LogFollower(sources, **more)


def polled(follower, times=3):
    return [one for _ in range(times) for one in follower.poll()]


def test_the_kernels_ring_is_read_with_the_times_of_its_records(ring):
    follower = follow(Kmsg(ring.handle))
    ring.print("usb 1-1: new high-speed USB device")
    ring.print(XID.format(code=79, pid=1))
    (found,) = polled(follower)
    assert (found.xid, found.device, found.severity.value) == (79, "0000:3b:00", "critical")
    assert abs(found.time - time.time()) < 5
    assert polled(follower) == []


def test_a_record_that_was_not_there_at_the_last_look_is_no_older(ring):
    """The kernel's stamps stay behind the clock where a machine was suspended or moved."""
    follower = follow(Kmsg(ring.handle))
    ring.print(XID.format(code=48, pid=1), ago=30)
    (found,) = polled(follower)
    assert found.time == pytest.approx(time.time() - 30, abs=5), "of what was there before nobody knows better"
    ring.print(XID.format(code=79, pid=1), ago=30)
    (found,) = polled(follower)
    assert found.time == pytest.approx(time.time(), abs=5)


def test_what_a_program_wrote_into_the_kernels_log_is_no_witness(ring):
    ring.print(XID.format(code=79, pid=1), priority=12)
    assert polled(follow(Kmsg(ring.handle))) == []


def test_a_second_reader_goes_on_where_the_first_one_was(ring):
    ring.print(XID.format(code=79, pid=1))
    first = Kmsg(ring.handle)
    assert len(polled(follow(first))) == 1
    kind, _, serial = place_of(first).split(" ")
    assert (kind, serial) == ("kmsg", "1")
    ring.print(XID.format(code=48, pid=1))
    ring.serial = 0
    ring.print(XID.format(code=79, pid=1))
    second = Kmsg(ring.handle, after=1)
    assert [one.xid for one in polled(follow(second))] == [48]


def test_a_message_of_several_lines_that_comes_in_pieces_is_one(ring):
    follower = follow(Kmsg(ring.handle))
    ring.print("NVRM: Xid (PCI:0000:3b:00): 154,")
    assert follower.poll() == []
    ring.print("NVRM: GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")
    (found,) = polled(follower)
    assert (found.xid, found.action.value) == (154, "reboot_node")


def storm(path, count=10_000):
    lines = (f"[{at / 1000:12.6f}] " + XID.format(code=31, pid=at) for at in range(count))
    path.write_text("\n".join(lines) + "\n")


def test_a_storm_of_ten_thousand_lines_is_one_finding_of_bounded_cost(tmp_path):
    log = tmp_path / "kern.log"
    storm(log, 1)
    follower = follow(LogFile(log, Origin.kernel, from_start=True), clock=Ticks(step=1.0))
    assert len(polled(follower)) == 1
    with log.open("a") as file:
        file.write("".join(f"[{at / 1000:12.6f}] {XID.format(code=31, pid=at)}\n" for at in range(1, 10_000)))
        file.write(f"[   10.500000] {XID.format(code=79, pid=1)}\n")
    tracemalloc.start()
    began = time.thread_time()
    found = polled(follower, 200)
    spent = time.thread_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.xid for one in found] == [79]
    assert {one.xid: one.why.rpartition("; ")[2] for one in follower.findings}[31] == "10,000 lines"
    assert peak < 8 << 20
    assert spent < 20 * BURST_SECONDS


def test_more_than_its_share_of_a_processor_waits_in_the_log(tmp_path):
    log = tmp_path / "kern.log"
    storm(log)
    clock = Ticks()
    follower = follow(LogFile(log, Origin.kernel, from_start=True), clock=clock, cpu=Ticks(step=0.2))
    assert len(follower.poll()) == 1
    assert follower.behind
    (one,) = follower.findings
    assert "10,000" not in one.why
    assert follower.poll() == []
    assert follower.findings[0] == one, "no time has passed: nothing more is looked at"
    for _ in range(100):
        clock.now += 3.0
        assert follower.poll() == []
    assert not follower.behind
    assert "10,000 lines" in follower.findings[0].why


def test_a_cause_is_told_again_after_three_quiet_minutes_and_not_before(tmp_path):
    log = tmp_path / "rank.log"
    log.touch()
    wall = Ticks(1_000_000.0)
    follower = follow(LogFile(log), wall=wall)
    polled(follower)
    for pause, told in ((0, 1), (170, 0), (170, 0), (181, 1)):
        wall.now += pause
        with log.open("a") as file:
            file.write(OOM + "\n")
        assert len(polled(follower)) == told


def test_a_file_that_is_rotated_is_read_to_its_end_and_then_the_new_one(tmp_path):
    log = tmp_path / "rank.log"
    log.write_text(OOM + "\n")
    source = LogFile(log)
    assert source.read(1 << 16).text == "", "what was there before is not news"
    with log.open("a") as file:
        file.write("one\nhalf")
    assert source.read(1 << 16).text == "one\n"
    log.rename(tmp_path / "rank.log.1")
    with (tmp_path / "rank.log.1").open("a") as file:
        file.write(" and a half\nlast without an end")
    log.write_text("new\n")
    read = [source.read(1 << 16).text for _ in range(4)]
    assert read == ["half and a half\n", "last without an end", "new\n", ""]


def test_a_file_that_is_cut_is_read_from_its_start_also_when_it_has_grown_again(tmp_path):
    log = tmp_path / "rank.log"
    log.write_text("a\n" * 10)
    source = LogFile(log, from_start=True)
    assert source.read(1 << 16).text == "a\n" * 10
    os.truncate(log, 0)
    log.write_bytes(b"b\n")
    assert source.read(1 << 16).text == "b\n"
    log.write_bytes(b"c\n" * 30)
    assert source.read(1 << 16).text == "c\n" * 30


def test_a_file_that_is_missing_or_no_file_is_said_and_costs_nothing(tmp_path):
    source = LogFile(tmp_path / "later.log")
    assert source.read(1 << 16).text == ""
    (tmp_path / "later.log").write_text("first\n")
    assert source.read(1 << 16).text == "first\n"
    os.mkfifo(tmp_path / "pipe")
    odd = LogFile(tmp_path / "pipe")
    assert odd.read(1 << 16).text == ""
    assert "no regular file" in odd.trouble


def test_lines_without_end_and_bytes_that_are_no_text_are_bounded(tmp_path):
    log = tmp_path / "rank.log"
    log.write_bytes(b"x" * (5 * LONGEST_LINE) + b"\n\xff\xfe\x00 " + OOM.encode() + b"\n")
    follower = follow(LogFile(log, from_start=True))
    assert [one.kind for one in polled(follower, 10)] == ["cuda_oom"]


def test_a_file_far_behind_is_passed_over_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(LogFile, "FAR_BEHIND", 1000)
    monkeypatch.setattr(LogFile, "KEPT", 100)
    log = tmp_path / "rank.log"
    log.write_text("".join(f"line {at}\n" for at in range(1000)))
    source = LogFile(log, from_start=True)
    text = source.read(1 << 16).text
    assert text.endswith("line 999\n")
    assert len(text) <= 100
    assert source.lost > 8000


def test_logs_of_runs_are_found_as_they_appear(tmp_path):
    clock, pattern = Ticks(), str(tmp_path / "*" / "logs" / "*.log")
    old = tmp_path / "r1" / "logs"
    old.mkdir(parents=True)
    (old / "rank-0.log").write_text(OOM + "\n")
    source = LogFiles([pattern], clock=clock)
    follower = follow(source, clock=clock)
    assert polled(follower) == [], "what was there before is not news"
    new = tmp_path / "r2" / "logs"
    new.mkdir(parents=True)
    (new / "rank-0.log").write_text("CUDA error: an illegal memory access was encountered\n")
    clock.now += 6
    assert [one.kind for one in polled(follower)] == ["cuda_illegal_access"]
    (new / "rank-0.log").rename(new / "rank-0.log.1")
    (old / "rank-0.log").rename(old / "again.log")
    clock.now += 6
    assert polled(follower) == []


JOURNAL = """#!{python} -u
import json, sys, time
with open({calls!r}, "a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
fields = {{"_TRANSPORT": "kernel", "SYSLOG_IDENTIFIER": "kernel", "__REALTIME_TIMESTAMP": "1700000000000000"}}
for at, code in enumerate(({codes})):
    message = "NVRM: Xid (PCI:0000:3b:00): %d, pid=1" % code
    print(json.dumps(fields | {{"__CURSOR": "s=1;i=%d" % at, "MESSAGE": message}}))
if "--follow" in sys.argv and {stays}:
    time.sleep(60)
"""


def journalctl(folder, codes="79, 48", stays=True):
    program = folder / "journalctl"
    calls = str(folder / "calls")
    program.write_text(JOURNAL.format(python=sys.executable, calls=calls, codes=codes, stays=stays))
    program.chmod(0o755)
    return program


def until(follower, count, seconds=60):
    end, found = time.monotonic() + seconds, []
    while len(found) < count and time.monotonic() < end:
        found += follower.poll()
        time.sleep(0.02)
    return found


def test_the_journal_is_followed_where_the_ring_is_not_allowed(tmp_path):
    source, why = open_kernel_log(kmsg=tmp_path / "none", journalctl=str(journalctl(tmp_path)))
    assert isinstance(source, JournalPipe), why
    follower = follow(source)
    try:
        found = until(follower, 2)
        assert [one.xid for one in found] == [79, 48]
        assert found[0].time == 1_700_000_000
        assert place_of(source) == "journal s=1;i=1"
    finally:
        follower.close()


def test_a_journal_that_ends_is_followed_again_from_where_it_was(tmp_path):
    clock = Ticks()
    source = JournalPipe(str(journalctl(tmp_path, codes="79,", stays=False)), clock=clock)
    follower = follow(source)
    try:
        assert len(until(follower, 1)) == 1
        end = time.monotonic() + 60
        while not source.trouble and time.monotonic() < end:
            follower.poll()
            time.sleep(0.02)
        assert source.trouble == "journalctl ended"
        assert source.read(100).text == "", "not at once"
        clock.now += 100
        end = time.monotonic() + 60
        while len((tmp_path / "calls").read_text().splitlines()) < 2 and time.monotonic() < end:
            follower.poll()
            time.sleep(0.02)
        second = (tmp_path / "calls").read_text().splitlines()[1]
        assert "--after-cursor s=1;i=0" in second
    finally:
        follower.close()


def test_where_neither_is_allowed_it_is_not_measured_and_says_why(tmp_path):
    silent = tmp_path / "journalctl"
    silent.write_text("#!/bin/sh\nexit 0\n")
    silent.chmod(0o755)
    source, why = open_kernel_log(kmsg=tmp_path / "none", journalctl=str(silent))
    assert source is None
    assert "No such file" in why
    assert "no message of the kernel" in why
    source, why = open_kernel_log(kmsg=tmp_path / "none", journalctl=str(tmp_path / "nowhere"))
    assert source is None
    assert "journalctl" in why


def test_a_user_without_rights_is_refused_and_not_held_up(tmp_path):
    """The real /dev/kmsg, as somebody else than root where this is root."""
    code = (
        "import os, sys\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "from everstep.host.kernel_log import open_kernel_log\n"
        "source, why = open_kernel_log(journalctl='/nowhere')\n"
        "print(source is not None, why)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip("this checkout cannot be read by another user")
    assert done.stdout.startswith("True") or "/dev/kmsg" in done.stdout
