"""`train(job)` where a person calls it: in a notebook cell (a running event loop), and in a plain script."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from everstep.host import process

CELL = """
from everstep import TrainJob, open_run
from flows.train import train

job = TrainJob(
    name="noted",
    program="mine.py:build",
    data={"source": "data"},
    steps=10,
    checkpoint={"every_steps": 5},
    threads=1,
    standby=False,
    tiers={"local": "nvme", "persistent": "persistent"},
    tracking={"uri": "sqlite:///mlflow.db"},
)
"""


@pytest.fixture
def desk(make_desk, monkeypatch):
    """A folder with program and data, and an environment that names no Prefect server."""
    desk = make_desk("noted", server="own")
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(desk.folder / "prefect"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return desk


def test_train_in_a_notebook(desk):
    cells = [
        CELL,
        "import asyncio, os; print(os.getpid(), asyncio.get_event_loop().is_running())",
        "result = train(job)",
        "import json; print(json.dumps(result))",
        "open_run(result['run_dir'])",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(desk.folder)}}).execute()
    pid, running = notebook.cells[1].outputs[0].text.split()
    assert running == "True"
    result = json.loads(notebook.cells[3].outputs[0].text)
    assert (result["status"], result["step"]) == ("completed", 10)
    assert "completed: step 10" in "".join(one.get("text", "") for one in notebook.cells[2].outputs)
    view = notebook.cells[4].outputs[0]["data"]
    assert "noted" in view["text/html"]
    assert "step-00000010.a1" in view["text/html"]
    assert view["text/plain"] == f"<run noted/{result['run']}: completed at step 10>"
    desk.await_gone(5)
    assert not [mark for _, mark in process.marks("prefect-server") if mark.split("/")[1].startswith(f"{pid}-")]


@pytest.mark.sampled
def test_train_in_a_script(desk):
    script = CELL + "\nif __name__ == '__main__':\n    import json\n    print(json.dumps(train(job)))\n"
    (desk.folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=desk.folder,
        env=desk.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "completed"
    assert "Traceback" not in done.stderr
    assert "/runs/flow-run/" not in done.stderr, "nobody can follow a link to a server that is gone"
    desk.await_gone(5)
