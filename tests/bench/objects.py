"""How long after its local commit a checkpoint is committed on the object tier, on a real S3 server of this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

import fabric
from pydantic import SecretStr
from rigs import seaweed

from everstep.core.checkpoint import Key, State
from everstep.host.courier import CopierSpec
from everstep.store import marks
from everstep.store.layout import RunPlaces
from everstep.store.s3_access import Access, Keys

SCALE = 10_000
"""Two files of about 5 MB."""


def promote_ms(folder: Path, times: int) -> list[float]:
    """Milliseconds from the local commit to the mark of the commit there, for checkpoints of about 10 MB.

    That is what both copiers do: notice, verify, copy to the persistent tier, upload, read back, commit.
    """
    folder.mkdir(exist_ok=True)
    server = seaweed.start(folder)
    try:
        bucket = server.bucket()
        places = RunPlaces.of(
            str(folder / "nvme"), str(folder / "persistent"), f"s3://{bucket}/runs", fabric.JOB, fabric.RUN
        )
        for made in (places.persistent, places.checkpoints("local")):
            made.mkdir(parents=True)
        places.structure.write_text(fabric.structure(SCALE).to_json())
        fabric.claim(places, 1)
        access = Access(server.endpoint, server.region, "path", None, _keys(server))
        with ExitStack() as stack:
            for more in ({}, {"object_uri": places.object, "access": access.to_dict()}):
                stack.enter_context(_copier(_spec(places).model_copy(update=more)))
            return [_measure(places, Key(10 * turn, 1)) for turn in range(1, times + 2)][1:]
    finally:
        server.stop()


def _measure(places: RunPlaces, key: Key) -> float:
    beside = fabric.checkpoint(places.local / "saving" / key.folder, scale=SCALE)
    began = time.monotonic()
    beside.rename(places.checkpoint("local", key))
    while State.durable not in marks.states(places).get((key.folder, "object"), set()):
        if time.monotonic() - began > 60:
            raise TimeoutError(f"{key.folder} has not come to the object tier in a minute")
        time.sleep(0.005)
    return (time.monotonic() - began) * 1000


def _keys(server: seaweed.Seaweed) -> Keys:
    return Keys(server.access_key, SecretStr(server.secret_key))


def _spec(places: RunPlaces) -> CopierSpec:
    return CopierSpec(
        name=fabric.JOB,
        run=fabric.RUN,
        run_dir=str(places.persistent),
        local_dir=str(places.local),
        parent_pid=os.getpid(),
    )


@contextmanager
def _copier(spec: CopierSpec) -> Iterator[None]:
    child = subprocess.Popen([sys.executable, "-m", "everstep.host.copier"], stdin=subprocess.PIPE)
    try:
        assert child.stdin is not None
        child.stdin.write(spec.model_dump_json().encode() + b"\n")
        child.stdin.flush()
        yield
    finally:
        child.kill()
        child.communicate()
