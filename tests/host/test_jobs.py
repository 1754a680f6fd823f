"""Job files and programs are checked without running anything of the user's."""

from pathlib import Path

import pytest

from everstep.host import jobs

GOOD = """
name: tiny
program: program.py:build
data: {source: data}
steps: 10
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").write_text("x")
    (tmp_path / "program.py").write_text("raise RuntimeError('must not be run')\n\ndef build(config, data): ...\n")
    return tmp_path


def read(folder: Path, text: str) -> str:
    """The sentence with which a job is refused; empty if it is fine."""
    (folder / "job.yaml").write_text(text)
    try:
        jobs.check(jobs.read(folder / "job.yaml"), folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_good_job_is_accepted_and_its_paths_are_taken_from_its_folder(folder):
    assert read(folder, GOOD) == ""
    job = jobs.read(folder / "job.yaml")
    assert job.data.source == str(folder / "data")
    assert job.program == f"{folder}/program.py:build"
    assert job.tiers.local == str(folder / ".everstep/nvme")
    assert job.tracking.uri == f"sqlite:///{folder}/.everstep/mlflow.db"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "stepz: 3\n", ["stepz", "did you mean steps?"]),
        (GOOD + "checkpoint: {every_step: 3}\n", ["checkpoint.every_step", "did you mean every_steps?"]),
        (GOOD.replace("steps: 10", "steps: -5"), ["steps", "-5", "greater than 0"]),
        (GOOD.replace("steps: 10\n", ""), ["steps", "missing"]),
        (GOOD.replace("name: tiny", "name: ../../etc"), ["name", "../../etc", "a-z, 0-9 and dashes"]),
        (GOOD.replace("name: tiny", "name: Tiny"), ["name", "Tiny"]),
        (GOOD.replace("program.py:build", "program.py"), ["program", "path/to/file.py:build"]),
        (GOOD.replace("program.py:build", "other.py:build"), ["program", "other.py", "does not exist"]),
        (GOOD.replace("program.py:build", "program.py:buidl"), ["program", "buidl", "def buidl(config, data)"]),
        (GOOD.replace("program.py:build", "no.such.module:build"), ["program", "no.such.module", "check the name"]),
        (GOOD.replace("source: data", "source: nowhere"), ["data.source", "nowhere", "does not exist"]),
        (GOOD.replace("source: data", "source: gs://bucket/x"), ["data.source", "gs://bucket/x", "directory"]),
        (GOOD + "segment_steps: 5\nsegment_minutes: 2\n", ["segment_steps", "segment_minutes", "one of them"]),
        (GOOD + "config: {optimizer: {betas: [0.9, .nan]}}\n", ["config", "optimizer.betas.1 is not a finite number"]),
        (GOOD + "grace_seconds: 60\n", ["grace_seconds", "60", "27"]),
        (GOOD + "tiers: {local: same, persistent: same}\n", ["tiers", "second place"]),
        (GOOD + "health: {policy: nowhere.yaml}\n", ["nowhere.yaml", "no such policy file"]),
        (GOOD + "health: {gpu: all}\n", ["health.gpu", "did you mean gpus?"]),
        (GOOD + "health: {every_seconds: 0}\n", ["health.every_seconds", "0"]),
        ("- 1\n- 2\n", ["no fields"]),
        ("name: [\n", ["not valid YAML", "line"]),
    ],
)
def test_a_wrong_job_is_refused_with_field_value_and_remedy(folder, text, words):
    sentence = read(folder, text)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence


def test_an_empty_data_folder_is_named(folder):
    (folder / "data" / "x.txt").unlink()
    assert "is empty" in read(folder, GOOD)


def test_a_missing_job_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no such job file"):
        jobs.read(tmp_path / "job.yaml")


def test_a_program_with_a_syntax_error_is_named_with_its_line(folder):
    (folder / "program.py").write_text("def build(config, data)\n")
    assert "line 1" in read(folder, GOOD)


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import build",
        "build = make()",
        "if True:\n    def build(c, d): ...",
        "try:\n    from a import build\nexcept ImportError:\n    build = None",
        "from elsewhere import *",
        "def __getattr__(name): ...",
    ],
)
def test_a_callable_may_be_bound_in_any_usual_way(folder, source):
    (folder / "program.py").write_text(source)
    assert read(folder, GOOD) == ""


def test_a_module_inside_packages_is_found_without_importing_them(folder):
    package = folder / "outer" / "inner"
    package.mkdir(parents=True)
    (folder / "outer" / "__init__.py").write_text("raise RuntimeError('must not be run')")
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text("def build(config, data): ...")
    assert read(folder, GOOD.replace("program.py:build", "outer.inner.mine:build")) == ""
    assert "check the name" in read(folder, GOOD.replace("program.py:build", "outer.inner.yours:build"))
