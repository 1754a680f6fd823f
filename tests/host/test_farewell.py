"""The closing lines: where to look, and nothing that a terminal would obey."""

import pytest

from everstep.core.job import TrainJob
from everstep.host import farewell

JOB = TrainJob(name="x", program="a:b", data={"source": "d"}, steps=1)
FINAL = {"status": "completed", "step": 9, "report": "/runs/report.html", "mlflow_run": "abc"}


def lines(final=FINAL, shown="", job=JOB, flow_run=""):
    return "\n".join(farewell.lines(final, {"loss": 0.5, "best": 1.0}, shown, job, flow_run))


def test_a_completed_run_says_how_it_stands_and_where_to_look(monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    said = lines(shown="one\ntwo")
    assert said.startswith("completed: step 9, best 1, loss 0.5\n  | one\n  | two\n")
    assert "/runs/report.html" in said
    assert "mlflow ui --backend-store-uri sqlite:///.everstep/mlflow.db" in said
    assert "prefect server start" in said


def test_a_server_that_others_see_is_linked(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    assert "http://127.0.0.1:4200/runs/flow-run/f-1" in lines(flow_run="f-1")


@pytest.mark.parametrize("uri", ["http://me:secret@mlflow:5000", "postgresql://me:secret@db/mlflow"])
def test_no_password_is_repeated(uri):
    said = lines(job=JOB.model_copy(update={"tracking": JOB.tracking.model_copy(update={"uri": uri})}))
    assert "secret" not in said


def test_a_text_cannot_speak_to_the_terminal():
    assert farewell.printable("a\x1b[2Jb\r\tc\u202e") == "a\u00b7[2Jb\u00b7\tc\u00b7"


def test_a_stopped_run_says_how_to_go_on():
    assert lines(FINAL | {"status": "stopped"}) == "stopped at step 9; run the same command to go on"
