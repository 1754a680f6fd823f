"""What a user can get wrong is one plain sentence, and the traceback is in the log only."""

import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from everstep.core.segment import Phase
from everstep.trainer import evaluation, failure, locate
from everstep.trainer.program import Program, ProgramError, as_program


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def good(**changes):
    model = nn.Linear(2, 1)
    values = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": [torch.zeros(2)],
        "batch_size": 1,
        "loss": lambda batch: model(batch).mean(),
    }
    return SimpleNamespace(**(values | changes))


def test_duck_typing_and_defaults():
    program = as_program(good(scheduler=None))
    assert isinstance(program, Program)
    assert (program.workers, program.grad_accumulation, program.drop_last, dict(program.state)) == (0, 1, False, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": 3}, "model: an object of type int is not a torch.nn.Module"),
        ({"model": nn.ReLU()}, "nothing to train"),
        ({"optimizer": object()}, "optimizer: .* has no step"),
        ({"loss": 3}, "loss: .* cannot be called"),
        ({"dataset": []}, "dataset: is empty"),
        ({"dataset": iter([])}, "dataset: .* has no __len__"),
        ({"dataset": None}, "neither of dataset and loader"),
        ({"loader": [1]}, "both of dataset and loader"),
        ({"batch_size": 0}, "batch_size: 0 is not"),
        ({"batch_size": None}, "lacks this attribute"),
        ({"batch_size": True}, "batch_size: True"),
        ({"workers": -1}, "workers: -1"),
        ({"grad_accumulation": 1.5}, "grad_accumulation: 1.5"),
        ({"drop_last": 1}, "drop_last: 1"),
        ({"batch_size": 5, "drop_last": True}, "batch_size: 5 is more than the 1 samples"),
        ({"clip_norm": -1.0}, "clip_norm: -1.0"),
        ({"scheduler": object()}, "scheduler: .* has no step"),
        ({"state": {"ema": object()}}, r"state\['ema'\]: .* has no state_dict"),
        ({"state": [1]}, "state: .* not a dict"),
        ({"evaluate": 1}, "evaluate: .* cannot be called"),
    ],
)
def test_a_wrong_attribute(changes, said):
    with pytest.raises(ProgramError, match=said):
        as_program(good(**changes))


def test_finding_the_callable(write, tmp_path):
    write("pack/__init__.py", "")
    write("pack/mine.py", "def build(config, data): raise ValueError(f'width: {config[\"width\"]} is odd')\nx = 3\n")
    write("tasks.py", "import helper_of_tasks\ndef build(config, data): pass\n")
    write("helper_of_tasks.py", "")
    make = locate.find("pack.mine:build", str(tmp_path))
    assert make.__module__ == "pack.mine"
    before = sys.modules.get("tasks")
    made = locate.find(f"{tmp_path}/tasks.py:build", str(tmp_path))
    assert made.__module__.startswith("_everstep_program_")
    assert sys.modules.get("tasks") is before
    for reference, said in (
        ("pack.other:build", "there is no module pack.other"),
        ("nowhere.other:build", "there is no module nowhere"),
        ("pack.mine:make", "pack.mine has no make; it has build"),
        ("pack.mine:x", "x in pack.mine cannot be called"),
        (f"{tmp_path}/none.py:build", "there is no file"),
    ):
        with pytest.raises(ProgramError, match=said):
            locate.find(reference, str(tmp_path))
    with pytest.raises(ProgramError, match=r"build\(\) raised ValueError: width: 3 is odd \(mine.py:1\)"):
        locate.build("pack.mine:build", str(tmp_path), {"width": 3}, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(:", r"raised SyntaxError: .* \(one.py:1\)"),
        ("import nothing_like_this", "raised ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("def build(config): pass", "build.* raised TypeError"),
        ("def build(config, data): return 3", "lacks this attribute"),
        ("def build(config, data): return missing", r"raised NameError: name 'missing' is not defined \(one.py:1\)"),
    ],
)
def test_a_broken_file(write, tmp_path, text, said):
    path = write("one.py", text)
    with pytest.raises(ProgramError, match=said):
        locate.build(f"{path}:build", str(tmp_path), {}, tmp_path)


def test_other_errors_in_build_may_pass_and_are_no_users_fault(write, tmp_path):
    path = write("one.py", "def build(config, data): raise RuntimeError('out of memory')")
    with pytest.raises(RuntimeError) as caught:
        locate.build(f"{path}:build", str(tmp_path), {}, tmp_path)
    cause = failure.cause_of(caught.value, Phase.start, 0, 0)
    assert (cause.kind, cause.key, cause.message) == (
        "exception",
        "RuntimeError",
        "RuntimeError: out of memory (one.py:1)",
    )


def test_the_end_of_a_rank_whose_program_raises(make_run):
    run = make_run(raises="width")
    gang = run.run()
    assert gang.wait() == [2]
    end = gang.end()
    assert (end.outcome, end.cause.kind, end.cause.phase) == ("failed", "user", "start")
    assert "build() raised KeyError: 'width' (tiny.py:" in end.cause.message
    assert "\n" not in end.cause.message
    assert "Traceback" in gang.logs()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_in_the_loop_names_type_step_and_place(make_run, workers):
    run = make_run(fail_at_id=18, workers=workers)
    gang = run.run()
    assert gang.wait() == [1]
    cause = gang.end().cause
    assert (cause.kind, cause.key, cause.step, cause.phase) == ("exception", "ZeroDivisionError", 0, "compile")
    assert "the row is bad (tiny.py:" in cause.message


def test_another_batch_size_or_model_on_resume(make_run):
    run = make_run()
    run.lease(1, 10)
    run.run(1, lease=(), steps=10)
    run.config["batch_size"] = 5
    gang = run.run(2, "step-00000010.a1")
    assert gang.wait() == [2]
    assert "batch_size: is 5, but this run began with 4" in gang.end().cause.message
    run.config |= {"batch_size": 4, "norm": True}
    gang = run.run(3, "step-00000010.a1")
    assert gang.end().cause.kind == "user"
    assert "model: 3.bias is F32 [16], but this run began with F32 [1]" in gang.end().cause.message


def test_wrong_device(make_run):
    gang = make_run().run(device="cuda")
    assert gang.wait() == [2]
    assert "device: the job asks for cuda" in gang.end().cause.message


def test_what_a_program_shows_is_text_and_disturbs_nothing():
    program = as_program(good(show=lambda: f"{torch.rand(1).item() >= 0} \ud800 " + "x" * 9999))
    before = torch.get_rng_state()
    text = evaluation.shown(program)
    assert text.startswith("True ? x")
    assert len(text) == evaluation.MOST_TEXT
    assert torch.equal(torch.get_rng_state(), before)
    assert evaluation.shown(as_program(good())) == ""
    with pytest.raises(ProgramError, match="show: must return a string, not 3"):
        evaluation.shown(as_program(good(show=lambda: 3)))
