"""Properties of keeping checkpoints, and the handed cases of kind retention-destroys that are rules."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.checkpoint import Key, abandoned, candidates
from everstep.core.job import Best, Budget, CheckpointPolicy
from everstep.core.retention import Kept, Retention, removable, worth_copying

keys = st.builds(Key, st.integers(0, 12), st.integers(1, 5))
claims = st.dictionaries(st.integers(1, 5), st.integers(0, 12), max_size=5)
kept = st.builds(
    Kept,
    keys,
    verified=st.booleans(),
    quarantined=st.booleans(),
    in_use=st.booleans(),
    pinned=st.booleans(),
    copied=st.booleans(),
    metric=st.none() | st.floats(allow_nan=True),
    bytes=st.integers(0, 20),
)
tiers = st.lists(kept, max_size=12, unique_by=lambda one: one.key)
policies = st.builds(
    CheckpointPolicy,
    keep=st.integers(1, 4),
    keep_every_steps=st.none() | st.integers(1, 6),
    best=st.none() | st.builds(Best, metric=st.just("m"), mode=st.sampled_from(["min", "max"])),
    budget_gb=st.builds(Budget, local=st.none() | st.integers(1, 100).map(lambda size: size / 1e9)),
)
rules = policies.map(lambda policy: Retention.of(policy, "local"))
plain = st.integers(1, 4).map(lambda keep: Retention.of(CheckpointPolicy(keep=keep), "local"))


def verified(*steps, attempt=1, size=1, metrics=None):
    return [Kept(Key(step, attempt), verified=True, bytes=size, metric=(metrics or {}).get(step)) for step in steps]


def left(tier, shed=0, claims=None, **policy):
    gone = removable(tier, Retention.of(CheckpointPolicy(**policy), "local"), claims or {1: 0}, shed)
    return [one.key.step for one in sorted(tier, key=lambda one: one.key) if one.key not in gone]


def must_stay(tier, claims, mode):
    """What is never removed, said once more and in another way."""
    good = [one for one in tier if one.verified and not one.quarantined and not abandoned(one.key, claims)]
    if not good:
        return {one.key for one in tier}
    newest = max(one.key for one in good)
    stays = {one.key for one in tier if one.quarantined or one.in_use or one.pinned or not one.copied}
    stays |= {one.key for one in tier if one.key >= newest and not abandoned(one.key, claims)}
    measured = [one for one in good if one.metric is not None and not math.isnan(one.metric)]
    if measured:
        top = (min if mode == "min" else max)(one.metric for one in measured)
        stays.add(max(one.key for one in measured if one.metric == top))
    return stays


@given(tiers, rules, claims, st.integers(0, 300))
def test_what_is_protected_is_never_removed_whatever_space_says(tier, retention, claims, shed):
    gone = removable(tier, retention, claims, shed)
    assert not set(gone) & must_stay(tier, claims, retention.best_mode)
    assert len(set(gone)) == len(gone)
    assert set(gone) <= {one.key for one in tier}


@given(tiers, rules, claims)
def test_retention_has_nothing_more_to_do_after_it_was_done(tier, retention, claims):
    gone = set(removable(tier, retention, claims))
    assert removable([one for one in tier if one.key not in gone], retention, claims) == []


@given(tiers, rules, claims, st.integers(0, 300), st.randoms())
def test_the_order_in_which_a_folder_lists_them_is_nothing(tier, retention, claims, shed, dice):
    shuffled = list(tier)
    dice.shuffle(shuffled)
    assert retention.judge(shuffled, claims, shed) == retention.judge(tier, claims, shed)


@given(tiers, rules, claims, st.integers(0, 300))
def test_budget_and_room_are_kept_to_as_far_as_protection_allows(tier, retention, claims, shed):
    fates = retention.judge(tier, claims, shed)
    stands = sum(fate.bytes for fate in fates if fate.keeps)
    total = sum(one.bytes for one in tier)
    within = (retention.budget is None or stands <= retention.budget) and stands <= total - min(shed, total)
    assert within or all(fate.protected or not fate.bytes for fate in fates if fate.keeps)


@given(tiers, rules, claims, st.integers(0, 300))
def test_space_takes_the_oldest_first_and_never_more_than_it_needs(tier, retention, claims, shed):
    free = [fate for fate in Retention(retention.rules, None, retention.best_mode).judge(tier, claims) if fate.keeps]
    fates = {fate.key: fate for fate in retention.judge(tier, claims, shed)}
    given_up = [fate for fate in free if not fates[fate.key].keeps]
    still = [fate for fate in free if fates[fate.key].keeps and not fate.protected]
    assert all(one.key < other.key for one in given_up for other in still)
    if given_up:
        most = min(
            [sum(one.bytes for one in tier) - shed] * (shed > 0) + [retention.budget] * (retention.budget is not None)
        )
        assert sum(fate.bytes for fate in fates.values() if fate.keeps) + given_up[-1].bytes > most


@given(tiers, rules, claims, st.integers(0, 300))
def test_every_fate_has_its_reason(tier, retention, claims, shed):
    fates = retention.judge(tier, claims, shed)
    assert [fate.key for fate in fates] == sorted(one.key for one in tier)
    assert all(fate.why for fate in fates)
    assert all(fate.keeps for fate in fates if fate.protected)


@given(tiers, plain, claims)
def test_retention_does_remove_old_verified_ones(tier, retention, claims):
    """Otherwise the tier would fill: what is verified, old and free goes."""
    free = [Kept(one.key, verified=True) for one in tier]
    living = candidates([one.key for one in free], claims)
    expected = {one.key for one in free} - set(living[: retention.rules[0].count]) if living else set()
    assert set(removable(free, retention, claims)) == expected


@given(tiers, tiers, policies, claims)
def test_what_is_copied_stays_where_it_was_copied_to(there, more, policy, claims):
    """Copying and removing never work against each other: what was worth copying is not removed there at once."""
    retention = Retention.of(policy.model_copy(update={"budget_gb": Budget()}), "local")
    near = [Kept(one.key, verified=True, metric=one.metric, bytes=one.bytes) for one in more]
    far = [Kept(one.key, verified=True, bytes=one.bytes, metric=one.metric) for one in there]
    far = [one for one in far if one.key not in {other.key for other in near}]
    standing = list(far)
    for key in worth_copying(far, near, retention, claims):
        standing.append(next(one for one in near if one.key == key))
        assert key not in removable(standing, retention, claims)


@pytest.mark.parametrize("steps", [(8, 9, 10, 11), (98, 99, 100, 101), (9_998, 9_999, 10_000, 10_001)])
def test_the_newest_are_the_greatest_numbers(steps):
    """BC-015: as text, 9,999 stands behind 10,000."""
    assert left(verified(*steps), keep=2) == list(steps[2:])


@pytest.mark.parametrize("saves", range(1, 6))
def test_the_best_and_the_newest_both_stay_after_each_save(saves):
    """BC-017: the best one is the very first; protecting it never makes the newest the victim."""
    steps = [10 * number for number in range(1, saves + 1)]
    tier = verified(*steps, metrics={step: float(step) for step in steps})
    assert left(tier, keep=2, best=Best(metric="loss")) == sorted({10, *steps[-2:]})


def test_the_first_at_or_after_each_multiple_stays():
    tier = verified(90, 110, 190, 205, 250, 310, 390, 420)
    assert left(tier, keep=1, keep_every_steps=100) == [110, 205, 310, 420]
    assert left(tier, keep=2, keep_every_steps=200) == [205, 390, 420]


def test_the_first_that_verified_counts_for_its_multiple():
    tier = [*verified(150, 220, 300), Kept(Key(110, 1), bytes=1)]
    assert left(tier, keep=1, keep_every_steps=100) == [150, 220, 300]


def test_a_budget_gives_up_the_oldest_first_and_never_what_is_protected():
    tier = verified(*range(10, 70, 10), size=10**9)
    assert left(tier, keep=5, budget_gb={"local": 3}) == [40, 50, 60]
    assert left(tier, keep=5, budget_gb={"persistent": 3}) == [20, 30, 40, 50, 60]
    assert left(tier, keep=5, budget_gb={"local": 0.5}) == [60]
    tier[0] = Kept(Key(10, 1), verified=True, pinned=True, bytes=10**9)
    assert left(tier, keep=5, budget_gb={"local": 3}) == [10, 50, 60]


def test_room_is_made_down_to_the_protected_and_no_further():
    tier = verified(10, 20, 30, 40, size=100)
    assert left(tier, keep=4, shed=1) == [20, 30, 40]
    assert left(tier, keep=4, shed=150) == [30, 40]
    assert left(tier, keep=4, shed=10_000) == [40]
    assert left(tier, keep=2, shed=150) == [30, 40]


def test_a_reason_tells_what_space_took():
    fates = Retention.of(CheckpointPolicy(keep=3), "local").judge(verified(10, 20), {1: 0}, 1)
    assert [(fate.keeps, fate.why) for fate in fates] == [
        (False, "room is made for the next save; it was one of the newest 3"),
        (True, "the newest verified"),
    ]
