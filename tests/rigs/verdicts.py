"""A verdict of the data gate on small data sets, made once a session: the real one takes seconds of a core."""

import atexit
import shutil
import tempfile
from pathlib import Path

from everstep.core.job import TrainJob
from everstep.host import staging
from everstep.host.gate import Gatekeeper
from everstep.store.layout import RunPlaces

_made: dict[str, Path] = {}


def plant(data: Path, local: Path) -> None:
    """Leave the verdict on the folder `data` on a local tier, as an earlier run on the same machine would have."""
    scratch = Path(tempfile.mkdtemp(prefix="verdict-"))
    try:
        staged = staging.stage(data, scratch)
        fingerprint = staged.manifest.fingerprint
        if fingerprint not in _made:
            _made[fingerprint] = scratch
            atexit.register(shutil.rmtree, scratch, ignore_errors=True)
            _judge(staged, scratch)
        shutil.copytree(_made[fingerprint] / "gates", local / "gates")
    finally:
        if scratch not in _made.values():
            shutil.rmtree(scratch)


def _judge(staged: staging.Staged, folder: Path) -> None:
    job = TrainJob(
        name="verdict",
        program="none:build",
        data={"source": staged.manifest.source},
        steps=1,
        tiers={"local": str(folder), "persistent": str(folder / "persistent")},
    )
    places = RunPlaces.of(str(folder), str(folder / "persistent"), None, "verdict", "r001")
    (places.persistent / "logs").mkdir(parents=True)
    keeper = Gatekeeper(job, places, staged, "verdict/test", lambda kind, **data: None)
    try:
        keeper.ask()
        keeper.answer()
        keeper.settle()
    finally:
        keeper.close()
