"""What drills share: one Prefect server for many flow runs, TINY jobs in their own folders, and untouched references."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from everstep.host import server

sys.path.insert(0, str(Path(__file__).parent))
from drill import Drill, new_drill


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory) -> Iterator[str]:
    """One embedded Prefect server for every flow run of the session."""
    own = server.start(tmp_path_factory.mktemp("prefect"))
    own.wait_ready(120)
    yield own.url
    own.stop()


@pytest.fixture
def make_drill(tmp_path, prefect_api, mlflow_template):
    """Make drills in folders of their own; see `new_drill`."""
    made: list[Drill] = []

    def make(name: str = "tiny", *, embedded: bool = False, **changes) -> Drill:
        folder = tmp_path / f"{name}-{len(made)}"
        made.append(new_drill(folder, None if embedded else prefect_api, mlflow_template, name, **changes))
        return made[-1]

    yield make
    for drill in made:
        drill.close()


@dataclass(frozen=True)
class Reference:
    """An untouched run: its last line, and its drill for the journal."""

    drill: Drill
    final: dict


@pytest.fixture(scope="session")
def untouched(tmp_path_factory, prefect_api, mlflow_template):
    """The untouched run of a shape, made once."""
    made: dict[object, Reference] = {}

    def reference(shape) -> Reference:
        if shape not in made:
            folder = tmp_path_factory.mktemp("untouched")
            drill = new_drill(folder, prefect_api, mlflow_template, name="tiny", **shape.job())
            try:
                ended = drill.run()
            finally:
                drill.close()
            assert ended.code == 0, ended.err
            made[shape] = Reference(drill, ended.final)
        return made[shape]

    return reference
