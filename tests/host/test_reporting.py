"""The report collected from a run directory: at a run's end, later, for killed runs, and for very long ones."""

import fcntl
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rigs.told_run import ToldRun

from everstep.core.job import TrainJob
from everstep.core.summary import RunReport
from everstep.host import curves, history, reporting

ROOT = Path(__file__).parents[2]


def test_all_three_files_are_made_again(tmp_path):
    run_dir = ToldRun(tmp_path, restarts=1).write().persistent
    done = subprocess.run(
        [sys.executable, "-m", "everstep.host.reporting", str(run_dir)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == f"{run_dir / 'report.html'}\n"
    assert "Completed: step 900" in (run_dir / "report.html").read_text()
    assert json.loads((run_dir / "report.json").read_text())["schema_version"] == 1
    assert (run_dir / "report.txt").read_text().startswith("Everstep run digits")


def test_a_folder_without_a_run_is_answered_in_a_sentence(tmp_path, capsys):
    assert reporting.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert reporting.main([]) == 2


def test_a_run_that_nobody_owns_any_more_was_killed(tmp_path):
    run_dir = ToldRun(tmp_path, status=None).write().persistent
    (run_dir / "owner.lock").touch()
    report = reporting.again(run_dir)
    assert report.status == "killed"
    assert (report.attempts[-1].outcome, report.attempts[-1].cause) == ("lost", "its flow vanished")
    assert "status       killed" in (run_dir / "report.txt").read_text()
    with (run_dir / "owner.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert reporting.again(run_dir).status == "running"


def test_restarts_lose_their_steps_but_curves_have_each_step_once(tmp_path):
    places = ToldRun(tmp_path, steps=1000, restarts=3, every=30).write()
    resumed = {number: claim.resumed_from for number, claim in history.claims(places).items()}
    told = curves.read(places.metrics, resumed, 1 << 30)
    assert told.loss.rows == 1000
    assert told.evaluations["accuracy"].rows == 3
    assert sorted(resumed.values()) == [0, 240, 480, 750]


def test_torn_foreign_and_absurd_rows_cost_only_themselves(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [b'{"attempt": 1, "step": %d, "time": %d, "loss": 1.0, "samples": %d}' % (n, n, n) for n in range(1, 11)]
    odd = [
        b'{"attempt": 1, "st', b"[]", b"null", b"1, 2", b'"x"', b"\xff\xfe", b"[" * 50_000, b"{}", b"1], [2",
        b'{"attempt": 1, "step": 1e999, "time": 1}', b'{"attempt": 1, "step": true, "time": "x"}',
        b'{"attempt": 1, "step": 11, "time": 11, "loss": "nan"}', b'{"attempt": 1, "step": 12, "time": 12, "loss": {}}',
    ]  # fmt: skip
    file.write_bytes(b"\n".join([*rows[:5], *odd, *rows[5:]]) + b"\n")
    told = curves.read(file, {1: 0}, 1 << 30)
    assert (told.loss.rows, told.loss.odd_rows) == (11, 1)
    assert curves.read(tmp_path / "none", {}, 10).loss.rows == 0


def test_a_million_rows_are_read_in_seconds_with_little_memory_and_keep_their_spike(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as out:
        for begin in range(1, 1_000_001, 1000):
            row = '{"attempt":1,"step":%d,"time":%d.5,"loss":%s,"samples":%d}\n'
            lines = (row % (n, n, "91.5" if n == 654_321 else "1.25", 50 * n) for n in range(begin, begin + 1000))
            out.write("".join(lines))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    told = curves.read(file, {1: 0}, reporting.WHOLE_BYTES)
    assert time.process_time() - began < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    assert told.loss.rows == 1_000_000
    assert len(told.loss.points) <= 400
    assert max(point.high for point in told.loss.points) == 91.5
    began = time.process_time()
    sampled = curves.read(file, {1: 0}, reporting.QUICK_BYTES)
    assert time.process_time() - began < 3
    assert not sampled.whole
    assert 50_000 < sampled.loss.rows < 300_000
    assert (sampled.loss.points[0].x < 10_000, sampled.loss.points[-1].x > 990_000) == (True, True)


def test_what_is_noted_of_a_job_holds_no_secret(tmp_path):
    places = ToldRun(tmp_path).write()
    job = TrainJob(
        name="mine", program="mine.py:build", data={"source": "data"}, steps=5, config={"hf_token": "very-secret-1"},
        tracking={"uri": "http://me:very-secret-2@host"}, ledger={"uri": "postgresql://me:very-secret-3@host/db"},
    )  # fmt: skip
    reporting.note(places, job, pytest.fail)
    reporting.again(places.persistent)
    left = b"".join(file.read_bytes() for file in places.persistent.iterdir() if file.is_file())
    assert b"very-secret" not in left
    assert b"http://***@host" in left


def test_a_report_that_cannot_be_made_is_told_and_raises_nothing(tmp_path):
    places = ToldRun(tmp_path).write()
    (places.persistent / "report.html").mkdir()
    heard = []
    chronicle = history.read(places)
    written = reporting.attempt(
        reporting.Reporter(places), chronicle, {}, lambda kind, **data: heard.append((kind, data["text"])), heard.append
    )
    assert not written
    assert [kind for kind, _ in heard] == ["report.failed"]
    assert "report.html" in heard[0][1] or "directory" in heard[0][1]


def test_a_report_that_nobody_takes_still_stands(tmp_path):
    places = ToldRun(tmp_path).write()
    heard = []

    def refuse(_report: RunReport) -> None:
        raise RuntimeError("no room\nmore")

    told = reporting.attempt(
        reporting.Reporter(places), history.read(places), {}, lambda kind, **data: heard.append(data["text"]), refuse
    )
    assert told
    assert heard == ["the report could not be made: RuntimeError: no room"]


def test_links_lead_only_to_pages_that_are_there(tmp_path):
    told = ToldRun(tmp_path)
    run_dir = told.write().persistent
    told.event("gate.data", "12 of 12 hold", ok=True, docs="data-docs/index.html")
    assert [one.link for one in reporting.again(run_dir).gates] == [""]
    (run_dir / "data-docs").mkdir()
    (run_dir / "data-docs" / "index.html").touch()
    assert [one.link for one in reporting.again(run_dir).gates] == ["data-docs/index.html"]
    assert '<a href="data-docs/index.html">Data Docs</a>' in (run_dir / "report.html").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_lock_that_cannot_be_read_is_no_owner(tmp_path):
    run_dir = ToldRun(tmp_path, status=None).write().persistent
    (run_dir / "owner.lock").touch(mode=0o000)
    assert reporting.again(run_dir).status == "killed"


def test_an_importing_process_draws_nothing_heavy():
    code = "import everstep.host.reporting, sys; print([m for m in ('matplotlib', 'jinja2', 'mlflow', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
