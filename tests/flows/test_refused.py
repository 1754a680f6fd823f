"""Bad input: one plain sentence with the remedy, the right exit code, no traceback, nothing committed lost."""

import pytest

USER, FAILED = 2, 1


def sentence(ended) -> str:
    """The one line that says what is wrong: the last one on stderr. Nothing else may look like an error."""
    lines = [line for line in ended.err.splitlines() if not line.startswith("import time:")]
    assert "Traceback" not in ended.err + ended.out
    return lines[-1]


def without(field):
    return lambda desk: desk.job.pop(field)


def give(**changes):
    return lambda desk: desk.job.update(changes)


def empty_the_data(desk):
    (desk.folder / "data" / "table.npy").unlink()


AT_ONCE = {
    "unknown field": (give(stepz=3), ["stepz", "did you mean steps?"]),
    "missing field": (without("steps"), ["steps is missing"]),
    "missing program": (give(program="nowhere.py:build"), ["nowhere.py", "does not exist"]),
    "missing callable": (give(program="mine.py:bild"), ["bild", "def bild(config, data)"]),
    "missing module": (give(program="no.such:build"), ["no.such", "check the name"]),
    "negative steps": (give(steps=-5), ["steps", "-5", "greater than 0"]),
    "name that leaves its folder": (give(name="../../etc"), ["../../etc", "a-z, 0-9 and dashes"]),
    "empty data": (empty_the_data, ["data.source", "is empty", "put the data set there"]),
    "missing data": (give(data={"source": "nowhere"}), ["data.source", "nowhere", "does not exist"]),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_a_wrong_job_is_answered_before_prefect_is_imported(make_desk, case):
    spoil, words = AT_ONCE[case]
    desk = make_desk(server="none")
    spoil(desk)
    ended = desk.run(options=("-X", "importtime"))
    assert ended.code == USER
    assert all(word in sentence(ended) for word in words), sentence(ended)
    assert ended.out == ""
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ended.err.splitlines()}
    assert "pydantic" in imported
    assert not imported & {"prefect", "torch", "mlflow", "httpx", "sqlalchemy"}
    assert not (desk.folder / "persistent").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing.yaml",), ["nothing.yaml", "no such job file"]),
        ((), ["usage: python -m flows.train job.yaml"]),
        (("--help",), ["usage: python -m flows.train job.yaml"]),
        (("one.yaml", "two.yaml"), ["usage: python -m flows.train job.yaml"]),
    ],
)
def test_a_wrong_command_line_is_answered(make_desk, arguments, words):
    ended = make_desk(server="none").run(arguments)
    assert ended.code == USER
    assert all(word in sentence(ended) for word in words)


PROGRAMS = {
    "build raises ValueError": ({"build": ["raise ValueError('no good')"]}, USER, ["build()", "ValueError: no good"]),
    "build raises RuntimeError": (
        {"build": ["raise RuntimeError('device is odd')"]},
        FAILED,
        ["the same error came again", "RuntimeError: device is odd", "mend the program", "logs"],
    ),
    "the loop raises at step 5": (
        {"loss": ["if calls == 5: raise RuntimeError('bad batch')"]},
        FAILED,
        ["the same error came again at step 4", "RuntimeError: bad batch", "mend the program", "logs"],
    ),
    "no samples": ({"rows": 0}, USER, ["dataset", "is empty", "data.source"]),
}


LONG = ("build raises RuntimeError", "no samples")


@pytest.mark.sampled
@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.sampled] * (one in LONG)) for one in PROGRAMS])
def test_a_program_that_is_wrong_is_named(make_desk, case):
    config, code, words = PROGRAMS[case]
    desk = make_desk(config=config)
    ended = desk.run()
    assert all(word in sentence(ended) for word in words), ended.err
    assert ended.code == code
    assert ended.final["status"] == "failed"
    assert ended.final["restarts"] == (1 if code == FAILED else 0), "what no restart mends is not tried again"
    desk.await_gone()
