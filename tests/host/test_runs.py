"""Identity and ownership of runs: real folders, real processes, real locks."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from everstep.core.dataset import DatasetManifest, FileEntry
from everstep.core.errors import AlreadyOwned, Damaged
from everstep.core.job import TrainJob
from everstep.host import runs


def job(folder: Path, **changes) -> TrainJob:
    fields = {
        "name": "tiny",
        "program": "pkg.mod:build",
        "config": {"lr": 0.1},
        "data": {"source": str(folder / "data")},
        "steps": 10,
        "tiers": {"local": str(folder / "nvme"), "persistent": str(folder / "persistent")},
    }
    return TrainJob.model_validate(fields | changes)


def data(digit: str = "0") -> DatasetManifest:
    return DatasetManifest(source="x", files=(FileEntry(path="a", size=1, blake3=digit * 64),))


def finish(run: runs.Run, step: int, status: str = "completed") -> None:
    run.places.final.write_text(json.dumps({"status": status, "step": step, "run": run.record.run}))


def test_the_same_job_finds_its_run_again_and_a_finished_one_has_nothing_to_do(tmp_path):
    with runs.own(job(tmp_path), data(), "", "") as first:
        assert first.created
        assert first.places.persistent.stat().st_mode & 0o777 == 0o700
    with runs.own(job(tmp_path), data(), "", "") as again:
        assert not again.created
        assert again.record == first.record
        finish(again, 10)
    with runs.own(job(tmp_path), data(), "", "") as done:
        assert done.final is not None
        assert done.record == first.record


def test_more_steps_go_on_with_a_finished_run(tmp_path):
    with runs.own(job(tmp_path), data(), "", "") as first:
        finish(first, 10)
    with runs.own(job(tmp_path, steps=20), data(), "", "") as more:
        assert more.final is None
        assert more.record == first.record


@pytest.mark.parametrize(
    ("changes", "dataset", "named"),
    [
        ({"config": {"lr": 0.2}}, data(), "config"),
        ({"seed": 1}, data(), "seed"),
        ({"program": "pkg.other:build"}, data(), "program"),
        ({}, data("1"), "data"),
    ],
)
def test_another_fingerprint_under_an_unfinished_name_is_refused_in_a_sentence(tmp_path, changes, dataset, named):
    with runs.own(job(tmp_path), data(), "", ""):
        pass
    with pytest.raises(ValueError, match=rf"unfinished run .* another {named}; .*fresh: true"):  # noqa: SIM117
        with runs.own(job(tmp_path, **changes), dataset, "", ""):
            pass


def test_a_finished_name_may_be_used_for_another_fingerprint(tmp_path):
    with runs.own(job(tmp_path), data(), "", "") as first:
        finish(first, 10)
    with runs.own(job(tmp_path, seed=1), data(), "", "") as second:
        assert second.created
        assert second.record.run != first.record.run


@pytest.mark.parametrize(
    "changes",
    [{"steps": 30}, {"ranks": 4}, {"checkpoint": {"every_steps": 2}}, {"tracking": {"uri": "sqlite:///x.db"}}],
)
def test_steps_ranks_and_checkpoint_policy_may_change_on_resume(tmp_path, changes):
    with runs.own(job(tmp_path), data(), "", "") as first:
        pass
    with runs.own(job(tmp_path, **changes), data(), "", "") as again:
        assert again.record == first.record


def test_fresh_starts_a_new_run_but_a_retry_of_the_same_flow_run_goes_on_with_it(tmp_path):
    with runs.own(job(tmp_path), data(), "flow-1", ""):
        pass
    with runs.own(job(tmp_path, fresh=True), data(), "flow-2", "") as fresh:
        assert fresh.created
    with runs.own(job(tmp_path, fresh=True), data(), "flow-2", "") as retry:
        assert retry.record == fresh.record
        assert not retry.created


def test_a_run_folder_without_its_record_is_never_reused(tmp_path):
    (tmp_path / "persistent" / "tiny" / "r001-deadbeef").mkdir(parents=True)
    with runs.own(job(tmp_path), data(), "", "") as run:
        assert run.record.run.startswith("r002-")


def test_an_unreadable_run_record_stops_with_its_name(tmp_path):
    with runs.own(job(tmp_path), data(), "", "") as run:
        pass
    run.places.run_record.write_text("{")
    with pytest.raises(Damaged, match=r"run\.json"):  # noqa: SIM117
        with runs.own(job(tmp_path), data(), "", ""):
            pass


HOLDER = textwrap.dedent("""
    import sys, time
    from everstep.core.dataset import DatasetManifest
    from everstep.core.job import TrainJob
    from everstep.host import runs
    job = TrainJob.model_validate_json(sys.argv[1])
    with runs.own(job, DatasetManifest.model_validate_json(sys.argv[2]), "", "") as run:
        print("held", flush=True)
        while not runs.takeover_wish(run.places).exists():
            time.sleep(0.02)
""")


@pytest.fixture
def holder(tmp_path):
    """A process that owns the run until it is asked to give it up."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, job(tmp_path).model_dump_json(), data().model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_one_run_has_one_owner_and_the_second_is_told_who_it_is(tmp_path, holder):
    """BC-099."""
    with pytest.raises(AlreadyOwned, match=f"already owned by process {holder.pid} on "):  # noqa: SIM117
        with runs.own(job(tmp_path), data(), "", ""):
            pass


def test_a_killed_owner_owns_nothing(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with runs.own(job(tmp_path), data(), "", "") as run:
        assert not run.created


def test_a_take_over_asks_the_owner_to_leave_and_waits_for_it(tmp_path, holder):
    """BC-181: the old owner is gone before the new one begins."""
    with runs.own(job(tmp_path), data(), "", "", take_over=True) as run:
        assert holder.wait(timeout=10) == 0
        assert not runs.takeover_wish(run.places).exists()


def test_an_attempt_number_is_claimed_once(tmp_path):
    with runs.own(job(tmp_path), data(), "", "") as run:
        assert runs.claim(run.places, 1, 0, "", "") is not None
        assert runs.claim(run.places, 1, 0, "", "") is None
        assert runs.claim(run.places, 2, 5, "step-00000005.a1", "") is not None
        assert {number: one.resumed_from for number, one in runs.claims(run.places).items()} == {1: 0, 2: 5}
