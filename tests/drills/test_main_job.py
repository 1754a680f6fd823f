"""The main job at full width, small: a corpus in a bucket, a byte-level GPT, checkpoints in the bucket, a killed machine."""

import contextlib
import json
import os
import shutil
import signal
import sysconfig
import time
from pathlib import Path

import pytest
from rigs import verdicts
from test_object import events, use

import everstep
from everstep.host import mlflow_run, process

TAG = "everstep.checkpoint"
GPT = {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch_size": 8, "lr": 0.01, "warmup": 5, "decay_steps": 60}


def corpus() -> dict[str, bytes]:
    """Shards of a few modules of Python's library, as everstep.programs.corpus cuts the whole of it."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "calendar", "dataclasses", "inspect", "textwrap")
    text = b"\0".join((library / f"{name}.py").read_bytes() for name in names)
    third = len(text) // 3
    return {"train-000.bin": text[:third], "train-001.bin": text[third:-20_000], "held-000.bin": text[-20_000:]}


def kill_all(drill, flow) -> None:
    """The machine goes: nothing of the run on it can tell anybody anything."""
    for pid in (flow.pid, *process.marked(drill.token())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    drill.wait(flow)
    drill.await_gone()


def name_of(drill) -> str:
    """The run of a drill; empty while there is none."""
    return max((path.name for path in drill.home.glob("r*")), default="")


def until(true, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.timeout(1200)
def test_from_a_bucket_to_production_over_a_killed_machine(
    make_drill, s3_server, mlflow_template, tmp_path, monkeypatch
):
    """Staged from S3, trained, killed in the middle, resumed by a machine that has nothing but bucket and MLflow."""
    bucket, shards = s3_server.bucket(), corpus()
    s3_server.put(bucket, {f"corpus/{name}": data for name, data in shards.items()})

    def machine(world: str):
        """A folder with nothing in it. Machines of one world share a place for checkpoints and an MLflow."""
        database = tmp_path / f"{world}.db"
        if not database.exists():
            shutil.copy(mlflow_template, database)
        drill = make_drill(
            "gpt",
            config=GPT,
            program="everstep.programs.byte_gpt:build",
            data={"source": f"s3://{bucket}/corpus"},
            checkpoint={"every_steps": 10, "best": {"metric": "bits_per_byte", "mode": "min"}},
            tracking={"uri": f"sqlite:///{database}"},
            limits={"drain": 120, "train_floor": 600},
            release=True,
        )
        shutil.rmtree(drill.folder / "nvme")
        shutil.rmtree(drill.folder / "data")
        return use(drill, f"s3://{bucket}/{world}")

    untouched = machine("calm")
    plant(shards, tmp_path, untouched)
    calm = untouched.run(environment=s3_server.env())
    assert calm.code == 0, calm.err

    first = machine("hurt")
    flow = first.start({"point": "train.step_end", "hit": 39, "do": "stop"}, environment=s3_server.env())
    hurt = mlflow_run.connect(f"sqlite:///{tmp_path / 'hurt.db'}")
    until(lambda: name_of(first))
    name = name_of(first)
    there = f"s3://{bucket}/hurt/gpt/{name}/checkpoints/step-00000030.a1"
    until(lambda: (run := mlflow_run.find(hurt, "gpt", name)) and run.data.tags.get(TAG) == there)
    until(lambda: mlflow_run.newest_step(mlflow_run.find(hurt, "gpt", name)) >= 30)
    kill_all(first, flow)

    second = machine("hurt")
    ended = second.run(environment=s3_server.env())
    assert ended.code == 0, ended.err
    assert ended.final["weights"] == calm.final["weights"]
    assert (ended.final["step"], ended.final["resumed_from"]) == (60, 30)
    assert [one["data"]["tier"] for one in events(second, "checkpoint.fetched")] == ["object"]
    hints = [one["data"]["checkpoint"] for one in events(second, "tracking.hint")]
    assert hints == [there], "MLflow was asked first, and named it"
    before = {one["id"] for one in events(first, "gate.data")}
    judged = [one for one in events(second, "gate.data") if one["id"] not in before]
    assert len(judged) == 1, "the data were judged on this machine, too"
    staged = {path.name: path.read_bytes() for path in second.folder.glob("nvme/datasets/*/data/*")}
    assert staged == shards

    promoted = ended.final["promotion"]
    assert promoted["status"] == "production", ended.err
    tags = hurt.get_model_version("gpt", promoted["version"]).tags
    assert tags["everstep.uri"].startswith(f"s3://{bucket}/hurt/gpt/")
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    assert everstep.weights_digest(everstep.load_checkpoint(tags["everstep.uri"])) == tags["everstep.digest"]
    (run,) = hurt.search_runs([hurt.get_experiment_by_name("gpt").experiment_id])
    assert (run.info.run_id, run.info.status) == (ended.final["mlflow_run"], "FINISHED")
    steps = [metric.step for metric in hurt.get_metric_history(run.info.run_id, "loss")]
    assert sorted(steps) == sorted(set(steps)), "each step once"
    assert {*range(1, 31), *range(36, 61)} <= {*steps}
    report = json.loads((second.run_dir / "report.json").read_text())
    assert report["name"] == "gpt"
    for drill in (untouched, first, second):
        drill.await_gone()
        for path in drill.folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                assert s3_server.secret_key.encode() not in path.read_bytes(), path


def plant(shards: dict[str, bytes], tmp_path: Path, drill) -> None:
    """The gate's verdict on this corpus, as an earlier run on the machine would have left it."""
    (tmp_path / "corpus").mkdir()
    for name, data in shards.items():
        (tmp_path / "corpus" / name).write_bytes(data)
    verdicts.plant(tmp_path / "corpus", drill.folder / "nvme")
