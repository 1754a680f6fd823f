"""`python -m everstep.trainer.reprobe <answer>`: does a checkpoint still give the loss that was saved with it?

Reads one line from standard input (an AttemptSpec whose `restore` is the checkpoint), builds the program, loads the
checkpoint with every byte checked, and writes a `Probe` as JSON to the file `answer`. It joins no other rank, trains
nothing, and writes nothing else. Exit code 0 with an answer, 1 without one.
"""

import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from everstep.core.errors import StoreUnavailable
from everstep.core.promotion import Probe as Answer
from everstep.core.segment import AttemptSpec
from everstep.store import atomic
from everstep.store.layout import RunPlaces


def main(answer: Path) -> int:
    line = sys.stdin.readline()
    if not line:
        return 1
    spec = AttemptSpec.model_validate_json(line)
    if os.getppid() != spec.parent_pid:
        return 1
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    atomic.write(answer, _answer(spec).model_dump_json().encode(), sync=False)
    sys.stdout.flush()
    os._exit(0)  # threads of the user's program hold up nothing


def _answer(spec: AttemptSpec) -> Answer:
    from everstep.trainer.failure import cause_of
    from everstep.trainer.vitals import Vitals

    name = Path(spec.restore or "").name
    vitals = Vitals(spec, os.getpid())
    try:
        loss = _loss(spec, vitals)
        if loss is not None and not math.isfinite(loss):
            return Answer(checkpoint=name, ok=False, why=f"its loss on a fixed batch is {loss}")
        return Answer(checkpoint=name, ok=True, loss=loss)
    except StoreUnavailable as error:  # unknown is not failed
        return Answer(checkpoint=name, ok=False, known=False, why=str(error))
    except Exception as error:  # noqa: BLE001 - the process edge: it is the answer, with its traceback in the log
        traceback.print_exception(error)
        return Answer(checkpoint=name, ok=False, why=cause_of(error, vitals.phase, 0, spec.resumed_from).message)


def _loss(spec: AttemptSpec, vitals: Any) -> float | None:
    """Restore as a rank does, which compares the loss with the saved one; that loss, or today's where none was saved."""
    import torch

    from everstep.store import checkpoint as committed
    from everstep.trainer import device as devices
    from everstep.trainer import locate, ranks, restore, rng, structure
    from everstep.trainer.evaluation import Probe

    folder = Path(spec.restore or "")
    spec = spec.model_copy(update={"world_size": committed.read_manifest(folder).world_size})
    ranks.set_environment(spec.model_copy(update={"rank": 0, "local_rank": 0, "world_size": 1}))
    torch.set_num_threads(spec.threads)
    device = devices.choose(spec)
    rng.seed_all(rng.mix(spec.seed))
    program = locate.build(spec.program, spec.search_path, spec.config, Path(spec.data))
    program.model.to(device)
    structure.compare(
        RunPlaces(Path(spec.run_dir), Path(spec.local_dir)).structure, structure.of(program, spec.world_size)
    )
    environment = structure.environment(program, spec.world_size, device)
    probe = Probe(program, spec.seed, device, spec.world_size * program.grad_accumulation)
    restore.seed_rank(spec, 0)
    restore.from_checkpoint(spec, program, probe, environment, vitals, None)
    kept = json.loads((folder / "rank-0.json").read_bytes())["probe"]["loss"] or probe.take()["loss"]
    return None if kept is None else float.fromhex(kept)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
