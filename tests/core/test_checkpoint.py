"""Properties of choosing and abandoning checkpoints."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from everstep.core.checkpoint import Key, Manifest, abandoned, candidates
from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged

steps, attempts = st.integers(0, 12), st.integers(1, 5)
keys = st.builds(Key, steps, attempts)
claims = st.dictionaries(attempts, steps, max_size=5)


@given(keys)
def test_a_key_is_its_folder(key):
    assert Key.parse(key.folder) == key


@pytest.mark.parametrize(
    "folder", ["step-1.a1", "step-00000001.a01", "step-000000001.a1", "step-00000001.a1 ", "x", ""]
)
def test_other_names_are_no_checkpoints(folder):
    assert Key.parse(folder) is None


@given(keys, claims)
def test_abandoned_means_that_a_later_attempt_went_back_behind_it(key, claims):
    assert abandoned(key, claims) == any(a > key.attempt and s < key.step for a, s in claims.items())
    assert not abandoned(key, {a: s for a, s in claims.items() if a <= key.attempt})


@given(keys, claims, attempts, steps)
def test_a_later_claim_never_brings_an_abandoned_one_back(key, claims, attempt, step):
    if abandoned(key, claims) and attempt not in claims:
        assert abandoned(key, claims | {attempt: step})


@given(st.lists(keys), claims)
def test_candidates_are_the_living_ones_once_newest_first(found, claims):
    best = candidates(found, claims)
    assert set(best) == {key for key in found if not abandoned(key, claims)}
    assert best == sorted(set(best), reverse=True)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_whoever_resumes_from_the_best_candidate_keeps_all_that_led_to_it(moves):
    """A history as it is lived: attempts that resume from the best candidate, some walking back, each saving on."""
    saved, claimed = set(), {}
    for attempt, (saves, back) in enumerate(moves, start=1):
        choice = candidates(saved, claimed)
        start = choice[min(back, len(choice) - 1)] if choice else Key(0, 0)
        claimed[attempt] = start.step
        saved |= {Key(start.step + 1 + n, attempt) for n in range(saves)}
        living = candidates(saved, claimed)
        assert len({key.step for key in living}) == len(living)
        assert living[0] == Key(start.step + saves, attempt)


def manifest(**changed):
    entry = FileEntry(path="rank-0.json", size=3, blake3="0" * 64)
    fields = {"job": "j", "run": "r", "attempt": 1, "step": 4, "world_size": 1, "parent_step": 0, "samples": 16}
    return Manifest(**(fields | {"time": 1.5, "files": (entry,), "metrics": {"loss": 0.1, "other": "nan"}} | changed))


@given(
    st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(["nan", "inf"])),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_a_sealed_manifest_reads_back_as_it_was(metrics, time):
    one = manifest(metrics=metrics, time=time)
    text = one.to_json()
    again = Manifest.parse(text, "folder", "manifest.json")
    assert again.model_copy(update={"seal": ""}) == one
    assert again.to_json() == text
    for altered in (text.replace('"samples": 16', '"samples": 17'), one.model_dump_json()):
        with pytest.raises(Damaged, match="does not match its own seal"):
            Manifest.parse(altered, "folder", "manifest.json")


def test_a_manifest_from_before_a_field_was_added_still_matches_its_seal():
    """What an older Everstep wrote and sealed has no word of the new field, and stays good."""
    fields = json.loads(manifest().to_json())
    del fields["code_version"], fields["seal"]
    seal = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    older = Manifest.parse(json.dumps(fields | {"seal": seal}), "folder", "manifest.json")
    assert older.code_version == ""


def test_a_manifest_that_says_something_twice_is_refused():
    """Readers differ in which of the two counts, so the same bytes would be two checkpoints."""
    text = manifest().to_json()
    for twice in ('"step": 5,\n "step": 4', '"step": 4,\n "step": 4'):
        with pytest.raises(Damaged, match="a name stands twice"):
            Manifest.parse(text.replace('"step": 4', twice), "folder", "manifest.json")


@pytest.mark.parametrize("path", ["../x", "/x", "a/x", "a/../x", "a//b", "./a", "", "a\0b", "a\\b", "manifest.json"])
def test_manifests_name_only_files_inside(path):
    with pytest.raises(ValidationError):
        manifest(files=(FileEntry.model_construct(path=path, size=0, blake3="0" * 64).model_dump(),))


def test_a_newer_schema_is_refused_in_a_sentence_even_with_unknown_fields():
    text = manifest().model_copy(update={"schema_version": 2}).model_dump_json()
    for newer in (text, text.replace('"job"', '"novelty":1,"job"')):
        with pytest.raises(Damaged, match="has schema version 2; this Everstep reads version 1"):
            Manifest.parse(newer, "folder", "manifest.json")
