"""Runs without a flow above them, and what an untouched one leaves."""

import pytest
import torch
from rigs.ranks import Driver, Zygote


@pytest.fixture(scope="session")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def untouched(zygote, tmp_path_factory):
    """The rows, journals and weights of a run that nothing happened to; made once for each configuration."""
    made = {}

    def give(ranks=1, **config):
        key = (ranks, *sorted(config.items()))
        if key not in made:
            run = Driver(zygote, tmp_path_factory.mktemp("untouched") / "run", **config)
            gang = run.run(ranks=ranks)
            assert gang.wait() == [0] * ranks, gang.logs()
            journals = [run.journal(rank, [0]) for rank in range(ranks)]
            made[key] = run.rows([(1, 0)]), journals, run.weights("step-00000060.a1")
        return made[key]

    return give


@pytest.fixture(scope="session")
def same():
    """Whether two state dicts are equal bit for bit."""

    def equal(one, other):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    return equal


@pytest.fixture
def make_run(zygote, tmp_path):
    made = []

    def make(name="a", **config):
        made.append(Driver(zygote, tmp_path / name, **config))
        return made[-1]

    yield make
    for driver in made:
        for gang in driver.gangs:
            gang.kill()
            gang.wait()
