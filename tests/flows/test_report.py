"""A run's report: it stands at every end, Prefect shows it, and nothing that goes wrong with it reaches the run."""

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from everstep.core.summary import RunReport


def read(desk) -> RunReport:
    return RunReport.model_validate_json((desk.run_dir / "report.json").read_bytes())


def test_a_completed_run_has_its_page_and_its_record(completed):
    desk, ended = completed
    report = read(desk)
    page = Path(ended.final["report"])
    assert page == desk.run_dir / "report.html"
    assert "Completed: step 60 of 60." in page.read_text()
    assert report.status == "completed"
    assert (report.step, report.steps) == (60, 60)
    assert report.time.buckets == ended.final["buckets"], "the page and the JSON line say the same"
    assert abs(sum(report.time.buckets.values()) - report.time.wall) < 1e-6
    assert report.loss.rows == 60
    assert report.places["MLflow run"] == ended.final["mlflow_run"]
    assert report.job["steps"] == 60
    assert 2 <= report.checkpoint_counts["saved"] <= 12
    assert report.environment["torch"]


def test_mlflow_shows_the_report_of_a_completed_run(completed):
    desk, ended = completed
    (page,) = (desk.folder / "mlartifacts" / "whole").glob(f"{ended.final['mlflow_run']}/artifacts/report.html")
    assert "Completed: step 60 of 60." in page.read_text()
    assert RunReport.model_validate_json(page.with_suffix(".json").read_bytes()).step == 60


def test_prefect_shows_the_report_of_a_completed_run(completed, ask):
    desk, _ = completed
    (found,) = ask("artifacts/filter", {"artifacts": {"key": {"any_": ["report-whole"]}}})
    assert found["type"] == "markdown"
    assert "Completed&#58; step 60 of 60." in found["data"]
    assert "| productive |" in found["data"]
    (link,) = ask("artifacts/filter", {"artifacts": {"key": {"any_": ["page-whole"]}}})
    assert (desk.run_dir / "report.html").as_uri() in link["data"]
    assert found["flow_run_id"] == link["flow_run_id"]
    assert found["flow_run_id"]


@pytest.mark.sampled
def test_a_stopped_and_then_killed_run_has_its_report_too(make_desk):
    desk = make_desk("halting", server="own", config={"pause": 0.2})
    flow = desk.start()
    desk.await_step(6, flow)
    asked = time.monotonic()
    flow.send_signal(signal.SIGTERM)
    ended = desk.wait(flow)
    assert time.monotonic() - asked < 15
    assert ended.code == 75, ended.err
    report = read(desk)
    assert report.status == "stopped"
    assert "Stopped on request" in (desk.run_dir / "report.html").read_text()
    desk.await_gone()


@pytest.mark.sampled
def test_a_failed_run_says_why_on_its_page(make_desk):
    desk = make_desk("failing", config={"build": ["raise ValueError('<script>alert(1)</script> is no good')"]})
    ended = desk.run()
    assert ended.code == 2
    report = read(desk)
    assert report.status == "failed"
    assert "is no good" in report.headline[0]
    page = (desk.run_dir / "report.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page


@pytest.mark.sampled
def test_a_report_that_cannot_be_written_is_no_reason_to_fail(make_desk):
    """The place of the page is taken by a folder: the run completes, says so in its events, and names the text."""
    desk = make_desk("unreported", config={"pause": 0.2})
    flow = desk.start()
    desk.await_step(3, flow)
    (desk.run_dir / "report.html").mkdir()
    (desk.run_dir / "report.html" / "x").touch()
    ended = desk.wait(flow)
    assert ended.code == 0, ended.err
    assert ended.final["report"].endswith("report.txt")
    events = [json.loads(line) for line in (desk.run_dir / "events.jsonl").read_text().splitlines()]
    assert [one["severity"] for one in events if one["kind"] == "report.failed"] == ["medium"]


def test_prefect_that_does_not_answer_is_not_waited_for(completed, monkeypatch):
    """A server that accepts and says nothing."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from tasks import report

    monkeypatch.setattr(report, "DEADLINE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}):
            began = time.monotonic()
            report.tell(read(completed[0]))
            assert time.monotonic() - began < 5
