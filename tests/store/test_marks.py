import time

import fabric
import pytest

from everstep.core.checkpoint import Key, Mark, State, Verification
from everstep.core.errors import Damaged
from everstep.store import checkpoint, marks

NAME = "step-00000040.a2"


@pytest.fixture
def places(tmp_path):
    return fabric.places(tmp_path)


def sound(places, tier="local"):
    folder = fabric.checkpoint(places.checkpoints(tier) / NAME)
    return Verification(ok=True, manifest_digest=checkpoint.manifest_digest(folder))


def test_a_verified_mark_counts_only_for_the_manifest_that_was_verified(places):
    marks.verified(places, NAME, "local", sound(places))
    assert marks.states(places) == {(NAME, "local"): {State.verified}}
    folder = places.checkpoints("local") / NAME
    manifest = checkpoint.read_manifest(folder)
    (folder / "manifest.json").write_text(manifest.model_copy(update={"samples": 1}).to_json())
    assert marks.states(places) == {}
    (folder / "manifest.json").unlink()
    assert marks.states(places) == {}


def test_durable_counts_on_its_own_tier_only(places):
    result = sound(places)
    marks.durable(places, NAME, "persistent", result.manifest_digest)
    assert marks.states(places) == {}
    sound(places, "persistent")
    assert marks.states(places) == {(NAME, "persistent"): {State.durable}}


def test_a_mark_without_a_digest_proves_nothing(places):
    sound(places)
    marks.write(places, Mark(checkpoint=NAME, tier="local", state=State.verified, time=time.time()))
    assert marks.states(places) == {}


def test_quarantine_stays_with_its_reason_until_it_is_lifted(places):
    marks.verified(places, NAME, "local", Verification(ok=False, file="x", why="x is gone."))
    marks.verified(places, NAME, "local", sound(places))
    assert marks.states(places) == {(NAME, "local"): {State.quarantined, State.verified}}
    assert marks.reason(places, NAME, "local", State.quarantined) == "x is gone."
    marks.lift(places, NAME, "local")
    assert marks.states(places) == {(NAME, "local"): {State.verified}}
    assert marks.reason(places, NAME, "local", State.quarantined) == ""


def test_an_unreadable_quarantine_is_still_one_and_other_marks_are_none(places):
    result = sound(places)
    marks.verified(places, NAME, "local", result)
    marks.quarantine(places, NAME, "local", "bad")
    for state in ("verified", "quarantined"):
        places.mark(NAME, "local", state).write_text("{")
    places.mark(NAME, "elsewhere", "verified").write_text("{}")
    places.mark("other", "local", "verified").write_text("{}")
    assert marks.states(places) == {(NAME, "local"): {State.quarantined}}


def test_a_mark_under_a_wrong_name_does_not_count(places):
    marks.verified(places, NAME, "local", sound(places))
    places.mark(NAME, "local", "verified").rename(places.mark("step-00000050.a2", "local", "verified"))
    assert marks.states(places) == {}


def test_forgotten_marks_are_gone(places):
    marks.verified(places, NAME, "local", sound(places))
    marks.quarantine(places, NAME, "persistent", "bad")
    marks.forget(places, NAME, "local")
    marks.forget(places, NAME, "local")
    assert marks.states(places) == {(NAME, "persistent"): {State.quarantined}}


def test_wishes_and_work_of_the_copier(places):
    assert (marks.promotions(places), marks.copying(places)) == ([], set())
    marks.promote(places, [Key(20, 1)])
    marks.promote(places, [Key(10, 1), Key(20, 1)])
    assert marks.promotions(places) == [Key(10, 1), Key(20, 1)]
    marks.advertise(places, [Key(10, 1)])
    assert marks.copying(places) == {Key(10, 1)}
    marks.advertise(places, [])
    assert marks.copying(places) == set()
    (places.persistent / "promote.json").write_text("{")
    with pytest.raises(Damaged, match=r"promote\.json"):
        marks.promotions(places)
