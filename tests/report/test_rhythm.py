"""How often a run saves and what it removed, as the report, the page and the text say it."""

import pytest
from rigs.told_run import ToldRun

from everstep.core.cadence import Input, Inputs, choose
from everstep.core.summary import RunReport
from everstep.host import reporting


def chosen(stall):
    length = lambda value, source: Input(seconds=value, source=source)  # noqa: E731
    return choose(
        Inputs(
            stall=length(stall, "measured, the median of 12 saves"),
            write=length(3.0, "measured, nine in ten of 12 saves"),
            recovery=length(60.0, "assumed"),
            detection=length(0.02, "measured, the mean of 2 failures of this run"),
            failure=length(1e6, "published rates of six fleets"),
        )
    )


def told(tmp_path, *events, **how):
    run = ToldRun(tmp_path, restarts=1, **how)
    run.write()
    for kind, data in events:
        run.event(kind, **data)
    report = reporting.again(run.places.persistent)
    files = [run.places.persistent / name for name in ("report.html", "report.txt", "report.json")]
    page, text, record = [file.read_text() for file in files]
    assert RunReport.model_validate_json(record) == report
    return report, page, text


def test_a_choice_is_told_with_all_that_it_rests_on(tmp_path):
    choices = [("cadence.chosen", chosen(stall).model_dump(mode="json")) for stall in (0.5, 0.05)]
    report, page, text = told(tmp_path, *choices)
    assert report.cadence.chosen == chosen(0.05)
    assert report.cadence.choices == 2
    sentence = "A save every 5 min 16 s, which loses the least"
    assert report.cadence.text.startswith(sentence)
    for shown in (page, text):
        assert "How often it saves" in shown
        assert sentence in shown
        assert "measured, the median of 12 saves" in shown
        assert "50 ms" in shown
        assert "11 d 13 h" in shown
    assert "the newest of 2 choices" in page


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"every_steps": 500}, "A save after every 500 steps, as the job says."),
        ({"every_minutes": 15}, "A save every 15 min 00 s, as the job says."),
    ],
)
def test_a_rhythm_of_the_jobs_own_is_told_as_such(tmp_path, policy, said):
    report, page, _ = told(tmp_path, job={"checkpoint": policy})
    assert report.cadence.text == said
    assert said in page


@pytest.mark.parametrize("data", [{}, {"seconds": "often"}, {"seconds": 5, "bound": "<b>", "inputs": []}])
def test_a_choice_that_cannot_be_read_is_none(tmp_path, data):
    report, page, text = told(tmp_path, ("cadence.chosen", data))
    assert report.cadence is None
    assert "How often it saves" not in page + text


def test_what_retention_freed_is_added_up_by_tier(tmp_path):
    gone = [{"tier": tier, "bytes": 1_500_000_000} for tier in ("local", "local", "persistent")]
    report, page, text = told(tmp_path, *(("checkpoint.removed", one) for one in gone))
    assert {tier: (one.checkpoints, one.bytes) for tier, one in report.freed.items()} == {
        "local": (2, 3_000_000_000),
        "persistent": (1, 1_500_000_000),
    }
    assert "3 copies were removed by the job's retention" in page
    assert "3.0 GB on the local tier" in page
    assert "Removed by retention: 2 on the local tier (3.0 GB), 1 on the persistent tier (1.5 GB)." in text


def test_where_nothing_was_removed_that_is_said(tmp_path):
    _, page, text = told(tmp_path)
    assert "retention has removed none" in page
    assert "Removed by retention" not in text
