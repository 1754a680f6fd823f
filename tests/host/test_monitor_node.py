"""A monitor with its real hands: the stand-in NVML under the real pynvml, logs, heartbeats, Parquet, SQLite, Prometheus."""

import sqlite3
import threading
import time
import tracemalloc

import pandas as pd
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rigs import nvml

from everstep.core.log_lines import Origin
from everstep.core.monitor import MonitorJob
from everstep.core.segment import Heartbeat, Phase
from everstep.host import ledger, telemetry
from everstep.host.exporter import Exporter
from everstep.host.gpus import GpuSampler
from everstep.host.ledger import Ledger
from everstep.host.log_file import LogFile
from everstep.host.log_follower import LogFollower
from everstep.host.monitor import Hands, Monitor
from everstep.host.monitor_watch import HostWatch, Trainings, Watch
from everstep.host.monitor_writer import Writer
from everstep.host.telemetry import Telemetry
from everstep.sim.nvml import layout

PATIENCE = 120.0
LINE = "NVRM: Xid (PCI:{bus}): {code}, pid=1, name=python, Ch 00000008"


class Node:
    """A node with a monitor, put together as `everstep.host.monitoring` does; time can be skipped."""

    def __init__(self, folder, gpus=2, period=1.0, make_telemetry=Telemetry, **job):
        self.fake = nvml.node(folder, gpus)
        self.folder = folder
        self.skipped = 0.0
        self.told = []
        self.log = folder / "kern.log"
        self.log.touch()
        self.uri = f"sqlite:///{folder / 'ledger.db'}"
        self.exporter = Exporter(wall=self.wall)
        follower = LogFollower([LogFile(self.log, Origin.kernel, from_start=True)])
        self.watch = Watch(follower, Trainings(folder / "local", wall=self.wall))
        self.telemetry = make_telemetry(folder / "telemetry", "n1", left_bytes=0)
        home = folder / "telemetry" / "n1"
        home.mkdir(parents=True, exist_ok=True)
        self.writer = Writer(
            self.telemetry, Ledger(self.uri, home / "events.jsonl"), self.exporter, textfile=folder / "x.prom",
            clock=self.clock,
        )  # fmt: skip
        self.gpus = GpuSampler(environment=self.fake.environment, within=5.0, clock=self.clock, wall=self.wall)
        self.gpus.start(300)
        self.watch.start()
        hands = Hands(self.gpus, HostWatch(), self.watch, self.writer, self.exporter)
        self.job = MonitorJob(node="n1", every_seconds=period, gpus=gpus, **job)
        self.monitor = Monitor(self.job, hands, self.told.append, clock=self.clock, wall=self.wall)

    def clock(self):
        return time.monotonic() + self.skipped

    def wall(self):
        return time.time() + self.skipped

    def run(self, until, skip=0.0):
        """Let the monitor work until something holds; each step may skip some seconds."""
        end = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < end, [one.text for one in self.told]
            self.skipped += skip
            self.monitor.step()

    def sweeps(self, count):
        at = self.monitor.sweeps_taken + count
        self.run(lambda: self.monitor.sweeps_taken >= at)

    def print(self, code, gpu, times=1):
        with self.log.open("a") as file:
            file.write((LINE.format(bus=self.fake.bus(gpu).removeprefix("0000"), code=code) + "\n") * times)

    def kinds(self, gpu=None):
        uuid = None if gpu is None else self.fake.uuid(gpu)
        return [one.kind.removeprefix("everstep.") for one in self.told if uuid in (None, one.data.get("uuid"))]

    def metrics(self):
        families = text_string_to_metric_families(self.exporter.text().decode())
        return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}

    def rows(self):
        self.telemetry.close()
        return telemetry.read(self.folder / "telemetry", node="n1")

    def close(self):
        self.gpus.close()
        self.watch.close()
        self.writer.close(30.0)
        self.exporter.close()


@pytest.fixture
def make(tmp_path):
    made = []

    def do(*args, **more):
        made.append(Node(tmp_path, *args, **more))
        return made[-1]

    yield do
    for one in made:
        one.close()


def test_an_xid_is_told_at_once_and_once_and_rests_in_ledger_metrics_and_telemetry(make):
    node = make(period=60.0)
    node.sweeps(1)
    began = time.monotonic()
    node.fake.xid(1, 79)
    node.run(lambda: "gpu.failed" in node.kinds(1))
    assert time.monotonic() - began < 30, "the next sample is a minute away"
    assert node.kinds() == ["gpu.xid", "gpu.failed", "node.failed"]
    node.print(79, 1)
    node.run(lambda: node.watch._follower.findings)
    for _ in range(5):
        node.monitor.step()
    assert node.kinds().count("gpu.xid") == 1, "the driver's event and the kernel's line are one"
    assert node.metrics()["everstep_gpu_xid_total", ("uuid", node.fake.uuid(1)), ("xid", "79")] == 1
    node.close()
    kept = ledger.events(node.uri)
    assert sorted(one.id for one in kept) == sorted(one.id for one in node.told)
    xid = next(one for one in kept if one.kind == "everstep.gpu.xid")
    assert (xid.data["node"], xid.data["uuid"], xid.data["xid"], xid.data["action"]) == (
        "n1", node.fake.uuid(1), 79, "reboot_node",
    )  # fmt: skip
    frame = node.rows()
    assert set(frame["uuid"]) == {node.fake.uuid(0), node.fake.uuid(1)}
    text = (node.folder / "x.prom").read_text()
    assert any(family.name == "everstep_gpu_temperature_celsius" for family in text_string_to_metric_families(text))


def test_a_kernel_line_is_told_with_its_gpu_and_the_event_after_it_is_the_same(make):
    node = make(period=60.0)
    node.sweeps(1)
    node.print(48, 0)
    node.run(lambda: "gpu.failed" in node.kinds(0))
    node.fake.xid(0, 48)
    node.run(lambda: node.monitor._memory.counts)
    for _ in range(5):
        node.monitor.step()
    assert node.kinds() == ["gpu.xid", "gpu.failed", "node.failed"]


def test_a_storm_of_ten_thousand_events_and_lines_is_one_cause_in_bounded_memory(make):
    node = make()
    node.sweeps(2)
    tracemalloc.start()
    node.fake.xid(0, 31, times=10_000)
    node.print(31, 0, times=10_000)
    node.run(lambda: sum(node.monitor._memory.counts.values()) == 10_000)
    node.run(lambda: not node.watch.behind and node.watch._follower.findings)
    node.sweeps(2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert node.kinds().count("gpu.xid") == 1
    assert len(node.monitor._memory.xids) == 1
    assert node.metrics()["everstep_gpu_xid_total", ("uuid", node.fake.uuid(0)), ("xid", "31")] == 10_000


def test_a_gpu_that_is_lost_is_told_and_so_is_its_return(make):
    node = make()
    node.sweeps(2)
    node.fake.lose(1)
    node.run(lambda: "node.failed" in node.kinds())
    assert node.kinds() == ["gpu.failed", "node.failed"]
    assert "reboot the node" in node.told[0].text
    node.fake.lose(1, lost=False)
    node.run(lambda: "gpu.healthy" in node.kinds(1), skip=0.5)
    assert node.kinds(0) == []


def test_a_gpu_that_hangs_is_unknown_then_failed_while_the_others_and_the_logs_are_watched(make):
    node = make()
    node.sweeps(2)
    node.fake.hang("ecc", gpu=1)
    node.run(lambda: "gpu.unknown" in node.kinds(1))
    assert "gpu.failed" not in node.kinds(1)
    node.fake.set(0, temperature=87)
    node.run(lambda: "gpu.suspect" in node.kinds(0))
    node.print(94, 0)
    node.run(lambda: "gpu.xid" in node.kinds(0))
    node.run(lambda: "gpu.failed" in node.kinds(1), skip=0.5)
    node.fake.answer()
    node.run(lambda: "gpu.healthy" in node.kinds(1), skip=0.5)


def test_a_device_that_lacks_half_of_the_counters_and_one_in_mig_mode_are_healthy(make):
    node = make()
    node.fake.fail(*list(layout.SIGNALS)[::2], gpu=0)
    node.fake.mig(1, (3, 2, 2))
    node.sweeps(4)
    assert node.told == []
    frame = node.rows()
    mine = frame[frame["uuid"] == node.fake.uuid(0)].iloc[-1]
    assert pd.isna(mine["utilisation_percent"])
    other = frame[frame["uuid"] == node.fake.uuid(1)].iloc[-1]
    assert (other["mig_enabled"], other["instances"]) == (True, 3)
    found = node.metrics()
    assert ("everstep_gpu_utilization_ratio", ("uuid", node.fake.uuid(0))) not in found
    assert found["everstep_gpu_state", ("state", "healthy"), ("uuid", node.fake.uuid(0))] == 1
    node.fake.xid(1, 13, gpu_instance=2)
    node.run(lambda: "gpu.xid" in node.kinds(1))


def beat(folder, wall, phase, step=7):
    beat = Heartbeat(attempt=1, rank=0, pid=1, time=wall, phase=phase, step=step, progress=step)
    place = folder / "local" / "gpt" / "r001"
    place.mkdir(parents=True, exist_ok=True)
    (place / "heartbeat-0.json").write_text(beat.model_dump_json())


def test_heartbeats_say_that_a_training_computes_and_only_then_idleness_is_a_fault_after_a_while(make):
    node = make()
    node.fake.train()
    beat(node.folder, node.wall(), Phase.train)
    node.run(lambda: node.watch.training.computes)
    assert node.watch.training.job == "gpt"
    node.sweeps(2)
    node.fake.set(0, utilisation=0)
    until = node.wall() + 100
    while node.wall() < until:
        beat(node.folder, node.wall(), Phase.save)
        node.run(lambda at=node.monitor.sweeps_taken: node.monitor.sweeps_taken > at, skip=4.0)
    assert not [one for one in node.told if "has computed nothing" in one.text]
    beat(node.folder, node.wall(), Phase.save)
    node.run(lambda: node.watch.training.computes)
    end = time.monotonic() + PATIENCE
    while not [one for one in node.told if "has computed nothing" in one.text] and time.monotonic() < end:
        beat(node.folder, node.wall(), Phase.train)
        node.run(lambda at=node.monitor.sweeps_taken: node.monitor.sweeps_taken > at, skip=4.0)
    assert next(one.job for one in node.told if "has computed nothing" in one.text) == "gpt"
    node.skipped += 100
    node.run(lambda: node.watch.training.computes is None)
    assert not {"node.failed", "gpu.failed"} & set(node.kinds())


def test_a_heartbeat_of_another_phase_or_an_old_one_or_a_torn_one_is_no_training(tmp_path):
    look = Trainings(tmp_path / "local", wall=lambda: 1000.0).look
    for wall, phase in ((1000.0, Phase.start), (1000.0, Phase.wait), (900.0, Phase.train)):
        beat(tmp_path, wall, phase)
        assert look().computes is None
    beat(tmp_path, 990.0, Phase.eval)
    assert look() == (True, 1000.0, "gpt")
    (tmp_path / "local" / "gpt" / "r001" / "heartbeat-0.json").write_text("{")
    assert look().computes is None


def test_a_ledger_that_is_locked_stops_nothing_is_told_and_gets_all_later(make):
    node = make()
    node.sweeps(1)
    node.monitor.say("everstep.monitor.started", "the monitor has started")
    node.run(lambda: ledger.events(node.uri))
    locked = sqlite3.connect(node.folder / "ledger.db", isolation_level=None)
    locked.execute("BEGIN EXCLUSIVE")
    try:
        node.fake.xid(0, 79)
        node.run(lambda: "monitor.trouble" in node.kinds())
        assert "locked" in next(one.text for one in node.told if one.kind.endswith("trouble"))
        assert "gpu.failed" in node.kinds(0)
    finally:
        locked.rollback()
        locked.close()
    node.run(lambda: "monitor.mended" in node.kinds(), skip=0.5)
    node.close()
    assert len(ledger.events(node.uri)) == len(node.told)


class HangingDisk(Telemetry):
    """Telemetry on a disk that does not come back from a write until it is let."""

    free = threading.Event()

    def add(self, *args):
        assert self.free.wait(PATIENCE)
        return super().add(*args)


def test_a_disk_that_hangs_stops_nothing_and_is_told(make):
    HangingDisk.free.clear()
    node = make(make_telemetry=HangingDisk)
    try:
        node.sweeps(2)
        node.run(lambda: "monitor.trouble" in node.kinds(), skip=2.0)
        assert "a write has not ended for" in node.told[-1].text
        assert node.metrics()["everstep_monitor_writes",] == 0
        node.fake.xid(1, 79)
        node.run(lambda: "gpu.failed" in node.kinds(1))
    finally:
        HangingDisk.free.set()
    node.run(lambda: "monitor.mended" in node.kinds(), skip=0.5)
    node.run(lambda: len(ledger.events(node.uri)) >= 4)


def test_a_full_disk_stops_nothing_and_is_told(make, mount, tmp_path):
    mount(tmp_path / "telemetry", "-t", "tmpfs", "-o", "size=256k", "tmpfs")
    node = make()
    node.telemetry._batch_seconds = 5.0
    node.sweeps(2)
    (tmp_path / "telemetry" / "fill").write_bytes(b"x" * (200 << 10))
    node.run(lambda: "monitor.trouble" in node.kinds(), skip=1.0)
    node.fake.xid(1, 79)
    node.run(lambda: "gpu.failed" in node.kinds(1))
    (tmp_path / "telemetry" / "fill").unlink()
    node.run(lambda: "monitor.mended" in node.kinds(), skip=1.0)
    assert len(node.rows()) > 2


def test_waiting_samples_are_bounded_and_the_oldest_go(tmp_path, monkeypatch):
    monkeypatch.setattr("everstep.host.monitor_writer.MOST_SAMPLES", 10)
    HangingDisk.free.clear()
    home = tmp_path / "telemetry" / "n1"
    home.mkdir(parents=True)
    kept = HangingDisk(tmp_path / "telemetry", "n1", left_bytes=0)
    writer = Writer(kept, Ledger(f"sqlite:///{tmp_path}/l.db", home / "events.jsonl"), Exporter())
    try:
        for _ in range(50):
            writer.take(None, None)
        assert 39 <= writer.lost <= 40
    finally:
        HangingDisk.free.set()
        assert writer.close(60.0)
