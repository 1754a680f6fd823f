"""The quickstart notebook runs as it is, from its first cell to its last."""

import json
import os
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from everstep import open_run

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook after all its cells ran in an empty folder, and the folder."""
    folder = tmp_path_factory.mktemp("quickstart")
    shutil.copy(NOTEBOOK, folder)
    notebook = nbformat.read(folder / NOTEBOOK.name, as_version=4)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "EVERSTEP_"))}
    env |= {"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}})
    client.execute(env=env)
    return notebook, folder


def output(notebook, words: str):
    """What the cell whose code holds these words shows."""
    return next(cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source).outputs


def test_it_trains_digits_and_shows_how_it_goes(executed):
    notebook, folder = executed
    shown = output(notebook, "result = train(job)")
    progress = "".join(one.get("text", "") for one in shown)
    assert "segment 3 ends at step 300: accuracy" in progress
    assert "'completed', 300" in shown[-1]["data"]["text/plain"]
    run = open_run(folder / ".everstep" / "persistent" / "digits-notebook")
    assert run.result["metrics"]["accuracy"] > 0.9
    told = next(event for event in run.events if event.kind == "gate.data")
    assert told.data["ok"]


def test_it_draws_curves_and_lists_checkpoints(executed):
    notebook = executed[0]
    assert any("image/png" in one["data"] for one in output(notebook, "plt.subplots"))
    table = output(notebook, "run.checkpoints()")[0]["data"]
    assert "step-00000300.a1" in table["text/html"]
    assert "durable" in table["text/plain"]
    assert "'0.weight': (128, 64)" in output(notebook, "load_checkpoint(result")[0]["data"]["text/plain"]
    assert "ETTR" in output(notebook, "print(run.report)")[0]["text"]


def test_the_tables_of_a_run(executed):
    run = open_run(executed[1] / ".everstep" / "persistent" / "digits-notebook")
    assert list(run.metrics.index[:2]) == [1, 2]
    assert {"time", "loss", "samples"} <= set(run.metrics)
    assert list(run.evaluations.index) == [100, 200, 300]
    assert run.checkpoints()[0].tiers == {"local": "verified", "persistent": "durable"}
    assert run.checkpoints().frame.loc["step-00000300.a1"]["accuracy"] > 0.9


def test_it_is_committed_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert NOTEBOOK.stat().st_size < 10_000
