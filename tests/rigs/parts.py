"""Saves of a state without a run: what the saver and its writer do, in this process."""

import json

from everstep.trainer import checkpoint, snapshot, tree, writer
from everstep.trainer.buffers import Buffer
from everstep.trainer.copying import Copying


def write_part(folder, program, rank, ranks, *, step=7):
    """A rank's files of a checkpoint of `program`, as its writer makes them; their entries."""
    encoded = tree.encode(snapshot.living(program, rank))
    plan = snapshot.plan(encoded)
    one = snapshot.Snapshot(step=step, samples=step, epoch=0, probe={}, time=1.0)
    files = json.loads(json.dumps(checkpoint.files_of(plan, one, rank, ranks, {})))
    buffer = Buffer(plan.size, pinned=False)
    try:
        Copying(buffer, [(placed, encoded.tensors[placed.name]) for placed in plan.placed], lambda *_: False)
        return writer.write(folder, files, memoryview(bytes(buffer.bytes.numpy())), lambda _: None)
    finally:
        buffer.close()
