"""The README is true: its commands exist, its snippets run, its listings are what is there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from everstep.host import console

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    fenced = README.split("```")[1::2]
    return [text for name, _, text in (block.partition("\n") for block in fenced) if name == language]


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The README's own program and job, run by the README's own command; the folder and what came out."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(blocks("python")[0])
    (folder / "mine.yaml").write_text(blocks("yaml")[0])
    (folder / "data").mkdir()
    run(folder, "-c", "import torch; torch.save(torch.randn(256, 9), 'data/table.pt')")
    command = next(line for line in "".join(blocks("sh")).splitlines() if "flows.train" in line).split()
    assert command[0] == "python"
    return folder, run(folder, *command[1:])


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with no Prefect server named."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "EVERSTEP_"))}
    env |= {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(folder / "prefect"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    return done


def test_it_is_short():
    assert len(README.splitlines()) < 200


def test_its_shell_commands_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"make ([a-z-]+)[`\n]", README)) == set(targets)
    assert "mlflow ui --backend-store-uri sqlite:///" in README
    assert Path(sys.executable).with_name("mlflow").exists()


def test_its_job_uses_defaults_where_it_says_what_they_are(mine):
    from everstep.core.job import TrainJob
    from everstep.host import jobs

    folder = mine[0]
    job = jobs.read(folder / "mine.yaml")
    assert job.tiers == TrainJob(name="x", program="a:b", data={"source": "d"}, steps=1).resolve(folder).tiers
    assert len(blocks("python")[0].splitlines()) <= 16, "a program in 15 lines"


def test_what_it_adds_to_a_job_is_one():
    from everstep.core.job import TrainJob

    fields = yaml.safe_load(blocks("yaml")[0]) | yaml.safe_load(blocks("yaml")[1])
    job = TrainJob.model_validate(fields)
    assert job.release
    assert job.tiers.object == "s3://models/everstep"


def test_the_json_line_has_the_fields_of_the_table(mine):
    line = json.loads(mine[1].stdout.splitlines()[-1])
    table = README[README.index("| field | meaning |") : README.index("Exit codes:")]
    rows = [row.split("|")[1] for row in table.splitlines()[2:] if row.startswith("|")]
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(told) == sorted(line)
    assert line["status"] == "completed"
    assert list(line["metrics"]) == ["bias"]


def test_a_run_directory_holds_what_is_listed_and_nothing_else(mine):
    listing = next(block for block in blocks("") if "run.json" in block)
    names = [re.split(r"\s{2,}", line.strip())[0] for line in listing.splitlines()[1:]]
    told = {name.rstrip("/") for group in names for name in group.split(", ")}
    run_dir = Path(json.loads(mine[1].stdout.splitlines()[-1])["run_dir"])
    assert told == {path.name for path in run_dir.iterdir()}
    folders = {name.rstrip("/") for name in names if name.endswith("/")}
    assert folders == {path.name for path in run_dir.iterdir() if path.is_dir()}


def test_its_notebook_snippets_run_and_mean_the_same_run(mine):
    folder, first = mine
    notebook, check = blocks("python")[1:]
    done = run(folder, "-c", f"{notebook}\n{check}\nimport json; print(json.dumps(result)); print(run.status)")
    assert done.stdout.splitlines() == [first.stdout.splitlines()[-1], "completed"]


def test_the_exit_codes_are_those_of_the_console():
    sentence = README[README.index("Exit codes:") :]
    told = [int(code) for code in re.findall(r"\b(\d+) ", sentence[: sentence.index("Run the same")])]
    assert told == [console.COMPLETED, console.STOPPED, console.USER, console.FAILED]


def test_the_tree_is_the_tree():
    listing = next(block for block in blocks("") if "flows/" in block)
    told, above = set(), ""
    for line in listing.splitlines():
        name = line.split()[0].rstrip("/")
        above = above if line.startswith(" ") else name
        told.add(f"{above}/{name}" if line.startswith(" ") else name)
    there = {folder.name for folder in ROOT.iterdir() if holds_files(folder)}
    there |= {f"everstep/{folder.name}" for folder in (ROOT / "everstep").iterdir() if holds_files(folder)}
    assert told == there


def holds_files(folder: Path) -> bool:
    """Whether it is a folder of ours: no cache, no build."""
    name = folder.name
    if not folder.is_dir() or name.startswith((".", "__")) or name == "build" or name.endswith(".egg-info"):
        return False
    return any(path.is_file() and path.suffix != ".pyc" for path in folder.rglob("*"))


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
