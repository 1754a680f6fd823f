"""What it costs a step that two ranks agree: a loop of steps with and without, block by block in one process group.

A step sleeps as one that waits for a GPU does, and averages a megabyte of gradients. `python agreement.py FOLDER RANK
PORT FD ROUNDS` is one rank; rank 0 prints a line of JSON with the seconds of each round.
"""

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from everstep.host import process

STEPS = 20
PAUSE = 0.004
GRADIENTS = 250_000
RANKS = 2


def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Median microseconds that each way of agreeing adds to a step, over all rounds."""
    listener = socket.create_server(("127.0.0.1", 0))
    token = f"bench-agreement/{secrets.token_hex(4)}"
    started: list[process.Process] = []
    try:
        for rank in range(RANKS):
            words = (folder, rank, listener.getsockname()[1], listener.fileno() if rank == 0 else -1, rounds)
            argv = (sys.executable, __file__, *map(str, words))
            env = process.child_environment((), {"OMP_NUM_THREADS": "1"})
            log, fds = folder / f"agreement-{rank}.log", [listener.fileno()] if rank == 0 else []
            started.append(process.spawn(argv, env, token, log, pass_fds=fds))
        for rank, one in enumerate(started):
            if (status := one.wait(120)) != 0:
                log = (folder / f"agreement-{rank}.log").read_text()
                raise RuntimeError(f"rank {rank} ended with status {status}:\n{log[-2000:]}")
    finally:
        listener.close()
        process.sweep(token, 0.0)
        for one in started:
            one.wait(5.0)
            one.close()
    result = json.loads((folder / "agreement-0.log").read_text().splitlines()[-1])
    bare = result.pop("none")
    differences = {
        name: median(a - b for a, b in zip(seconds, bare, strict=True)) / STEPS for name, seconds in result.items()
    }
    return {name: 1e6 * one for name, one in differences.items()} | {"step_ms": 1000 * median(bare) / STEPS}


def live(folder: Path, rank: int, port: int, fd: int, rounds: int) -> None:
    """One rank: every round takes a block of steps with each way, each round in another order."""
    import torch

    from everstep.core.segment import AttemptSpec
    from everstep.trainer.rank import Rank
    from everstep.trainer.ranks import Ranks

    torch.set_num_threads(1)
    spec = AttemptSpec(
        name="bench", run="bench", attempt=1, rank=rank, local_rank=rank, world_size=RANKS, master_port=port,
        listen_fd=fd if rank == 0 else None, program="", search_path="", config={}, data="", steps=1_000_000, seed=0,
        threads=1, run_dir=str(folder), local_dir=str(folder), parent_pid=0,
    )  # fmt: skip
    ranks = Ranks.join(spec, torch.device("cpu"))
    ways = list(_ways(Rank(spec, 0, None).say, ranks).items())
    gradients = torch.ones(GRADIENTS)
    seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
    for turn in range(-2, rounds):
        for index in range(len(ways)):
            name, agree = ways[(index + turn) % len(ways)]
            took = _block(agree, gradients)
            if turn >= 0:
                seconds[name].append(took)
    print(json.dumps(seconds), flush=True)
    ranks.meet(60)
    os._exit(0)  # as a rank of the trainer leaves: at once, so that no thread of the group is caught half way


def _block(agree: Callable[[int], object], gradients) -> float:
    from torch import distributed

    agree(0)
    distributed.barrier()
    began = time.perf_counter()
    for step in range(STEPS):
        time.sleep(PAUSE)
        distributed.all_reduce(gradients)
        agree(step)
    return time.perf_counter() - began


def _ways(say: Callable[[int], tuple[int, ...]], ranks) -> dict[str, Callable[[int], object]]:
    """What is done at the end of a step: nothing, as the trainer does, and the ways that it does not go."""
    import torch
    from torch import distributed

    from everstep.trainer.agreement import Agreement

    ours = Agreement(say, ranks)
    pending: list[tuple[object, torch.Tensor]] = []

    def later(step: int) -> None:
        ours.hear()
        ours.issue(step)

    def at_once(step: int) -> list[int]:
        vector = torch.tensor(say(step), dtype=torch.int64)
        distributed.all_reduce(vector, distributed.ReduceOp.MAX, group=ranks.control)
        return vector.tolist()

    def broadcast(step: int) -> list[int]:
        vector = torch.tensor(say(step), dtype=torch.int64)
        distributed.broadcast(vector, 0, group=ranks.control)
        return vector.tolist()

    def broadcast_later(step: int) -> list[int]:
        word = []
        if pending:
            work, vector = pending.pop()
            work.wait()
            word = vector.tolist()
        vector = torch.tensor(say(step), dtype=torch.int64)
        pending.append((distributed.broadcast(vector, 0, group=ranks.control, async_op=True), vector))
        return word

    ours.issue(0)
    return {
        "none": lambda _: None,
        "later": later,
        "at_once": at_once,
        "broadcast": broadcast,
        "broadcast_later": broadcast_later,
    }


if __name__ == "__main__":
    live(Path(sys.argv[1]), *map(int, sys.argv[2:]))
