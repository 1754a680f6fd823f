"""The gate's judgement: closed unless shown open, and a sentence that says what to mend."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core import columns, gate
from everstep.core.cutting import cuts
from everstep.core.gate import Finding, GateResult, Suite, Validation
from everstep.core.ledger import Event
from everstep.core.timeline import Bucket, account, stretches

DTYPES = ("int64", "float64", "bool", "string", columns.EMPTY)
counts = st.integers(0, 3)
validations = st.builds(
    Validation, about=st.just("manifest"), rows=counts, expectations=counts, evaluated=counts, passed=counts
)
findings = st.builds(
    Finding,
    about=st.text(max_size=5),
    expectation=st.just("expect_it"),
    files=st.lists(st.text(max_size=300), max_size=3).map(tuple),
    value=st.text(max_size=5),
    remedy=st.just("mend it"),
    evaluated=st.booleans(),
)
schemas = st.dictionaries(st.text(max_size=3), st.sampled_from(DTYPES), min_size=1, max_size=4).map(
    lambda one: tuple(one.items())
)
suite = {"name": "mine", "expectations": [{"type": "expect_column_to_exist", "kwargs": {"column": "label"}}]}


def result(**changes) -> GateResult:
    return GateResult(key="k", dataset="d", suite="defaults", **changes)


@given(st.lists(validations, max_size=3), st.lists(findings, max_size=2), st.sampled_from(["", "timed out after 3 s."]))
def test_the_gate_is_open_only_when_everything_was_evaluated_and_holds(held, found, trouble):
    one = result(validations=tuple(held), findings=tuple(found), trouble=trouble)
    shown = bool(held) and all(v.rows > 0 and 0 < v.expectations == v.evaluated == v.passed for v in held)
    assert one.ok == (shown and not found and not trouble)
    assert bool(one.reason) != one.ok
    assert "\n" not in one.reason or any("\n" in f.value + f.about for f in found)
    assert GateResult.parse(one.to_json(), "here", "gate.json") == one


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {"files": ("a.csv", "b.csv"), "value": "0", "wanted": "min_value=1", "column": "size"},
            "data.gate: 'a.csv' and 1 more: expect_it of 'size' (min_value=1) does not hold: 0; mend it.",
        ),
        (
            {"value": "there is no label", "evaluated": False},
            "data.gate: the manifest: expect_it could not be evaluated: there is no label; mend it.",
        ),
    ],
)
def test_a_finding_names_file_expectation_value_and_remedy(found, words):
    finding = Finding(about="manifest", expectation="expect_it", remedy="mend it", **found)
    assert result(findings=(finding,)).reason == words


def test_nothing_validated_is_named_as_no_pass():
    """BC-129."""
    assert "nothing was validated on the data, which is no pass" in result().reason
    empty = Validation(about="csv sample", rows=0, expectations=1, evaluated=1, passed=1)
    assert "nothing was validated on the csv sample" in result(validations=(empty,)).reason


# -- what an answer of the library means ------------------------------------------------------------------------------


def answer(**changes):
    config = {"type": "expect_column_values_to_be_between", "kwargs": {"column": "x"}}
    seen = {"element_count": 5, "unexpected_count": 0, "missing_count": 0}
    return {"success": True, "expectation_config": config, "result": seen, "exception_info": {}} | changes


def test_an_answer_that_says_something():
    assert gate.unevaluated(answer()) == ""
    assert gate.unevaluated(answer(success=False)) == ""
    assert gate.unevaluated(answer(result={"observed_value": 3})) == ""
    all_null = {"type": "expect_column_values_to_be_null", "kwargs": {"column": "x"}}
    seen = {"element_count": 5, "missing_count": 5}
    assert gate.unevaluated(answer(expectation_config=all_null, result=seen)) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"success": None}, "skipped"),
        ({"success": "yes"}, "skipped"),
        ({"result": {"element_count": 0}}, "no row"),
        ({"result": {"element_count": 5, "missing_count": 5}}, "every value is missing"),
        ({"exception_info": {"raised_exception": True, "exception_message": "no column y"}}, "no column y"),
        ({"exception_info": {"a metric": {"raised_exception": True, "exception_message": "m"}}}, "m"),
        ({"exception_info": {"a metric": {"raised_exception": True}}}, "raised an exception"),
    ],
)
def test_an_answer_that_says_nothing_is_no_pass(changes, why):
    """BC-129: a validation that raised, was skipped, or had nothing to look at."""
    assert why in gate.unevaluated(answer(**changes))


def test_what_was_seen():
    seen = {"partial_unexpected_list": [0, 0, 7], "unexpected_count": 3, "element_count": 90_000}
    assert gate.observed(answer(result=seen)) == "0, 7 (3 of 90,000 values)"
    assert gate.observed(answer(result={"observed_value": 12})) == "12"
    assert gate.observed(answer(result={})) == "it was not met"
    assert len(gate.observed(answer(result={"observed_value": "x" * 10_000}))) == gate.CLIP


# -- suites -----------------------------------------------------------------------------------------------------------


def test_a_suite_of_a_job():
    one = Suite.read(json.dumps(suite | {"meta": {"everstep": {"on": "csv", "files": "train/*.csv"}}}), "s.json")
    assert (one.name, one.on, one.files, one.columns) == ("mine", "csv", "train/*.csv", {"label"})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no list of expectations"),
        ('{"expectations": []}', "has no expectations, and what is not checked does not pass"),
        ('{"expectations": [{}]}', "has an expectation without a type"),
        (json.dumps(suite | {"meta": {"everstep": {"on": "moon"}}}), "is about 'moon'"),
        (json.dumps(suite | {"meta": {"everstep": {"of": "csv"}}}), "meta.everstep"),
        (json.dumps(suite | {"meta": {"everstep": {"files": 3}}}), "string"),
    ],
)
def test_what_is_no_suite_is_answered_in_a_sentence(text, why):
    with pytest.raises(ValueError, match=r"data\.gate\.suite: 's\.json'") as refused:
        Suite.read(text, "s.json")
    assert why in str(refused.value)
    assert len(str(refused.value)) < 250


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["name", "expectations", "type", "meta", "everstep", "on", "kwargs"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_suite_with_expectations_or_is_refused(value):
    text = json.dumps(value)
    if isinstance(value, dict) and isinstance(value.get("expectations"), list) and value["expectations"]:
        try:
            assert Suite.read(text, "s.json").expectations
        except ValueError as error:
            refused = str(error)
        else:
            return
    else:
        with pytest.raises(ValueError) as caught:
            Suite.read(text, "s.json")
        refused = str(caught.value)
    assert refused.startswith("data.gate.suite: 's.json' ")


@pytest.mark.parametrize(
    ("named", "on", "table"),
    [
        ({"size"}, None, "manifest"),
        ({"label"}, None, "csv"),
        ({"text"}, None, "text"),
        (set(), None, "csv"),
        ({"size", "label"}, None, "csv"),
        ({"size"}, "csv", "csv"),
        ({"anything"}, "text", "text"),
    ],
)
def test_which_table_a_suite_is_about(named, on, table):
    expectations = tuple({"type": "e", "kwargs": {"column": name}} for name in sorted(named)) or ({"type": "e"},)
    there = {"manifest": gate.MANIFEST_COLUMNS, "csv": ["label", "size"], "text": ["text", "length", "utf8"]}
    assert Suite(name="s", expectations=expectations, on=on).table(there) == table


def test_a_suite_about_what_is_not_there():
    one = Suite(name="s", expectations=({"type": "e", "kwargs": {"column": "label"}},))
    with pytest.raises(ValueError, match="names the column 'label', which no file"):
        one.table({"manifest": gate.MANIFEST_COLUMNS, "text": ["text"]})
    with pytest.raises(ValueError, match=r"is about parquet, but the data has no such files \(text\)"):
        one.model_copy(update={"on": "parquet"}).table({"text": ["text"]})


# -- columns and dtypes -----------------------------------------------------------------------------------------------


@given(schemas, st.randoms())
def test_files_with_the_same_columns_agree_in_any_order(schema, random):
    shuffled = list(schema)
    random.shuffle(shuffled)
    assert columns.difference(shuffled, schema) == ""
    assert columns.difference(shuffled, schema, typed=False) == ""


@given(schemas, schemas)
def test_another_set_of_columns_is_a_difference_whoever_is_asked(one, other):
    if {name for name, _ in one} != {name for name, _ in other}:
        assert columns.difference(one, other, typed=False)
        assert columns.difference(other, one, typed=False)


@given(st.lists(schemas, min_size=1, max_size=5))
def test_the_reference_is_what_most_have(files):
    usual = {name for name, _ in columns.reference(files)}
    sets = [frozenset(name for name, _ in one) for one in files]
    assert sets.count(frozenset(usual)) == max(map(sets.count, sets))


def test_the_odd_one_is_named_and_not_the_many():
    many = [
        (("a", "int64"), ("b", columns.EMPTY)),
        (("a", "float64"), ("b", "string")),
        (("a", "int64"), ("b", "string")),
    ]
    usual = columns.reference([(("a", "string"),), *many])
    assert usual == (("a", "int64"), ("b", "string"))
    assert [columns.difference(one, usual, typed=False) for one in many] == ["", "", ""]
    assert columns.difference((("a", "int64"),), usual) == "the column 'b' is missing"
    assert columns.difference((*usual, ("c", "bool")), usual) == "there is a column 'c' besides"
    assert columns.difference((("a", "string"), ("b", "string")), usual, typed=False) == (
        "the column 'a' is string, not int64"
    )
    assert columns.difference((("a", "int32"), ("b", "string")), usual) == "the column 'a' is int32, not int64"
    assert columns.reference([]) == ()


@pytest.mark.parametrize(
    ("wanted", "found", "typed", "fitting"),
    [
        ("float32", "float32", True, True),
        ("F32", "float32", True, True),
        ("object", "string", True, True),
        ("float32", "float64", True, False),
        ("float", "bfloat16", True, True),
        ("int", "uint8", True, True),
        ("int", "float32", True, False),
        ("number", "float16", True, True),
        ("float32", "float64", False, True),
        ("float32", "int64", False, True),
        ("int32", "int64", False, True),
        ("int32", "float64", False, False),
        ("int64", "string", False, False),
        ("string", "int64", False, False),
        ("int64", columns.EMPTY, False, True),
    ],
)
def test_whether_a_dtype_is_the_one_asked_for(wanted, found, typed, fitting):
    assert columns.fits(wanted, found, typed=typed) is fitting


@given(st.text(max_size=2_000), st.integers(10, 200))
def test_a_clipped_text_is_one_short_line(text, most):
    short = gate.clip(text, most)
    assert len(short) <= most
    assert len(short.splitlines()) <= 1


def test_marker_files():
    assert [gate.is_marker(path) for path in ("_SUCCESS", "a/.part", "_delta_log/0.json", "a/b_c.csv")] == [
        True, True, True, False
    ]  # fmt: skip


def test_the_wait_for_the_verdict_is_time_of_the_gate():
    def event(time, kind, **data):
        return Event(id=str(time), time=time, kind=kind, data=data)

    happened = [
        event(0, "run.created"),
        event(1, "flow.started"),
        event(2, "stage.started"),
        event(3, "stage.finished"),
        event(4, "gate.waiting"),
        event(9, "gate.data", ok=False),
        event(10, "flow.ended", status="failed"),
    ]
    spent = account(stretches(cuts(happened, []), 10, {}))
    assert spent.buckets[Bucket.gate] == 5
    assert spent.wall == sum(spent.buckets.values()) == 10
