"""A run is looked at in its directory: while it trains, afterwards, and when a tier has gone."""

import shutil

import pytest

from everstep import open_run
from everstep.core.checkpoint import State


def test_a_finished_run(completed):
    desk, ended = completed
    run = open_run(ended.final["run_dir"])
    assert (run.name, run.run, run.status, run.step) == ("whole", ended.final["run"], "completed", 60)
    assert run.result == ended.final
    assert run.report == (desk.run_dir / "report.txt").read_text()
    assert {(one.key.folder, one.tier, one.state) for one in run.checkpoints} == {
        (f"step-{step:08d}.a1", tier, state)
        for step in (50, 55, 60)
        for tier, state in (("local", State.verified), ("persistent", State.durable))
    }
    assert [one.kind for one in run.events][-1] == "flow.ended"
    assert repr(run) == f"<run whole/{ended.final['run']}: completed at step 60>"
    table = run._repr_html_()
    assert table.count("<tr>") == 7
    assert f"whole / {ended.final['run']}: completed at step 60, bias" in table
    assert "<td>step-00000060.a1</td><td>persistent</td><td>durable</td>" in table


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
    assert run.checkpoints == ()
    assert run.status == "running", "the journal does not say that it ended"
    assert "whole" in run.report


@pytest.mark.parametrize("path", ["", "nowhere"])
def test_a_folder_without_a_run_is_refused(tmp_path, path):
    with pytest.raises(ValueError, match=r"there is no run here; give the run_dir of a result"):
        open_run(tmp_path / path)
