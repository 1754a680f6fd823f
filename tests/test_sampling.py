"""The sample of drills that `make test` runs."""

from rigs.sampling import is_whole, sample

NAMES = [f"tests/drills/test_{file}.py::test_{number}" for file in "abc" for number in range(20)] + ["d.py::only"]


def group(name: str) -> str:
    return name.partition("::")[0]


def test_a_seed_draws_the_same_and_of_each_file_some():
    drawn = sample(NAMES, "seed", 0.4, group)
    assert drawn == sample(reversed(NAMES), "seed", 0.4, group)
    assert len(drawn) == 3 * 8 + 1
    assert {group(name) for name in drawn} == {group(name) for name in NAMES}


def test_in_some_commits_all_have_run():
    seen = set()
    for commit in range(30):
        seen |= sample(NAMES, str(commit), 0.4, group)
    assert seen == set(NAMES)


def test_what_is_asked_for_by_name_runs():
    assert is_whole({}, ["tests/drills/test_kills.py"])
    assert is_whole({}, ["tests/drills"])
    assert is_whole({"EVERSTEP_ALL": "1"}, ["tests"])
    assert not is_whole({}, ["/somewhere/tests"])
    assert not is_whole({}, [])
