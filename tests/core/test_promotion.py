"""What may be released, and the sentence for what may not."""

import json

import pytest

from everstep.core import promotion
from everstep.core.job import Best
from everstep.core.promotion import Candidate, Version, Wish

LOSS, ACCURACY = Best(metric="loss"), Best(metric="accuracy", mode="max")


def candidate(step: int = 10, **metrics) -> Candidate:
    return Candidate(
        job="job", run="r001", checkpoint=f"step-{step:08d}.a1", step=step, uri="s3://b/x", digest="d", metrics=metrics
    )


def version(number: str = "3", **metrics) -> Version:
    return Version(number=number, tags={"everstep.metrics": json.dumps(metrics)})


def refusal(one: Candidate, best: Best | None, production: Version | None = None, **more) -> str:
    return promotion.refusal(Wish(candidate=one, release=True, best=best), production, **more)


@pytest.mark.parametrize(
    ("metrics", "best", "production"),
    [
        ({"loss": 0.4}, LOSS, None),
        ({"loss": 0.4}, LOSS, {"loss": 0.5}),
        ({"loss": 0.4}, LOSS, {"loss": 0.4}),
        ({"loss": 1}, LOSS, {"loss": 1.0}),
        ({"accuracy": 0.9}, ACCURACY, {"accuracy": 0.8}),
        ({}, None, {"loss": 0.1}),
        ({"other": "nan", "loss": 0.4}, LOSS, {"loss": 0.5}),
    ],
)
def test_released(metrics, best, production):
    assert refusal(candidate(**metrics), best, version(**production) if production is not None else None) == ""


@pytest.mark.parametrize(
    ("metrics", "best", "production", "words"),
    [
        ({"loss": 0.6}, LOSS, {"loss": 0.5}, "its loss of 0.6 is worse than the 0.5 of production (version 3)."),
        ({"accuracy": 0.7}, ACCURACY, {"accuracy": 0.8}, "its accuracy of 0.7 is worse than the 0.8 of production"),
        ({"loss": "nan"}, LOSS, None, "'loss', which checkpoint.best names, is nan."),
        ({"loss": "inf"}, LOSS, {"loss": 0.5}, "is inf."),
        ({"loss": float("nan")}, LOSS, None, "is nan."),
        ({}, LOSS, None, "'loss', which checkpoint.best names, is not among its metrics (it has none)."),
        ({"b": 1.0, "a": 2.0}, LOSS, None, "is not among its metrics (a, b)."),
        (
            {"loss": 0.4},
            LOSS,
            {},
            "production (version 3) has no 'loss' to compare with; set the alias production by hand",
        ),
        ({"loss": 0.4}, LOSS, {"loss": "nan"}, "to compare with"),
    ],
)
def test_refused(metrics, best, production, words):
    """BC-173: a model that is not finite, has no metric, or is worse, is never released in silence."""
    why = refusal(candidate(**metrics), best, version(**production) if production is not None else None)
    assert why.startswith("step-00000010.a1 stays candidate: ")
    assert words in why
    assert why.endswith(".")
    assert "\n" not in why


def test_refused_before_it_is_compared():
    wish = Wish(candidate=candidate(loss=0.1), release=True, best=LOSS, refused="the loss on a fixed batch differs.")
    assert promotion.refusal(wish, None) == "step-00000010.a1 stays candidate: the loss on a fixed batch differs."


def test_what_a_person_rolled_back_does_not_come_again():
    known = Version(number="7", tags={"everstep.rolled_back": "2026-01-01T00:00:00Z"})
    assert "version 7 was rolled back" in refusal(candidate(loss=0.1), LOSS, version(loss=0.5), known=known)


def test_the_best_is_chosen_and_the_newest_of_equals():
    three = [candidate(30, loss=0.5), candidate(10, loss=0.4), candidate(20, loss=0.4), candidate(40, loss="nan")]
    assert promotion.choose(three, LOSS).step == 20
    assert promotion.choose(three, Best(metric="loss", mode="max")).step == 30
    assert promotion.choose(three, None).step == 40
    assert promotion.choose(three, ACCURACY).step == 40, "nobody has it: the newest, which is then refused"
    assert promotion.choose([], LOSS) is None


def test_tags_of_a_version():
    one = candidate(loss=0.5).model_copy(update={"dataset": "f" * 64})
    tags = promotion.tags(one, LOSS)
    assert tags["everstep.uri"] == "s3://b/x"
    assert tags["everstep.digest"] == "d"
    assert tags["everstep.step"] == "10"
    assert tags["everstep.dataset"] == "f" * 64
    assert Version(number="1", tags=tags).metrics == {"loss": 0.5}
    many = candidate(**{f"metric-{number}": 0.123456789 for number in range(1000)}, loss=0.25)
    assert Version(number="1", tags=promotion.tags(many, LOSS)).metrics == {"loss": 0.25}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"loss": [1]}', "null", "7"])
def test_a_version_that_somebody_else_made_has_no_metrics(text):
    assert Version(number="1", tags={"everstep.metrics": text}).metrics == {}
    assert "to compare with" in refusal(candidate(loss=0.1), LOSS, Version(number="1", tags={}))
