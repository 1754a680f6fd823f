"""Telemetry in Parquet: by day and node, whole files only whatever is killed, and no more bytes than allowed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from rigs import telemetry as rig

from everstep.core.gpu import Answer, GpuSample
from everstep.core.telemetry import GPU_COLUMNS, HOST_COLUMNS, gpu_rows
from everstep.host import telemetry
from everstep.host.telemetry import Telemetry

ROOTS = (Path(__file__).parents[2], Path(__file__).parents[1])
DAY = 86_400
START = 20_000 * DAY + 10 * 3600  # 2024-10-04 10:00 UTC


def sweep(at, gpus=2, **readings):
    return rig.sweep(*(rig.gpu(number, **readings) for number in range(gpus)), time=at)


def writer(folder, **more):
    return Telemetry(folder, "node1", **{"left_bytes": 0} | more)


def files(folder):
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def test_rows_rest_by_node_day_and_hour_and_come_back_as_a_frame(tmp_path):
    one = writer(tmp_path)
    for second in range(0, 240, 10):
        one.add(sweep(START + second, temperature_c=50.0 + second / 10), rig.host(time=START + second))
    assert one.close()
    made = files(tmp_path)
    assert {name.split("/")[:2][0] for name in made} == {"node1"}
    assert {name.split("/")[1] for name in made} == {"2024-10-04"}
    frame = telemetry.read(tmp_path, node="node1")
    assert list(frame.columns) == list(GPU_COLUMNS)
    assert len(frame) == 48
    assert frame["time"].is_monotonic_increasing
    assert frame.loc[0, "temperature_c"] == 50.0
    assert frame.loc[0, "links_active"] == 18
    hosts = telemetry.read(tmp_path, table="hosts")
    assert list(hosts.columns) == list(HOST_COLUMNS)
    assert hosts["fullest_percent"].tolist() == pytest.approx([40.0] * 24)
    some = telemetry.read(tmp_path, since=START + 100, until=START + 120)
    assert sorted(set(some["time"])) == [START + 100, START + 110]


def test_what_was_not_measured_is_absent_and_no_zero(tmp_path):
    one = writer(tmp_path)
    bare = GpuSample(time=START, uuid="GPU-x", answer=Answer.unresponsive, silent_s=3.0)
    one.add(rig.sweep(bare, time=START))
    one.close()
    (row,) = telemetry.read(tmp_path).to_dict("records")
    assert row["answer"] == "unresponsive"
    assert all(pd.isna(row[name]) for name in ("temperature_c", "links_active", "processes", "remap_failed"))
    assert all(len(row) == len(GPU_COLUMNS) for row in gpu_rows(rig.sweep(bare), "n"))


def test_an_hour_becomes_one_file_when_it_is_over(tmp_path):
    one = writer(tmp_path, batch_seconds=60)
    for second in range(0, 3600 + 180, 30):
        one.add(sweep(START + second))
    one.close()
    names = [name.split("/")[-1] for name in files(tmp_path)]
    assert names.count("gpus-10.parquet") == 1
    assert not [name for name in names if name.startswith("gpus-10.") and name != "gpus-10.parquet"]
    assert [name for name in names if name.startswith("gpus-11.")]
    assert len(telemetry.read(tmp_path)) == 2 * 126
    assert len(pd.read_parquet(tmp_path / "node1")) == 2 * 126, "any reader of Parquet sees the same"


def test_a_joined_hour_counts_once_where_its_parts_could_not_be_removed(tmp_path):
    folder = tmp_path / "telemetry"
    one = writer(folder, batch_seconds=60)
    for second in range(0, 300, 30):
        one.add(sweep(START + second))
    one.close()
    kept = tmp_path / "kept"
    shutil.copytree(folder / "node1", kept)
    one.add(sweep(START + 3600))
    one.close()
    for part in kept.glob("*/*.parquet"):  # as if the writer had been killed before it removed them
        shutil.copy(part, folder / "node1" / "2024-10-04" / part.name)
    assert len(telemetry.read(folder)) == 2 * 11
    later = writer(folder)
    later.add(sweep(START + 3660))
    later.close()
    assert len(telemetry.read(folder)) == 2 * 12
    assert len([name for name in files(folder) if "gpus-10" in name]) == 1


def test_the_oldest_days_go_first_when_there_are_too_many_bytes(tmp_path):
    one = writer(tmp_path)
    for day in range(4):
        one.add(sweep(START + day * DAY))
        one.flush()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet")) // 4
    small = writer(tmp_path, disk_bytes=3 * size + size // 2)
    small.add(sweep(START + 4 * DAY))
    small.flush()
    small.add(sweep(START + 5 * DAY))
    small.flush()
    days = sorted(path.name for path in (tmp_path / "node1").iterdir())
    assert days == ["2024-10-06", "2024-10-07", "2024-10-08", "2024-10-09"]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.parquet")) <= 5 * size


def test_another_nodes_files_are_not_touched(tmp_path):
    other = Telemetry(tmp_path, "node2", left_bytes=0)
    other.add(sweep(START - 300 * DAY))
    other.close()
    small = writer(tmp_path, disk_bytes=1)
    for day in range(3):
        small.add(sweep(START + day * DAY))
        small.flush()
    assert len(telemetry.read(tmp_path, node="node2")) == 2
    assert set(telemetry.read(tmp_path)["node"]) == {"node1", "node2"}


def test_a_full_disk_costs_rows_and_nothing_else(tmp_path, mount):
    mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs")
    one = Telemetry(tmp_path / "disk", "node1", left_bytes=0)
    one.add(sweep(START))
    assert one.flush()
    (tmp_path / "disk" / "fill").write_bytes(b"x" * ((1 << 20) - 100_000))
    failed = 0
    for second in range(200):
        one.add(sweep(START + second, gpus=8))
        failed += not one.flush()
    assert failed
    assert "telemetry is not written" in one.trouble
    for path in (tmp_path / "disk").rglob("*.parquet"):
        pq.read_table(path)
    (tmp_path / "disk" / "fill").unlink()
    assert one.flush()
    assert one.trouble == ""
    assert len(set(telemetry.read(tmp_path / "disk")["time"])) == 200


def test_rows_that_no_disk_takes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "MOST_ROWS", 100)
    (tmp_path / "node1").write_text("in the way")
    one = writer(tmp_path)
    for second in range(100):
        one.add(sweep(START + second))
        assert not one.flush()
    assert one.lost == 100
    (tmp_path / "node1").unlink()
    assert one.flush()
    frame = telemetry.read(tmp_path)
    assert frame["time"].min() == START + 50, "the oldest went"


def test_room_is_left_to_others(tmp_path):
    one = Telemetry(tmp_path, "node1", left_bytes=1 << 60)
    one.add(sweep(START))
    assert not one.flush()
    assert "others" in one.trouble
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_part_that_the_disk_spoilt_is_put_aside(tmp_path):
    one = writer(tmp_path)
    for second in (0, 100):
        one.add(sweep(START + second))
        one.flush()
    first = min(tmp_path.rglob("gpus-10.*.parquet"))
    first.write_bytes(first.read_bytes()[:-10])
    one.add(sweep(START + 3600))
    assert one.flush()
    assert len(telemetry.read(tmp_path)) == 4
    assert list(tmp_path.rglob("*.unreadable"))


WRITER = """
import sys
from pathlib import Path
from rigs import telemetry as rig
from everstep.host.telemetry import Telemetry

one = Telemetry(Path(sys.argv[1]), "node1", batch_seconds=20, left_bytes=0)
at = float(sys.argv[2])
while True:
    one.add(rig.sweep(*(rig.gpu(number) for number in range(2)), time=at))
    print(at, flush=True)
    at += 10
"""


def test_a_killed_writer_leaves_whole_files_and_loses_its_last_batch_at_most(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, ROOTS))}
    begun = START
    for kill in range(4):
        one = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(begun)], stdout=subprocess.PIPE, env=env, text=True
        )
        for _ in range(40 + 150 * kill):
            said = one.stdout.readline()
        time.sleep(0.003 * kill)
        one.send_signal(signal.SIGKILL)
        rest, _ = one.communicate()
        said = [float(line) for line in rest.splitlines()[-1:]] or [float(said)]
        for path in tmp_path.rglob("*.parquet"):
            pq.read_table(path)
        frame = telemetry.read(tmp_path, since=begun)
        times = sorted(set(frame["time"]))
        assert len(frame) == 2 * len(times), "no row twice"
        assert times == [begun + 10 * at for at in range(len(times))], "no gap"
        assert said[0] - times[-1] <= 30
        begun = said[0] + 10
    later = writer(tmp_path)
    later.add(sweep(begun + DAY))
    assert later.close()
    assert not list(tmp_path.rglob("*.tmp"))
