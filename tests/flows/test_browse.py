"""A run is looked at in its directory: while it trains, afterwards, and when a tier has gone."""

import json
import shutil

import pytest

from everstep import open_run
from everstep.store import marks


def test_a_finished_run(completed):
    desk, ended = completed
    run = open_run(ended.final["run_dir"])
    assert (run.name, run.run, run.status, run.step) == ("whole", ended.final["run"], "completed", 60)
    assert run.result == ended.final
    assert run.report == (desk.run_dir / "report.txt").read_text()
    table = run.checkpoints()
    assert [(row.step, row.attempt, row.tiers) for row in table] == [
        (step, 1, {"local": "verified", "persistent": "durable"}) for step in (60, 55, 50)
    ]
    assert [one.kind for one in run.events][-1] == "flow.ended"
    assert repr(run) == f"<run whole/{ended.final['run']}: completed at step 60>"
    shown = run._repr_html_()
    assert shown.count("<tr>") == 4
    assert f"whole / {ended.final['run']}: completed at step 60, bias" in shown
    assert "<td>step-00000060.a1</td><td>verified</td><td>durable</td>" in shown


def test_the_table_of_checkpoints_for_a_terminal_a_notebook_and_as_a_frame(completed):
    table = open_run(completed[1].final["run_dir"]).checkpoints()
    lines = str(table).splitlines()
    assert lines[1].split() == ["checkpoint", "local", "persistent", "size", "age", "why"]
    assert [line.split()[:3] for line in lines[2:]] == [
        [f"step-{step:08d}.a1", "verified", "durable"] for step in (60, 55, 50)
    ]
    assert "newest" in lines[2]
    assert repr(table) == str(table)
    assert "<th>persistent</th>" in table._repr_html_()
    assert table.frame.loc["step-00000060.a1"]["persistent"] == "durable"
    assert list(table.frame["step"]) == [60, 55, 50]
    assert table[0].saved > table[1].saved
    assert table[0].bytes > 0
    assert [row.step for row in table[:2]] == [60, 55]


def test_a_pinned_and_a_quarantined_one_say_why(completed, tmp_path):
    copy = tmp_path / "whole" / completed[1].final["run"]
    shutil.copytree(completed[0].run_dir, copy)
    open_run(copy).pin(50)
    marks.quarantine(open_run(copy).places, "step-00000055.a1", "persistent", "its bytes <rotted>")
    newest, bad, pinned = open_run(copy).checkpoints()
    assert (bad.tiers["persistent"], bad.why) == ("quarantined", "its bytes <rotted>")
    assert pinned.pinned
    assert "pinned" in pinned.why
    assert newest.why
    assert "its bytes &lt;rotted&gt;" in open_run(copy).checkpoints()._repr_html_()


def test_prefect_shows_the_checkpoints_as_a_table(completed, ask):
    (found,) = ask("artifacts/filter", {"artifacts": {"key": {"any_": ["checkpoints-whole"]}}})
    assert found["type"] == "table"
    rows = json.loads(found["data"])
    assert [row["checkpoint"] for row in rows] == [f"step-{step:08d}.a1" for step in (60, 55, 50)]
    assert rows[0]["persistent"] == "durable"
    assert found["flow_run_id"]


def test_the_jobs_folder_means_its_newest_run(completed):
    assert open_run(completed[0].folder / "persistent" / "whole").run == completed[1].final["run"]


def test_a_copy_elsewhere_without_the_local_tier_and_with_half_a_journal(completed, tmp_path):
    copy = tmp_path / "whole" / completed[1].final["run"]
    shutil.copytree(completed[0].run_dir, copy)
    shutil.rmtree(copy / "checkpoints")
    (copy / "owner.json").write_text("{")
    journal = (copy / "events.jsonl").read_bytes()
    (copy / "events.jsonl").write_bytes(journal[: len(journal) // 2])
    run = open_run(copy)
    assert run.step == 60
    assert len(run.checkpoints()) == 0
    assert "no checkpoint yet" in str(run.checkpoints())
    assert run.status == "running", "the journal does not say that it ended"
    assert "whole" in run.report


@pytest.mark.parametrize("path", ["", "nowhere"])
def test_a_folder_without_a_run_is_refused(tmp_path, path):
    with pytest.raises(ValueError, match=r"there is no run here; give the run_dir of a result"):
        open_run(tmp_path / path)
