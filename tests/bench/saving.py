"""What a save costs: our saver against plain copies of memory and against the ways that PyTorch and safetensors offer.

`python saving.py FOLDER MEGABYTES ROUNDS` measures one size in a process of its own, with two threads, and prints a line
of JSON. Ways take turns in each round; the first save of each way is not counted. A state is a stack of layers with AdamW's
moments: a third parameters. "Stall" is the time in which the training thread cannot train: for ours the call of `take` and
the wait at the fence, for the others the call itself.
"""

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import picture
from blake3 import blake3

THREADS = 2
LAYER = 1024 * 1536 * 4  # bytes of one parameter
PIECE = 8 << 20


def measure(folder: Path, drawn: Path, *, quick: bool) -> dict[str, float]:
    """All figures, each size in a process of its own; draws stall and memory against size."""
    sizes = {64: 5, 256: 5} if quick else {64: 9, 256: 7, 1024: 7, 4096: 3}
    found = {size: _one(folder, size, rounds) for size, rounds in sizes.items()}
    picture.draw(found, drawn)
    return figures(found)


def figures(found: dict[int, dict[str, float]]) -> dict[str, float]:
    """Ratios by name, each size under its own."""
    told: dict[str, float] = {}
    for size, one in found.items():
        name = f"{size // 1024}gb" if size >= 1024 else f"{size}mb"
        told |= {
            f"save_stall_{name}_over_memcpy": one["stall"] / one["memcpy"],
            f"save_stall_{name}_overlapped_over_memcpy": one["overlapped"] / one["memcpy"],
            f"save_stall_{name}_over_torch_save": one["overlapped"] / one["torch_save"],
            f"save_stall_{name}_at_once_over_torch_save": one["stall"] / one["torch_save"],
            f"save_stall_{name}_over_dcp_async": one["overlapped"] / one["dcp_async"],
            f"save_stall_{name}_over_safetensors": one["overlapped"] / one["safetensors"],
            f"save_stall_{name}_ms": 1000 * one["overlapped"],
            f"memcpy_{name}_ms": 1000 * one["memcpy"],
        }
    largest = found[max(found)]
    names = ("throughput_dip", "write_over_disk", "verify_over_blake3", "load_over_torch_load")
    told |= {name: largest[name] for name in names}
    told["snapshot_peak_over_state"] = max(one["snapshot_peak_over_state"] for one in found.values())
    return told


def _one(folder: Path, megabytes: int, rounds: int) -> dict[str, float]:
    place = folder / f"saving-{megabytes}"
    place.mkdir()
    try:
        command = [sys.executable, __file__, str(place), str(megabytes), str(rounds)]
        env = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        shutil.rmtree(place, ignore_errors=True)


class Bench:
    """One state and all ways of saving it."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        import torch

        from everstep.core.segment import AttemptSpec
        from everstep.store.layout import RunPlaces
        from everstep.trainer import snapshot, structure
        from everstep.trainer.commit import Target
        from everstep.trainer.program import Program
        from everstep.trainer.ranks import Ranks
        from everstep.trainer.saver import Saver
        from everstep.trainer.vitals import Vitals

        torch.set_num_threads(THREADS)
        self.folder = folder
        count = max(2, (megabytes << 20) // 3 // LAYER)
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1024, 1536)) for _ in range(count)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for one in self.model:
            one.grad = torch.zeros_like(one)
        self.optimizer.step()
        for one in self.model:
            one.grad = None
        program = Program(
            model=self.model, optimizer=self.optimizer, dataset=[1], batch_size=1, loss=lambda batch: batch
        )
        self.program = program
        self.places = RunPlaces(persistent=folder / "run", local=folder / "local")
        for place in (self.places.persistent, self.places.local):
            place.mkdir(parents=True)
        spec = AttemptSpec(
            name="bench", run="run", attempt=1, rank=0, world_size=1, local_rank=0, program="p:build", search_path=".",
            config={}, data=".", steps=10, seed=0, threads=THREADS, run_dir=str(self.places.persistent),
            local_dir=str(self.places.local), parent_pid=os.getpid(),
        )  # fmt: skip
        self.vitals = Vitals(spec, os.getpid())
        self.target = Target(self.places, Ranks(), structure.of(program, 1), {})
        later = snapshot.changed_by_the_optimizer(program)
        self.savers = {
            "stall": Saver(self.vitals, self.target, None, threads=THREADS),
            "overlapped": Saver(self.vitals, self.target, None, later=later, threads=THREADS),
        }
        for saver in self.savers.values():
            saver.start()
        self.bytes = sum(3 * one.nbytes for one in self.model)
        self.step = 0
        self._plain = self._prefaulted()
        self._work = torch.randn(256, 256)

    def ours(self, kind: str) -> float:
        """One save; between its two halves the training thread computes, as it would, for about the copy's time."""
        from everstep.trainer import snapshot
        from everstep.trainer.snapshot import Snapshot

        saver, self.step = self.savers[kind], self.step + 1
        of = Snapshot(step=self.step, samples=self.step, epoch=0, probe={}, time=time.time(), patient=True)
        state = snapshot.living(self.program, 0)
        began = time.perf_counter()
        saver.take(state, of)
        taken = time.perf_counter() - began
        if kind == "overlapped":
            self.compute(self.bytes / 2e9 + 0.05)
        began = time.perf_counter()
        saver.fence()
        taken += time.perf_counter() - began
        saver.finish()
        return taken

    def compute(self, seconds: float) -> int:
        """Matrix products of one thread's worth; how many."""
        import torch

        done, until = 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.mm(self._work, self._work)
            done += 1
        return done

    def memcpy(self) -> float:
        """The floor: the same bytes into prefaulted memory, by as many threads."""
        pairs = [(target, one) for target, one in zip(self._plain, self._tensors(), strict=True)]
        began = time.perf_counter()
        threads = [threading.Thread(target=_move, args=(pairs[k::THREADS],)) for k in range(THREADS)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return time.perf_counter() - began

    def torch_save(self) -> float:
        import torch

        began = time.perf_counter()
        torch.save(self._state(), self.folder / "torch.pt")
        return time.perf_counter() - began

    def safetensors(self) -> float:
        from safetensors.torch import save_file

        flat = {str(number): one.detach() for number, one in enumerate(self._tensors())}
        began = time.perf_counter()
        save_file(flat, self.folder / "plain.safetensors")
        return time.perf_counter() - began

    def dcp_async(self) -> float:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        stager = self.__dict__.setdefault("_stager", DefaultStager(StagingOptions(False, False, False, False)))
        place = self.folder / f"dcp-{self.step}"
        began = time.perf_counter()
        answer = dcp.async_save(self._state(), checkpoint_id=place, async_stager=stager, no_dist=True)
        stall = time.perf_counter() - began
        getattr(answer, "upload_completion", answer).result()
        shutil.rmtree(place)
        return stall

    def raw_write(self) -> float:
        """What the disk takes: the same bytes, written and synced by the same pieces, nothing hashed."""
        path = self.folder / "raw"
        began = time.perf_counter()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for one in self._tensors():
            view = _view(one)
            for at in range(0, len(view), PIECE):
                os.write(handle, view[at : at + PIECE])
        os.fsync(handle)
        os.close(handle)
        taken = time.perf_counter() - began
        path.unlink()
        return taken

    def verify(self) -> tuple[float, float]:
        """Seconds of our verification, and of reading the same files and hashing them with BLAKE3, both from the disk."""
        from everstep.store import checkpoint

        folder = self.newest()
        _forget(folder)
        began = time.perf_counter()
        for path in folder.iterdir():
            with path.open("rb", buffering=0) as file:
                digest = blake3(max_threads=blake3.AUTO)
                while piece := file.read(PIECE):
                    digest.update(piece)
        plain = time.perf_counter() - began
        _forget(folder)
        began = time.perf_counter()
        outcome = checkpoint.verify(folder, self.target.structure)
        assert outcome.ok, outcome.why
        return time.perf_counter() - began, plain

    def load(self) -> tuple[float, float]:
        """Seconds to have every tensor in memory: ours, digests proven, and torch.load; both from the page cache."""
        import torch

        from everstep.store import checkpoint as committed
        from everstep.trainer.reading import Reading

        folder = self.newest()
        for path in (*folder.iterdir(), self.folder / "torch.pt"):
            path.read_bytes()
        began = time.perf_counter()
        Reading(folder, committed.read_manifest(folder), THREADS).part(0)
        ours = time.perf_counter() - began
        began = time.perf_counter()
        torch.load(self.folder / "torch.pt", weights_only=True)
        return ours, time.perf_counter() - began

    def dip(self) -> float:
        """How much slower steps of one computing thread are while a checkpoint is written: 1 is not at all."""
        alone = self.compute(1.0)
        from everstep.trainer import snapshot
        from everstep.trainer.snapshot import Snapshot

        self.step += 1
        saver = self.savers["overlapped"]
        saver.take(
            snapshot.living(self.program, 0),
            Snapshot(step=self.step, samples=0, epoch=0, probe={}, time=time.time()),
        )
        beside = self.compute(1.0)
        saver.finish()
        return beside / alone

    def newest(self) -> Path:
        return max(self.places.checkpoints("local").iterdir())

    def prune(self) -> None:
        """Only the newest checkpoint is kept, so that the disk stays as full as it was."""
        for folder in sorted(self.places.checkpoints("local").iterdir())[:-1]:
            shutil.rmtree(folder)

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _tensors(self) -> list[Any]:
        moments = self.optimizer.state.values()
        return [*self.model, *(one[name] for one in moments for name in ("exp_avg", "exp_avg_sq"))]

    def _prefaulted(self) -> list[int]:
        self._memory = mmap.mmap(-1, self.bytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(base, 1, self.bytes)
        places, at = [], 0
        for one in self._tensors():
            places.append(base + at)
            at += one.nbytes
        return places


def _move(pairs: list[tuple[int, Any]]) -> None:
    for target, one in pairs:
        ctypes.memmove(target, one.data_ptr(), one.nbytes)


def _view(tensor: Any) -> memoryview:
    content: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(content).cast("B")


def _forget(folder: Path) -> None:
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def run(folder: Path, megabytes: int, rounds: int) -> dict[str, float]:
    """Medians of all ways for one size."""
    bench = Bench(folder, megabytes)
    ways: dict[str, Callable[[], float]] = {
        "memcpy": bench.memcpy,
        "stall": lambda: bench.ours("stall"),
        "torch_save": bench.torch_save,
        "overlapped": lambda: bench.ours("overlapped"),
        "dcp_async": bench.dcp_async,
        "safetensors": bench.safetensors,
        "raw_write": bench.raw_write,
    }
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            taken = way()
            if turn:
                seen[name].append(taken)
        bench.prune()
    found = {name: median(values) for name, values in seen.items()}
    from everstep.core.checkpoint import SaveCost
    from everstep.store import jsonl

    costs = [SaveCost.model_validate(row) for row in jsonl.read(bench.places.saves)]
    found["write_over_disk"] = found["raw_write"] / median(cost.write_seconds for cost in costs[2:])
    found["snapshot_peak_over_state"] = max(cost.held for cost in costs) / bench.bytes
    pairs = [bench.verify() for _ in range(rounds)]
    found["verify_over_blake3"] = median(plain / ours for ours, plain in pairs)
    pairs = [bench.load() for _ in range(rounds)]
    found["load_over_torch_load"] = median(ours / theirs for ours, theirs in pairs)
    found["throughput_dip"] = median(bench.dip() for _ in range(rounds))
    found["bytes"] = bench.bytes
    return found


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))), flush=True)
    os._exit(0)  # the savers' threads and writers end with this process, which does not wait for them
