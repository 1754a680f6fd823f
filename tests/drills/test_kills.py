"""Kills at every named point and at seeded random moments: the end has the same bits, and nothing is left behind."""

import os
import signal

import pytest


def check_epochs(drill):
    """Each sample once an epoch, in what the run accepted."""
    by_rank = drill.accepted()
    steps = drill.job["steps"]
    seen = [
        identity
        for step in range(1, steps + 1)
        for rank in sorted(by_rank)
        for row in by_rank[rank].get(step, [])
        for identity in row["ids"]
    ]
    for begin in range(0, len(seen) - 97 + 1, 97):
        assert sorted(seen[begin : begin + 97]) == list(range(97))


def test_a_killed_rank_is_restarted_and_the_bits_are_the_same(make_drill):
    untouched = make_drill().run()
    assert untouched.code == 0, untouched.err
    drill = make_drill()
    ended = drill.run({"point": "train.mid_step", "hit": 33})
    assert ended.code == 0, ended.err
    assert ended.final["restarts"] == 1
    assert ended.final["weights"] == untouched.final["weights"]
    check_epochs(drill)
    drill.await_gone()
