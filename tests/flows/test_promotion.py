"""Promotion at the end of a run: what stands in MLflow's registry, what is refused, and what a kill in between leaves."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs import mlflow_server

import everstep
from everstep.core.checkpoint import Manifest
from everstep.host import mlflow_run

BEST = {"every_steps": 5, "best": {"metric": "bias", "mode": "max"}}
KILLS = ("promote.before_version", "promote.before_production")
MORE_KILLS = ("promote.before_artifact", "promote.after_version", "promote.begin", "promote.before_done")
OTHER_KILLS = ("promote.before_candidate", "promote.before_previous", "promote.after_production", "flow.report")


def registry(desk):
    return mlflow_run.connect(f"sqlite:///{desk.folder / 'mlflow.db'}")


def aliases(desk) -> dict[str, str]:
    found = registry(desk).get_registered_model(desk.job["name"]).aliases
    return {name: str(number) for name, number in found.items()}


def events(desk, kind: str) -> list[dict]:
    rows = map(json.loads, (desk.run_dir / "events.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.sampled
def test_the_best_checkpoint_is_released(make_desk):
    """BC-111: MLflow gets the manifest and the names, and the weights stay where they are."""
    desk = make_desk(release=True, checkpoint=BEST, config={"width": 30_000})
    ended = desk.run()
    assert ended.code == 0, ended.err
    promoted = ended.final["promotion"]
    assert promoted["status"] == "production", promoted
    number = promoted["version"]
    assert aliases(desk) == {"candidate": number, "production": number}
    assert f"released: small version {number} ({promoted['checkpoint']}) is in production" in ended.err

    version = registry(desk).get_model_version("small", number)
    folder = Path(version.tags["everstep.uri"].removeprefix("file://"))
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    assert version.tags["everstep.digest"] == everstep.weights_digest(everstep.load_checkpoint(folder))
    assert version.tags["everstep.step"] == str(manifest.step)
    assert version.tags["everstep.dataset"] == manifest.dataset_fingerprint
    assert version.run_id == ended.final["mlflow_run"]
    biases = {}
    for one in (desk.run_dir / "checkpoints").glob("*/manifest.json"):
        measured = Manifest.model_validate_json(one.read_bytes())
        if isinstance(bias := measured.metrics.get("bias"), float):
            biases[measured.step] = bias
    assert manifest.step == max(biases, key=biases.get)

    source = Path(version.source.removeprefix("file://"))
    assert (source / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()
    logged = [path for path in (desk.folder / "mlartifacts").rglob("*") if path.is_file()]
    assert not [path for path in logged if path.suffix == ".safetensors"]
    assert manifest.bytes > 1_000_000 > max(path.stat().st_size for path in source.iterdir())
    assert json.loads((desk.run_dir / "pinned.json").read_text()) == [promoted["checkpoint"]]


@pytest.mark.sampled
def test_a_worse_model_and_one_without_its_metric_are_not_released_in_silence(make_desk):
    """BC-173: training counts as completed, and one sentence says why the model stays candidate."""
    desk = make_desk(release=True, checkpoint=BEST)
    first = desk.run()
    production = first.final["promotion"]["version"]
    registry(desk).set_model_version_tag("small", production, "everstep.metrics", '{"bias": 1e6}')
    desk.job |= {"fresh": True, "seed": 1}
    worse = desk.run()
    assert worse.code == 0, worse.err
    assert worse.final["promotion"]["status"] == "refused"
    sentence = worse.final["promotion"]["reason"]
    assert f"is worse than the 1e+06 of production (version {production})." in sentence
    assert f"not released: {sentence}" in worse.err
    assert [event["text"] for event in events(desk, "promotion.refused")] == [sentence]
    assert aliases(desk) == {"candidate": worse.final["promotion"]["version"], "production": production}

    desk.job |= {"seed": 2, "checkpoint": {"every_steps": 5, "best": {"metric": "undefined"}}}
    without = desk.run()
    assert without.code == 0
    assert without.final["status"] == "completed"
    assert "'undefined', which checkpoint.best names, is nan." in without.final["promotion"]["reason"]
    assert aliases(desk)["production"] == production


PROBING = "import sys; probing = any('reprobe' in word for word in sys.orig_argv)"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("batch[1].add_(1)", "the loss on a fixed batch was "),
        pytest.param("batch[1].mul_(float('nan'))", "the loss on a fixed batch was ", marks=pytest.mark.sampled),
        pytest.param("raise OSError('no such device')", "no such device", marks=pytest.mark.sampled),
        pytest.param("__import__('os')._exit(3)", "ended with status 3; its log is ", marks=pytest.mark.sampled),
    ],
)
def test_a_probe_that_is_not_reproduced_is_no_release(make_desk, does, words):
    desk = make_desk(release=True, config={"loss": [f"{PROBING}\nif probing: {does}"]})
    ended = desk.run()
    assert ended.code == 0, ended.err
    assert ended.final["status"] == "completed"
    assert ended.final["promotion"]["status"] == "refused"
    assert words in ended.final["promotion"]["reason"]
    assert set(aliases(desk)) == {"candidate"}
    desk.await_gone()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("does", "words", "drain"),
    [
        ("time.sleep(100)", "did not end within limits.drain", 12),
        pytest.param("__import__('os').kill(0, 9)", "ended with status -9", 90, marks=pytest.mark.sampled),
    ],
)
def test_a_probe_without_an_answer_is_no_verdict_and_is_computed_again(make_desk, tmp_path, does, words, drain):
    """Unknown is not failed: the model waits as candidate, and the next flow run of the job releases it."""
    hangs = f"{PROBING}\nif probing and not __import__('os').path.exists({str(tmp_path / 'well')!r}): {does}"
    desk = make_desk(release=True, config={"loss": [hangs]}, limits={"drain": drain})
    ended = desk.run()
    assert (ended.code, ended.final["status"]) == (0, "completed"), ended.err
    waiting = ended.final["promotion"]
    assert waiting["status"] == "waiting"
    assert words in waiting["reason"]
    assert waiting["reason"].endswith("; run the same command again.")
    assert aliases(desk) == {"candidate": waiting["version"]}
    desk.await_gone()

    (tmp_path / "well").touch()
    desk.job["limits"] = {"drain": 90}
    again = desk.run()
    assert again.code == 0, again.err
    released = {"status": "production", "version": waiting["version"], "checkpoint": waiting["checkpoint"]}
    assert again.final["promotion"] == again.final["promotion"] | released
    assert again.final | {"promotion": waiting} == ended.final, "nothing else has changed"
    assert desk.run().final == again.final


@pytest.mark.sampled
def test_a_complete_run_is_released_when_its_job_says_so_later(make_desk):
    """Released, and said so in the JSON line, by the same rules; `release: false` again takes nothing back."""
    desk = make_desk(checkpoint=BEST)
    first = desk.run()
    assert first.final["promotion"]["status"] == "candidate", first.err
    assert set(aliases(desk)) == {"candidate"}

    desk.job["release"] = True
    released = desk.run()
    assert released.code == 0, released.err
    version = first.final["promotion"]["version"]
    assert released.final["promotion"] == first.final["promotion"] | {"status": "production", "previous": None}
    assert released.final | {"promotion": first.final["promotion"]} == first.final, "nothing else has changed"
    assert aliases(desk) == {"candidate": version, "production": version}
    assert f"released: small version {version}" in released.err
    (probed,) = events(desk, "promotion.probe")
    assert probed["data"]["checkpoint"] == released.final["promotion"]["checkpoint"]

    assert desk.run().final == released.final
    desk.job["release"] = False
    assert desk.run().final == released.final
    assert aliases(desk) == {"candidate": version, "production": version}
    assert len(events(desk, "promotion.probe")) == 1
    desk.await_gone()


@pytest.mark.sampled
def test_a_late_release_is_refused_by_the_same_rules_and_judged_again(make_desk):
    desk = make_desk(checkpoint=BEST)
    ours = desk.run().final["promotion"]["version"]
    client = registry(desk)
    source = client.get_model_version("small", ours).source
    better = client.create_model_version("small", source, tags={"everstep.metrics": '{"bias": 1e6}'}).version
    client.set_registered_model_alias("small", "production", str(better))
    desk.job["release"] = True
    refused = desk.run()
    assert refused.code == 0
    assert refused.final["promotion"]["status"] == "refused"
    assert "is worse than the 1e+06 of production" in refused.final["promotion"]["reason"]
    assert aliases(desk)["production"] == str(better)
    client.delete_registered_model_alias("small", "production")
    assert desk.run().final["promotion"]["status"] == "production"
    assert aliases(desk)["production"] == ours


@pytest.mark.sampled
@pytest.mark.parametrize(
    "points", [KILLS, *(pytest.param(one, marks=pytest.mark.sampled) for one in (MORE_KILLS, OTHER_KILLS))]
)
def test_a_promotion_that_is_killed_again_and_again_is_finished_by_the_next_flow_run(make_desk, points):
    desk = make_desk(release=True, checkpoint=BEST)
    environment = desk.plan(*({"point": point} for point in points))
    for _ in points:
        killed = desk.run(**environment)
        if killed.code == 0:
            break
        assert killed.code == -9, killed.err
    ended = killed if killed.code == 0 else desk.run(**environment)
    assert ended.code == 0, ended.err
    assert len(list(desk.folder.glob("faults-*.fired"))) == len(points)
    promoted = ended.final["promotion"]
    assert promoted["status"] == "production"
    assert aliases(desk) == {"candidate": promoted["version"], "production": promoted["version"]}
    versions = registry(desk).search_model_versions("name='small'")
    digests = [one.tags["everstep.digest"] for one in versions]
    assert len(digests) == len(set(digests)), "one version for each checkpoint"
    (run,) = registry(desk).search_runs([registry(desk).get_experiment_by_name("small").experiment_id])
    assert run.info.status == "FINISHED"


@pytest.fixture
def mlflow_process(tmp_path, mlflow_template) -> Iterator[int]:
    """The port of a real `mlflow server`, as a team runs one. Its start takes half a minute."""
    shutil.copy(mlflow_template, tmp_path / "server.db")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            ["timeout", "-k", "5", "280", *command], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            await_health(server, port)
            yield port
        finally:
            server.terminate()
            server.wait(30)


def await_health(server: subprocess.Popen, port: int) -> None:
    until = time.monotonic() + 150
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise AssertionError("the MLflow server did not start")


MOST = 8_000_000


@pytest.mark.sampled
def test_nothing_large_goes_to_a_server_behind_a_gateway_with_small_limits(make_desk, mlflow_template, tmp_path):
    """BC-111: checkpoints of 66 MB, requests of at most 8 MB and 2 s; MLflow has a reference that can be resolved."""
    shutil.copy(mlflow_template, tmp_path / "server.db")
    with mlflow_server.serving(tmp_path / "server.db", tmp_path / "artifacts") as port:
        gateway = mlflow_server.Proxy(port, limit=MOST, seconds=2)
        try:
            policy = {"every_steps": 10, "best": {"metric": "bias", "mode": "max"}}
            desk = make_desk(
                release=True, checkpoint=policy, config={"width": 550_000}, tracking={"uri": gateway.uri},
                limits={"drain": 120},
            )  # fmt: skip
            ended = desk.run()
        finally:
            gateway.close()
        assert (ended.code, ended.final["status"]) == (0, "completed"), ended.err
        assert ended.final["promotion"]["status"] == "production", ended.err
        assert not [status for status in gateway.refused if status == 413]
        assert 0 < max(gateway.sizes) <= MOST
        client = mlflow_run.connect(f"http://127.0.0.1:{port}")
        tags = client.get_model_version("small", ended.final["promotion"]["version"]).tags
        assert everstep.verify_checkpoint(tags["everstep.uri"]).ok
        assert (
            Manifest.model_validate_json(
                (Path(tags["everstep.uri"].removeprefix("file://")) / "manifest.json").read_bytes()
            ).bytes
            > 60_000_000
        )
        assert everstep.weights_digest(everstep.load_checkpoint(tags["everstep.uri"])) == tags["everstep.digest"]
        run = client.get_run(ended.final["mlflow_run"])
        assert run.info.status == "FINISHED"
        assert {one.path for one in client.list_artifacts(run.info.run_id)} >= {"report.html", "report.json"}


@pytest.mark.sampled
def test_a_promotion_that_was_asked_while_mlflow_was_away_happens_when_it_is_back(make_desk, mlflow_process):
    """BC-102, on a real server: training and its end wait for nobody, and nothing is lost."""
    proxy = mlflow_server.Proxy(mlflow_process)
    try:
        desk = make_desk(release=True, checkpoint=BEST, tracking={"uri": proxy.uri}, limits={"drain": 40})
        short = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        proxy.mode = "500"
        away = desk.run(**short)
        assert away.code == 0, away.err
        assert away.final["status"] == "completed"
        assert away.final["promotion"]["status"] == "waiting"
        assert "run the same command again" in away.final["promotion"]["reason"]

        proxy.mode = "pass"
        desk.job["limits"] = {"drain": 120}
        back = desk.run(**short)
        assert back.code == 0, back.err
        promoted = back.final["promotion"]
        assert promoted["status"] == "production", back.err
        assert back.final | {"promotion": away.final["promotion"]} == away.final, "nothing else has changed"
        client = mlflow_run.connect(f"http://127.0.0.1:{mlflow_process}")
        model = client.get_registered_model("small")
        assert str(model.aliases["production"]) == promoted["version"]
        version = client.get_model_version("small", promoted["version"])
        assert version.source.startswith("mlflow-artifacts:/")
        names = [file.path for file in client.list_artifacts(version.run_id, f"checkpoints/{promoted['checkpoint']}")]
        assert f"checkpoints/{promoted['checkpoint']}/manifest.json" in names
        assert client.get_run(version.run_id).info.status == "FINISHED"
        assert desk.run(**short).final == back.final
    finally:
        proxy.close()
