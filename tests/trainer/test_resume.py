"""A run that is killed and resumed ends with the same bits as one that was never touched."""

import pytest
import torch


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_rank_trains_to_the_end(make_run):
    run = make_run()
    gang = run.run()
    assert gang.wait() == [0], gang.logs()
    assert gang.end().outcome == "done"
    assert run.committed() == [f"step-{step:08d}.a1" for step in range(10, 70, 10)]
