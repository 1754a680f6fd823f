"""MLflow through outages and restarts: one run, each step once, and nothing that waits for it."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rigs import mlflow_server

from everstep.host import mlflow_run
from everstep.host.mlflow_speaker import Hint, Subject, hint_in
from everstep.host.tracking import ARTIFACT_LIMIT, Tracker
from everstep.store import jsonl

SUBJECT = Subject("job", "run-1", {"everstep.job": "job", "everstep.fingerprint": "f" * 64}, {"config": {"layers": 4}})


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "metrics.jsonl"


def train(metrics: Path, attempt: int, steps: range, **more: Any) -> None:
    rows = [
        {
            "attempt": attempt,
            "step": step,
            "time": 1000.0 * attempt + step,
            "loss": 1 / step,
            "lr": 0.1,
            "samples": 4 * step,
        }
        for step in steps
    ]
    jsonl.append(metrics, [json.dumps(row | more) for row in rows])


def tracker(uri: str, metrics: Path, subject: Subject = SUBJECT, **options: Any) -> Tracker:
    return Tracker(uri, subject, metrics, look_seconds=0.05, longest_wait=0.3, **options)


def history(uri: str, run_id: str, key: str = "loss") -> list[tuple[int, float]]:
    found = mlflow_run.connect(uri).get_metric_history(run_id, key)
    return sorted((metric.step, metric.value) for metric in found)


def runs(uri: str, job: str = "job") -> list[Any]:
    client = mlflow_run.connect(uri)
    return list(client.search_runs([client.get_experiment_by_name(job).experiment_id]))


def until(true: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_shown_whole(uri: str, metrics: Path) -> None:
    train(metrics, 1, range(1, 21))
    train(metrics, 1, range(21, 22), epoch=2, eval={"accuracy": 0.5, "bad key!": 1})
    one = tracker(uri, metrics)
    one.start()
    one.attempt(1, 0)
    one.finish("completed", Path("/tier/job/run-1/checkpoints/step-00000020.a1"))
    assert one.close(60)
    (found,) = runs(uri)
    assert found.info.run_id == one.run_id
    assert found.info.status == "FINISHED"
    assert found.info.end_time
    assert (
        found.data.tags | {"everstep.run": "run-1", "everstep.job": "job", "everstep.attempts": "1"} == found.data.tags
    )
    assert found.data.tags["everstep.checkpoint"] == "file:///tier/job/run-1/checkpoints/step-00000020.a1"
    assert found.data.params == {"config.layers": "4"}
    assert history(uri, one.run_id) == [(step, 1 / step) for step in range(1, 22)]
    assert history(uri, one.run_id, "samples") == [(step, 4.0 * step) for step in range(1, 22)]
    assert history(uri, one.run_id, "eval/accuracy") == [(21, 0.5)]
    assert history(uri, one.run_id, "eval/bad key_") == [(21, 1.0)]
    assert hint_in(found) == Hint(found.data.tags["everstep.checkpoint"], 20, one.run_id)
    assert not metrics.with_name("tracking.json").exists()


def test_restarts_share_one_run_and_log_no_step_twice(uri: str, metrics: Path) -> None:
    seen = []
    for attempt, steps in enumerate([range(1, 18), range(11, 15), range(11, 31)], start=1):
        train(metrics, attempt, steps)
        one = tracker(uri, metrics)
        one.start()
        one.attempt(attempt, steps.start - 1)
        one.finish("stopped" if attempt < 3 else "failed", None)
        assert one.close(60)
        seen.append((one.run_id, runs(uri)[0].info.status, runs(uri)[0].data.tags["everstep.attempts"]))
    run_id = seen[0][0]
    assert seen == [(run_id, "KILLED", "1"), (run_id, "KILLED", "2"), (run_id, "FAILED", "3")]
    assert len(runs(uri)) == 1
    assert [step for step, _ in history(uri, run_id)] == list(range(1, 31))


def test_a_restarted_run_is_running_again_and_its_hint_is_known(uri: str, metrics: Path) -> None:
    one = tracker(uri, metrics)
    one.start()
    one.checkpoint("file:///tier/step-00000010.a1", 10)
    one.finish("stopped", None)
    assert one.close(60)
    two = tracker(uri, metrics)
    two.start()
    assert two.hint(20) == Hint("file:///tier/step-00000010.a1", 10, one.run_id or "")
    until(lambda: runs(uri)[0].info.status == "RUNNING")
    assert two.close(60)


def test_values_that_are_no_numbers_are_shown_as_such(uri: str, metrics: Path) -> None:
    jsonl.append(metrics, [json.dumps({"step": 1, "time": 1.0, "loss": "nan", "lr": "inf", "note": "x", "flag": True})])
    with metrics.open("ab") as file:
        file.write(b'{"torn\n[1]\n{"step": "2", "time": 1}\n{"step": 3}\n')
    train(metrics, 1, range(2, 4))
    one = tracker(uri, metrics)
    one.start()
    assert one.close(60)
    values = history(uri, one.run_id or "")
    assert [step for step, _ in values] == [1, 2, 3]
    assert values[0][1] != values[0][1]
    assert not history(uri, one.run_id or "", "note")


def test_many_rows_and_wide_rows_go_in_batches(uri: str, metrics: Path) -> None:
    train(metrics, 1, range(1, 1001))
    train(metrics, 1, range(1001, 1002), eval={f"m{number}": number for number in range(1500)})
    one = tracker(uri, metrics)
    one.start()
    assert one.close(60)
    assert [step for step, _ in history(uri, one.run_id or "")] == list(range(1, 1002))
    assert history(uri, one.run_id or "", "eval/m1499") == [(1001, 1499.0)]


def test_a_file_that_is_too_large_for_mlflow_stays_where_it_is(uri: str, metrics: Path) -> None:
    """Case BC-111: said once, and the others go."""
    heard: list[tuple[str, str]] = []
    metrics.with_name("small.html").write_text("small")
    with metrics.with_name("large.html").open("wb") as file:
        file.truncate(ARTIFACT_LIMIT + 1)
    one = tracker(uri, metrics, notice=lambda kind, text: heard.append((kind, text)))
    one.start()
    one.artifacts(["large.html", "small.html"])
    assert one.close(60)
    assert [file.path for file in mlflow_run.connect(uri).list_artifacts(one.run_id)] == ["small.html"]
    assert [kind for kind, _ in heard] == ["tracking.artifact"]
    assert "4,194,305 bytes are too many for MLflow" in heard[0][1]


def test_two_runs_in_one_process_do_not_meet(uri: str, tmp_path: Path) -> None:
    trackers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        train(tmp_path / name / "metrics.jsonl", 1, range(1, 6))
        trackers.append(tracker(uri, tmp_path / name / "metrics.jsonl", Subject("job", name)))
    for one in trackers:
        one.start()
    assert all(one.close(60) for one in trackers)
    assert {found.data.tags["everstep.run"] for found in runs(uri)} == {"a", "b"}
    assert all("mlflow.parentRunId" not in found.data.tags for found in runs(uri))
    assert [len(history(uri, one.run_id or "")) for one in trackers] == [5, 5]


def test_a_second_try_in_the_same_process_attaches_to_its_own_run(uri: str, tmp_path: Path) -> None:
    """Case BC-108: the first try raises in mid-run, on threads beside another run; nothing hidden is left active."""
    import mlflow

    trackers: dict[str, list[Tracker]] = {"a": [], "b": []}

    def flow(name: str, fails: bool) -> None:
        one = tracker(uri, tmp_path / name / "metrics.jsonl", Subject("job", name))
        trackers[name].append(one)
        one.start()
        try:
            one.attempt(len(trackers[name]), 0)
            until(lambda: one.run_id is not None)
            if fails:
                raise OSError("the disk is gone")
            one.finish("completed", None)
        finally:
            assert one.close(60)

    def twice(name: str) -> None:
        with pytest.raises(OSError, match="the disk is gone"):
            flow(name, fails=True)
        flow(name, fails=False)

    for name in trackers:
        (tmp_path / name).mkdir()
        train(tmp_path / name / "metrics.jsonl", 1, range(1, 6))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(twice, trackers))
    assert mlflow.active_run() is None
    assert {found.data.tags["everstep.run"]: found.info.status for found in runs(uri)} == {
        "a": "FINISHED",
        "b": "FINISHED",
    }
    assert len(runs(uri)) == 2
    assert all("mlflow.parentRunId" not in found.data.tags for found in runs(uri))
    for first, second in trackers.values():
        assert first.run_id == second.run_id
        assert [step for step, _ in history(uri, second.run_id or "")] == [1, 2, 3, 4, 5]


def test_a_run_that_somebody_deleted_is_written_anew(uri: str, metrics: Path) -> None:
    train(metrics, 1, range(1, 6))
    one = tracker(uri, metrics)
    one.start()
    until(lambda: one.run_id)
    first = one.run_id or ""
    until(lambda: len(history(uri, first)) == 5)
    mlflow_run.connect(uri).delete_run(first)
    train(metrics, 1, range(6, 8))
    assert one.close(60)
    assert one.run_id != first
    assert [step for step, _ in history(uri, one.run_id or "")] == list(range(1, 8))


def test_a_deleted_experiment_is_named_and_its_restoration_awaited(uri: str, metrics: Path) -> None:
    client = mlflow_run.connect(uri)
    client.delete_experiment(client.create_experiment("job"))
    heard: list[tuple[str, str]] = []
    one = tracker(uri, metrics, notice=lambda kind, text: heard.append((kind, text)))
    one.start()
    until(lambda: heard)
    assert "restore it" in heard[0][1]
    client.restore_experiment(client.get_experiment_by_name("job").experiment_id)
    assert one.close(60)
    assert [kind for kind, _ in heard] == ["tracking.away", "tracking.back"]


def test_a_tracker_that_never_started_closes_quietly(uri: str, metrics: Path) -> None:
    one = tracker(uri, metrics)
    one.close_quickly()
    assert not one.close(5)
    assert not metrics.with_name("tracking.json").exists()
    assert tracker(uri, metrics).replay(5) is False


KILLED = """
import sys
from pathlib import Path
from everstep.host.tracking import Subject, Tracker
one = Tracker(sys.argv[1], Subject("job", "run-1"), Path(sys.argv[2]), look_seconds=0.01)
one.start()
one.attempt(1, 0)
print("up", flush=True)
sys.stdin.read()
"""


def test_a_killed_flow_leaves_no_gap_and_no_double(uri: str, metrics: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, uri, str(metrics)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for step in range(1, 400):
        train(metrics, 1, range(step, step + 1))
        if step % 20 == 0 and step > 100 and runs_exist(uri) and history(uri, runs(uri)[0].info.run_id):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    train(metrics, 2, range(51, 121))
    train(metrics, 2, range(121, step + 60))
    one = tracker(uri, metrics)
    one.start()
    assert one.close(60)
    assert len(runs(uri)) == 1
    assert [number for number, _ in history(uri, one.run_id or "")] == list(range(1, step + 60))


def runs_exist(uri: str) -> bool:
    return mlflow_run.connect(uri).get_experiment_by_name("job") is not None and bool(runs(uri))


def test_outages_cost_neither_time_nor_metrics(
    proxy: mlflow_server.Proxy, server: tuple[int, str], metrics: Path
) -> None:
    heard: list[str] = []
    one = tracker(proxy.uri, metrics, notice=lambda kind, _: heard.append(kind))
    one.start()
    one.attempt(1, 0)
    train(metrics, 1, range(1, 20))
    until(lambda: one.run_id)
    proxy.mode = "500"
    train(metrics, 1, range(20, 40))
    until(lambda: heard == ["tracking.away"])
    proxy.mode = "drop"
    until(lambda: proxy.dropped == 1)
    until(lambda: heard[-1] == "tracking.back")
    train(metrics, 1, range(40, 50))
    proxy.mode = "500"
    until(lambda: heard[-1] == "tracking.away")
    began = time.monotonic()
    one.finish("stopped", Path("/tier/step-00000040.a1"))
    assert not one.close(0.2)
    assert time.monotonic() - began < 1
    assert json.loads(metrics.with_name("tracking.json").read_text())["status"] == "KILLED"

    proxy.mode = "hang"
    began = time.monotonic()
    two = tracker(proxy.uri, metrics, notice=lambda kind, _: heard.append(kind))
    two.start()
    two.attempt(2, 40)
    train(metrics, 2, range(41, 60))
    assert two.hint(0.1) is None
    assert time.monotonic() - began < 1
    until(lambda: heard.count("tracking.away") == 3)
    proxy.mode = "pass"
    proxy.release.set()
    two.finish("completed", None)
    assert two.close(60)
    (found,) = runs(server[1])
    assert found.info.status == "FINISHED"
    assert found.data.tags["everstep.checkpoint_step"] == "40"
    assert found.data.tags["everstep.attempts"] == "2"
    assert history(server[1], two.run_id or "") == [(step, 1 / step) for step in range(1, 60)]
    assert not metrics.with_name("tracking.json").exists()


def test_what_could_not_be_said_is_replayed_later(
    proxy: mlflow_server.Proxy, server: tuple[int, str], metrics: Path
) -> None:
    proxy.mode = "500"
    train(metrics, 1, range(1, 4))
    later = Subject("later", "run-2")
    one = tracker(proxy.uri, metrics, later)
    one.start()
    one.finish("completed", None)
    assert not one.close(0.3)
    proxy.mode = "pass"
    assert tracker(proxy.uri, metrics, later).replay(60)
    (found,) = runs(server[1], "later")
    assert found.info.status == "FINISHED"
    assert [step for step, _ in history(server[1], found.info.run_id)] == [1, 2, 3]


def test_a_database_whose_maker_was_killed_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "new" / "mlflow.db"
    make = "import sys; from everstep.host import mlflow_run; mlflow_run.connect(sys.argv[1]).search_experiments()"
    maker = subprocess.Popen([sys.executable, "-c", make, f"sqlite:///{file}"], stderr=subprocess.DEVNULL)
    try:
        until(lambda: any(file.parent.glob("*.new-*")) or file.exists())
    finally:
        maker.kill()
        maker.wait()
    assert not file.exists()
    assert mlflow_run.connect(f"sqlite:///{file}").search_experiments()
    assert not list(file.parent.glob("*.new-*"))
