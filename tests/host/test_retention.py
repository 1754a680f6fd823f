import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import fabric

from everstep.core.checkpoint import Key, Verification
from everstep.core.job import Best, CheckpointPolicy
from everstep.host import retention
from everstep.host.backlog import pending
from everstep.store import checkpoint, marks, mirror, transfer

ONE = {1: 0}


@pytest.fixture
def places(tmp_path):
    return fabric.places(tmp_path, with_object=True)


def save(places, step, attempt=1, tier="local", *, verified=True, durable=False, **how):
    key = Key(step, attempt)
    folder = fabric.checkpoint(places.checkpoint(tier, key), **how)
    digest = checkpoint.manifest_digest(folder)
    if verified:
        marks.verified(places, key.folder, tier, Verification(ok=True, manifest_digest=digest))
    if durable:
        marks.durable(places, key.folder, tier, digest)
    return key


def copy(places, key, tier="persistent"):
    transfer.copy(places.checkpoint("local", key), places.checkpoint(tier, key))
    digest = checkpoint.manifest_digest(places.checkpoint(tier, key))
    marks.verified(places, key.folder, tier, Verification(ok=True, manifest_digest=digest))
    marks.durable(places, key.folder, tier, digest)


def sweep(places, resumed, in_use=frozenset(), shed=None, **policy):
    """Apply a policy; (tier, folder, bytes) of what went."""
    swept = retention.apply(places, CheckpointPolicy(**policy), resumed, in_use, shed)
    assert not swept.failures
    assert all(one.why for one in swept.removed)
    return [(one.tier, one.folder, one.bytes) for one in swept.removed]


def removable_far(places, resumed, **policy):
    return retention.removable_far(places, CheckpointPolicy(**policy), resumed)


def held(places, tier):
    return [key.step for key in checkpoint.find(places.checkpoints(tier))[0]]


def test_the_newest_verified_ones_stay_on_every_tier(places):
    for step in (10, 20, 30, 40, 50):
        copy(places, save(places, step))
    removed = sweep(places, ONE, set(), keep=3)
    assert {(tier, folder) for tier, folder, _ in removed} == {
        (tier, f"step-000000{step}.a1") for tier in ("local", "persistent") for step in (10, 20)
    }
    assert all(size > 1000 for _, _, size in removed)
    assert all(held(places, tier) == [30, 40, 50] for tier in ("local", "persistent"))
    assert {folder for folder, _ in marks.states(places)} == {f"step-000000{step}.a1" for step in (30, 40, 50)}
    assert sweep(places, ONE, set(), keep=3) == []


def test_with_nothing_verified_nothing_goes(places):
    for step in (10, 20, 30, 40, 50):
        save(places, step, verified=False)
    assert sweep(places, ONE, set(), keep=1) == []


def test_what_still_waits_for_its_copy_stays(places):
    for step in (10, 20, 30, 40):
        save(places, step)
    copy(places, Key(10, 1))
    assert [folder for _, folder, _ in sweep(places, ONE, set(), keep=1)] == [
        "step-00000010.a1",
        "step-00000020.a1",
        "step-00000030.a1",
    ]
    assert pending(places, ONE, CheckpointPolicy(keep=1)) == [Key(40, 1)]
    assert held(places, "persistent") == [10]


def test_what_is_used_or_copied_stays(places):
    for step in (10, 20, 30, 40):
        copy(places, save(places, step))
    marks.advertise(places, [Key(20, 1)])
    sweep(places, ONE, {"step-00000010.a1"}, keep=1)
    assert held(places, "local") == held(places, "persistent") == [10, 20, 40]


@pytest.mark.parametrize(("mode", "best"), [("min", 20), ("max", 10)])
def test_the_best_by_its_metric_stays(places, mode, best):
    for step, loss in ((10, 0.9), (20, 0.1), (30, 0.5), (40, 0.6)):
        copy(places, save(places, step, metrics={"loss": loss}))
    sweep(places, ONE, set(), keep=1, best=Best(metric="loss", mode=mode))
    assert held(places, "local") == held(places, "persistent") == [best, 40]


def test_quarantined_ones_stay_as_evidence(places):
    for step in (10, 20, 30):
        copy(places, save(places, step))
    marks.quarantine(places, "step-00000010.a1", "local", "bad")
    sweep(places, ONE, set(), keep=1)
    assert held(places, "local") == [10, 30]


def test_an_abandoned_history_goes_also_where_it_is_newer(places):
    for step in (10, 20, 30):
        copy(places, save(places, step))
    copy(places, save(places, 20, attempt=2))
    sweep(places, {1: 0, 2: 10}, set(), keep=3)
    assert checkpoint.find(places.checkpoints("persistent"))[0] == [Key(10, 1), Key(20, 2)]


def test_only_what_this_run_wrote_goes(places):
    for step in (10, 30, 40):
        copy(places, save(places, step))
    local = places.checkpoints("local")
    fabric.checkpoint(local / "step-00000020.a1", run="r002-ffffffff")
    (local / "step-00000005.a1").symlink_to(local / "step-00000010.a1")
    (local / "mine").mkdir()
    (local / ".removing-mine").mkdir()
    elsewhere = local.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (local / "step-00000010.a1" / "link").symlink_to(elsewhere)
    sweep(places, ONE, set(), keep=1)
    left = {path.name for path in local.iterdir()}
    assert left == {"step-00000020.a1", "step-00000005.a1", "mine", ".removing-mine", "step-00000040.a1"}
    assert (elsewhere / "precious").exists()


def test_a_damaged_manifest_is_nobodys(places):
    for step in (10, 20):
        copy(places, save(places, step))
    (places.checkpoint("local", Key(10, 1)) / "manifest.json").write_text("{")
    sweep(places, ONE, set(), keep=1)
    assert held(places, "local") == [10, 20]


def test_a_removal_that_was_cut_off_is_finished(places):
    folder = save(places, 10).folder
    local = places.checkpoints("local")
    (local / folder).rename(local / f".removing-{folder}-0123abcd")
    sweep(places, ONE, set(), keep=1)
    assert list(local.iterdir()) == []


def test_torn_leftovers_of_older_attempts_go_and_running_ones_stay(places):
    for attempt in (1, 2):
        for tier in ("local", "persistent"):
            folder = places.checkpoint(tier, Key(50, attempt))
            folder.mkdir(parents=True)
            (folder / "rank-0.json").write_text("half")
    save(places, 40)
    half_copied = places.checkpoint("persistent", Key(40, 1))
    half_copied.mkdir()
    assert set(retention.torn(places)) == {
        (tier, Key(50, attempt)) for tier in ("local", "persistent") for attempt in (1, 2)
    }
    removed = sweep(places, {1: 0, 2: 40}, set(), keep=3)
    assert removed == [("local", "step-00000050.a1", 4), ("persistent", "step-00000050.a1", 4)]
    assert half_copied.exists()


def test_a_run_without_folders_has_nothing_to_remove(places):
    for tier in (places.local, places.persistent):
        shutil.rmtree(tier)
    assert sweep(places, {}, set(), keep=3) == []


def test_keeping_and_copying_never_work_against_each_other(places):
    """What retention removed at the far end is not copied there again."""
    for step in range(10, 120, 10):
        save(places, step)
        if step % 30 == 0:
            for key in pending(places, ONE, CheckpointPolicy(keep=2)):
                copy(places, key)
        removed = sweep(places, ONE, set(), keep=2)
        assert not {folder for tier, folder, _ in removed if tier == "persistent"} & {
            key.folder for key in pending(places, ONE, CheckpointPolicy(keep=2))
        }
    assert len(held(places, "local")) <= 3


def far(places, step, attempt=1, *, proven=True, **how):
    """A checkpoint on the object tier, as its mirror shows it."""
    folder = fabric.checkpoint(places.persistent / "made" / Key(step, attempt).folder, **how)
    mirror.note(places, Key(step, attempt), (folder / "manifest.json").read_bytes(), proven=proven)


def test_on_the_object_tier_the_newest_the_best_and_what_was_asked_for_stay(places):
    for step, loss in ((10, 0.9), (20, 0.1), (30, 0.5), (40, 0.6), (50, 0.7)):
        far(places, step, metrics={"loss": loss})
    marks.promote(places, [Key(10, 1)])
    best = Best(metric="loss", mode="min")
    assert removable_far(places, ONE, keep=2, best=best) == [Key(30, 1)]
    assert removable_far(places, ONE, keep=2) == [Key(20, 1), Key(30, 1)]
    assert removable_far(places, {1: 0, 2: 30}, keep=1) == [Key(20, 1), Key(40, 1), Key(50, 1)]


def test_on_the_object_tier_the_newest_that_was_read_back_and_what_is_quarantined_stay(places):
    for step in (10, 20, 30, 40):
        far(places, step, proven=step == 10)
    marks.quarantine(places, Key(20, 1).folder, "object", "bad")
    assert removable_far(places, ONE, keep=1) == [Key(30, 1)]


def test_what_another_run_has_on_the_object_tier_is_not_ours_to_remove(places):
    for step in (10, 20, 30):
        far(places, step, run="r002-ffffffff" if step == 10 else fabric.RUN)
    assert removable_far(places, ONE, keep=1) == [Key(20, 1)]
