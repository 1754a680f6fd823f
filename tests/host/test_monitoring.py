"""`python -m everstep.host.monitoring` as a service meets it: its lines, its end, what it leaves, and wrong options."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rigs import nvml

from everstep.core.ledger import Event
from everstep.core.monitor import MonitorJob
from everstep.host import ledger, monitoring, process, telemetry
from everstep.host.ledger import Ledger
from everstep.host.listener import Listener

PATIENCE = 120.0
PROBES = ("probe/everstep.host.gpu_probe", "probe/everstep.host.host_probe")


class Station:
    """A folder of telemetry, a node of stand-in GPUs, and the monitors that were started there."""

    def __init__(self, folder):
        self.folder = folder / "telemetry"
        self.fake = nvml.node(folder, 2)
        self.started = []

    def start(self, *arguments, **environment):
        command = [sys.executable, "-m", "everstep.host.monitoring", "--folder", str(self.folder), "--node", "n1"]
        one = subprocess.Popen(
            [*command, *arguments],
            env={**os.environ, **self.fake.environment, **environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(one)
        return one

    @property
    def journal(self):
        """The events so far, of all monitors."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / "n1" / "events.jsonl").read_text().splitlines()]
        return []

    def kinds(self, since=0):
        return [one["kind"].removeprefix("everstep.") for one in self.journal[since:]]

    def await_kind(self, kind, since=0):
        await_(lambda: kind in self.kinds(since), lambda: (kind, self.journal[since:]))

    def stop(self, one, number=signal.SIGTERM):
        one.send_signal(number)
        out, err = one.communicate(timeout=PATIENCE)
        await_(lambda: not probes(one.pid), lambda: probes(one.pid))
        return out, err

    def close(self):
        for one in self.started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.communicate()


def probes(pid):
    return [found for module in PROBES for found in process.marked(f"{module}/{pid}")]


def await_(holds, why):
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, why()
        time.sleep(0.05)


@pytest.fixture
def station(tmp_path):
    made = Station(tmp_path)
    yield made
    made.close()


def test_a_service_that_is_stopped_ends_well_and_started_again_repeats_nothing_until_a_remedy_is_noted(station):
    first = station.start("--textfile", str(station.folder / "everstep.prom"))
    station.await_kind("monitor.started")
    assert len(probes(first.pid)) >= 1
    station.fake.xid(1, 79)
    station.await_kind("gpu.failed")
    out, err = station.stop(first)
    assert (first.returncode, err) == (0, "")
    assert "gpu.xid GPU 1" in out
    assert station.kinds()[-1] == "monitor.stopped"
    before = len(station.journal)
    assert len(ledger.events(f"sqlite:///{station.folder}/ledger.db")) == before
    assert len(telemetry.read(station.folder, node="n1")) >= 2
    text = (station.folder / "everstep.prom").read_text()
    found = {(one.name, *one.labels.values()) for f in text_string_to_metric_families(text) for one in f.samples}
    assert ("everstep_monitor_info", "n1") in found
    assert not list(station.folder.rglob(".*")), "no file is half written"

    second = station.start()
    station.await_kind("monitor.started", before)
    until = time.monotonic() + 12
    while time.monotonic() < until:
        time.sleep(0.2)
    station.stop(second)
    assert not {"gpu.xid", "gpu.failed", "node.failed", "gpu.healthy"} & set(station.kinds(before))

    remedy = Event(
        id=uuid.uuid4().hex, time=time.time(), kind=monitoring.REMEDY, data={"node": "n1", "remedy": "reboot_node"}
    )
    other = Ledger(f"sqlite:///{station.folder}/ledger.db", station.folder / "mine.jsonl")
    other.append(remedy)
    assert other.close(60)
    before = len(station.journal)
    third = station.start()
    station.await_kind("gpu.healthy", before)
    out, _ = station.stop(third, signal.SIGINT)
    assert third.returncode == 0
    assert "is healthy again" in out


def test_a_killed_monitor_leaves_no_probe_and_telemetry_that_can_be_read(station):
    one = station.start("--metrics-port", "0")
    station.await_kind("monitor.started")
    station.fake.xid(0, 48)
    station.await_kind("gpu.failed")
    assert probes(one.pid)
    station.stop(one, signal.SIGKILL)
    assert one.returncode == -signal.SIGKILL
    assert probes(one.pid) == []
    for path in station.folder.rglob("*.parquet"):
        pq.read_table(path)
    before = len(station.journal)
    again = station.start("--minutes", "0.1")
    out, _ = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0
    final = json.loads(out.splitlines()[-1])
    assert (final["status"], final["node"], final["state"]) == ("completed", "n1", "failed")
    assert final["sweeps"] >= 3
    assert "gpu.failed" not in station.kinds(before)
    telemetry.read(station.folder)


def test_metrics_are_scraped_and_a_second_monitor_of_the_same_folder_is_refused(station, tmp_path):
    port = free_port()
    file = tmp_path / "monitor.yaml"
    file.write_text(f"metrics_port: {port}\ngpus: 2\nkernel_log: false\nlogs: [jobs/*.log]\n")
    (tmp_path / "jobs").mkdir()
    one = station.start(str(file))
    station.await_kind("monitor.started")

    def scraped():
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as got,
        ):
            return "everstep_gpu_temperature_celsius{" in got.read().decode()
        return False

    await_(scraped, lambda: "no metrics")
    assert [row["text"] for row in station.journal if row["kind"] == "everstep.monitor.not_measured"] == [
        "the kernel's log is not measured: not asked for"
    ]
    (tmp_path / "jobs" / "new.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n")
    await_(lambda: any("memory" in row["text"] for row in station.journal), lambda: station.journal)
    second = station.start()
    _, err = second.communicate(timeout=PATIENCE)
    assert (second.returncode, err) == (
        2,
        f"folder: another monitor writes to {station.folder}/n1; stop that one, or give another folder or node.\n",
    )
    station.stop(one)


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


WRONG = {
    "an option": (
        ["--evry-seconds", "1"],
        "unrecognized arguments: --evry-seconds; python -m everstep.host.monitoring --help lists",
    ),
    "a number": (["--every-seconds", "soon"], "invalid float value: 'soon'"),
    "too often": (
        ["--every-seconds", "0.1"],
        "every_seconds: 0.1 does not do; input should be greater than or equal to 1.",
    ),
    "too seldom": (["--every-seconds", "61"], "every_seconds: 61.0 does not do"),
    "no time": (["--minutes", "0"], "minutes: 0.0 does not do"),
    "no end": (["--minutes", "inf"], "minutes: inf does not do"),
    "a port": (["--metrics-port", "70000"], "metrics_port: 70000 does not do"),
    "a textfile": (["--textfile", "/tmp/x.txt"], "does not end in .prom; the node exporter reads no other files."),
    "a policy": (["--policy", "/nowhere.yaml"], "/nowhere.yaml: there is no such policy file"),
    "a log policy": (["--log-policy", "/nowhere.yaml"], "/nowhere.yaml: there is no such policy file"),
    "a ledger": (["--ledger", "nonsense"], "ledger: 'nonsense' is no URL of a database; give one such as sqlite://"),
    "a file": (["/nowhere/monitor.yaml"], "/nowhere/monitor.yaml: there is no such"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_answered_in_one_sentence(name, capsys):
    arguments, sentence = WRONG[name]
    assert monitoring.main(arguments) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("every_second: 5", "every_second is not known here; did you mean every_seconds?"),
        ("colour: red", "colour is not known here; there are folder, node, every_seconds"),
        ("- 1", "the policy file holds no groups"),
        ("disk_gb: -1", "disk_gb: -1 does not do; input should be greater than 0."),
        ("every_seconds: [", "not valid YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_answered_in_one_sentence(text, sentence, tmp_path, capsys):
    file = tmp_path / "monitor.yaml"
    file.write_text(text)
    assert monitoring.main([str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(str(file))
    assert sentence in said


def test_a_port_that_is_in_use_and_a_folder_that_cannot_be_made_are_said_in_one_sentence(tmp_path, capsys):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert monitoring.main(["--folder", str(tmp_path / "t"), "--metrics-port", str(port)]) == 2
    assert capsys.readouterr().err.startswith(f"metrics_port: {port} on 127.0.0.1 cannot be had")
    (tmp_path / "file").write_text("")
    assert monitoring.main(["--folder", str(tmp_path / "file" / "t")]) == 1
    assert capsys.readouterr().err.endswith("; mend that and start the monitor again.\n")


def test_paths_of_a_file_are_taken_from_where_the_file_is_and_options_go_before_it(tmp_path):
    file = tmp_path / "monitor.yaml"
    file.write_text("node: a\nlocal: nvme\nlogs: [jobs/*.log, /var/log/x.log]\nevery_seconds: 5\n")
    job = monitoring.asked([str(file), "--node", "b"])
    assert (job.node, job.every_seconds) == ("b", 5.0)
    assert (job.local, job.folder) == (str(tmp_path / "nvme"), str(tmp_path / ".everstep" / "telemetry"))
    assert job.logs == (str(tmp_path / "jobs/*.log"), "/var/log/x.log")
    assert monitoring.asked([]) == MonitorJob()


def event(number):
    return Event(id=f"{number}", time=float(number), kind="everstep.gpu.note")


def test_a_listener_that_hangs_or_fails_costs_who_tells_nothing():
    free, heard = threading.Event(), []

    def tell(one):
        assert free.wait(PATIENCE)
        heard.append(one.id)
        if one.id == "1":
            raise RuntimeError("away")

    listener = Listener(tell, most=5)
    for number in range(20):
        listener.put(event(number))
    assert listener.lost >= 14
    assert not listener.close(0.05)
    free.set()
    await_(lambda: len(heard) >= 5, lambda: heard)
    assert heard[:3] == ["0", "1", "2"]
    assert listener.close(PATIENCE)


def test_the_example_file_is_right_and_the_page_lists_every_field():
    root = Path(__file__).parents[2]
    job = monitoring.asked([str(root / "jobs" / "monitor.yaml")])
    assert job.metrics_port == 9400
    options = (root / "docs" / "monitor.md").read_text().partition("## Options")[2].partition("## Events")[0]
    rows = [line.split("|")[1] for line in options.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(MonitorJob.model_fields)
