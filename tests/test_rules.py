"""The architecture as tests: who imports whom, what an import must not load, and the public names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "prefect", "pydantic", "mlflow", "sqlalchemy", "numpy")


def loaded_after(code: str) -> set[str]:
    """Which heavy packages a fresh Python has loaded after `code`."""
    tell = f"import sys, json; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tell}"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_nothing_points_back():
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(tool)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_importing_everstep_loads_nothing_heavy():
    assert loaded_after("import everstep; dir(everstep); everstep.__all__") == set()


def test_the_program_of_a_user_does_not_load_torch_by_itself():
    assert loaded_after("from everstep.trainer import Program; Program") == set()


def test_the_child_loads_nothing_heavy_before_it_has_asked_for_its_parents_death():
    assert loaded_after("import everstep.trainer.__main__") == set()


def test_reading_a_log_loads_neither_torch_nor_prefect():
    assert loaded_after("from everstep import classify_log; classify_log('NVRM: Xid (PCI:0000:a1:00): 79')") == {
        "pydantic"
    }


def test_the_command_line_loads_nothing_heavy_before_it_listens_to_signals():
    assert loaded_after("import everstep.host.console") == set()


def test_the_public_names():
    code = """
import everstep
assert everstep.__all__ == [
    "TrainJob", "classify_log", "load_checkpoint", "open_run", "rollback", "verify_checkpoint", "weights_digest"
]
assert set(everstep.__all__) <= set(dir(everstep))
for name in everstep.__all__:
    assert getattr(everstep, name).__name__ == name
from everstep import *
try:
    everstep.nothing
except AttributeError as error:
    assert str(error) == "module 'everstep' has no attribute 'nothing'"
else:
    raise SystemExit("no error")
"""
    assert loaded_after(code) == {"torch", "pydantic", "numpy"}


def test_no_package_below_tests_hides_one_of_ours():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("file", sorted((ROOT / "flows").glob("*.py")), ids=lambda file: file.name)
def test_a_flow_file_holds_no_record_and_does_no_arithmetic(file):
    text = file.read_text()
    assert "class " not in text
    assert "open(" not in text.replace("open_console(", "")
