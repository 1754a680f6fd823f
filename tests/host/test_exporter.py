"""Metrics as Prometheus gets them: parsed by its own parser, over HTTP and from the file."""

import socket
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rigs import telemetry as rig

from everstep.core.gpu import Answer, GpuSample
from everstep.core.host import Clock, Memory, Pressure
from everstep.core.judgement import judge
from everstep.host import exporter as exporters
from everstep.host.exporter import Exporter, Snapshot

NOW = rig.NOW


def parsed(text):
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found[one.name, *sorted(one.labels.items())] = one.value
    return found


def snapshot(*gpus, **more):
    sweep = rig.sweep(*gpus)
    return Snapshot(sweep=sweep, host=rig.host(), verdict=judge(rig.evidence(sweep)), **more)


@pytest.fixture
def exporter():
    made = Exporter(wall=lambda: NOW)
    yield made
    made.close()


def test_readings_have_base_units_and_the_uuid_as_label(exporter):
    exporter.show(snapshot(rig.gpu(0), rig.gpu(1, temperature_c=91.0, pcie_replays=7, remap_failed=True)))
    found = parsed(exporter.text().decode())
    one, two = ("uuid", "GPU-0"), ("uuid", "GPU-1")
    assert found["everstep_gpu_utilization_ratio", one] == pytest.approx(0.97)
    assert found["everstep_gpu_temperature_celsius", two] == 91
    assert found["everstep_gpu_pcie_replays_total", two] == 7
    assert found["everstep_gpu_nvlinks_active", one] == 18
    assert found["everstep_gpu_state", ("state", "failed"), two] == 1
    assert found["everstep_gpu_state", ("state", "failed"), one] == 0
    assert found["everstep_node_state", ("state", "failed")] == 1
    assert found["everstep_node_disk_used_ratio", ("mount", "/data")] == pytest.approx(0.4)
    info = ("everstep_gpu_info", ("bus", "00000000:02:00.0"), ("gpu", "1"), ("model", "NVIDIA H100 80GB HBM3"), two)
    assert found[info] == 1


def test_what_was_not_measured_is_absent_and_not_zero(exporter):
    exporter.show(snapshot(GpuSample(time=NOW, uuid="GPU-x", answer=Answer.unresponsive), rig.gpu(1)))
    found = parsed(exporter.text().decode())
    of_it = {name for name, *labels in found if ("uuid", "GPU-x") in labels}
    assert of_it == {"everstep_gpu_info", "everstep_gpu_answers", "everstep_gpu_state"}
    assert found["everstep_gpu_answers", ("uuid", "GPU-x")] == 0


def test_old_readings_are_absent_and_their_age_is_shown():
    late = Exporter(wall=lambda: NOW + 31)
    late.show(snapshot(rig.gpu(0), period=10.0))
    found = parsed(late.text().decode())
    assert not [name for name, *_ in found if name.startswith("everstep_gpu_") and "xid" not in name]
    assert found["everstep_monitor_last_sweep_timestamp_seconds",] == NOW
    fresh = Exporter(wall=lambda: NOW + 29)
    fresh.show(snapshot(rig.gpu(0), period=10.0))
    assert "everstep_gpu_power_watts" in fresh.text().decode()


def test_xids_and_the_monitors_own_figures_are_counted(exporter):
    exporter.show(snapshot(rig.gpu(0), xids={("GPU-0", 31): 10_000}, own={"cpu_seconds_total": 1.5, "behind": 0}))
    found = parsed(exporter.text().decode())
    assert found["everstep_gpu_xid_total", ("uuid", "GPU-0"), ("xid", "31")] == 10_000
    assert found["everstep_monitor_cpu_seconds_total",] == 1.5
    assert found["everstep_monitor_behind",] == 0


def test_it_answers_over_http_and_a_port_in_use_is_said_in_a_sentence(exporter):
    exporter.show(snapshot(rig.gpu(0)))
    port = exporter.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert "everstep_gpu_power_watts" in answer.read().decode()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(
            ValueError, match=r"^metrics_port: \d+ on 127.0.0.1 cannot be had \(.*\); give another one\.$"
        ):
            Exporter().serve(held.getsockname()[1])


def test_the_file_is_whole_at_every_moment(exporter, tmp_path):
    path = tmp_path / "everstep.prom"
    exporter.show(snapshot(rig.gpu(0)))
    exporter.write(path)
    over, seen = threading.Event(), []

    def look():
        while not over.is_set():
            seen.append(path.read_bytes())

    reader = threading.Thread(target=look)
    reader.start()
    for power in range(100):
        exporter.show(snapshot(rig.gpu(0, power_w=float(power))))
        exporter.write(path)
    over.set()
    reader.join()
    assert len(set(seen)) > 1
    assert all(b"everstep_gpu_power_watts{" in one and one.endswith(b"\n") for one in seen)
    assert [one.name for one in tmp_path.iterdir()] == ["everstep.prom"]
    assert path.stat().st_mode & 0o044 == 0o044, "the node exporter is another user"


def rows():
    """The table of docs/monitor.md: every metric with its labels and help."""
    made = Exporter(wall=lambda: NOW)
    whole = rig.gpu(
        0, **dict.fromkeys((*(one.reading for one in exporters.GAUGES), *(one[2] for one in exporters.COUNTERS)), 1)
    )
    host = rig.host(memory=Memory(available_bytes=1, pressure=Pressure(some_10s=0, some_60s=0, full_10s=0, full_60s=0)),
                    stuck=(), clock=Clock(source="kernel", offset_s=0.0), nics=(), ports=())  # fmt: skip
    shown = snapshot(whole, xids={("GPU-0", 31): 1}, own=dict.fromkeys(exporters.OWN, 0))
    made.show(replace(shown, host=host))
    for family in made.collect():
        labels = ", ".join(family.samples[0].labels) if family.samples else ""
        total = "_total" if family.type == "counter" else ""
        yield f"| `{family.name}{total}`{f' ({labels})' if labels else ''} | {family.documentation} |"


def test_the_page_lists_every_metric():
    page = (Path(__file__).parents[2] / "docs" / "monitor.md").read_text()
    told = page.partition("| metric | meaning |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert told == list(rows())
