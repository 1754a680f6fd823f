"""Makes checkpoints as the trainer lays them out, with NumPy and safetensors only."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from everstep.core.box import Box
from everstep.core.checkpoint import MANIFEST, AttemptClaim, Key, Manifest, Structure, TensorShape
from everstep.core.dataset import FileEntry
from everstep.core.job import Best
from everstep.core.promotion import Candidate, Wish
from everstep.store import checkpoint as committed
from everstep.store import digest, marks
from everstep.store.layout import RunPlaces

JOB, RUN = "job", "r001-0123abcd"


def places(tmp: Path, *, with_object: bool = False) -> RunPlaces:
    """The folders of one run below `tmp`, made."""
    found = RunPlaces.of(
        str(tmp / "nvme"), str(tmp / "persistent"), str(tmp / "object") if with_object else None, JOB, RUN
    )
    for tier in found.tiers.values():
        tier.mkdir(parents=True)
    return found


def weights(step: int = 0, scale: int = 1) -> dict[str, np.ndarray]:
    """A model with a tied weight, a mask with a legal -inf, and an optimizer's state."""
    random = np.random.default_rng(step)
    mask = np.zeros((4, 4), np.float32)
    mask[0, 1] = -np.inf
    return {
        "model/embed.weight": random.standard_normal((16 * scale, 8)).astype(np.float32),
        "model/norm.bias": random.standard_normal(8).astype(np.float16),
        "model/mask": mask,
        "model/count": np.array(step, np.int64),
        "optimizer/state/0/exp_avg": random.standard_normal((16 * scale, 8)).astype(np.float32),
        "optimizer/state/0/step": np.array(float(step), np.float32),
        "rng/torch": random.integers(0, 256, 64).astype(np.uint8),
    }


ALIASES = {"model/head.weight": "model/embed.weight"}


def structure(scale: int = 1) -> Structure:
    shapes = {
        "embed.weight": ("F32", (16 * scale, 8)),
        "head.weight": ("F32", (16 * scale, 8)),
        "norm.bias": ("F16", (8,)),
        "mask": ("F32", (4, 4)),
        "count": ("I64", ()),
    }
    return Structure(
        batch_size=4,
        model={name: TensorShape(dtype=dtype, shape=shape) for name, (dtype, shape) in shapes.items()},
        parameters=("embed.weight", "head.weight", "norm.bias"),
        world_size=1,
        threads=1,
        torch_version="2",
        processor="x",
    )


def checkpoint(folder: Path, *, tensors=None, ranks: int = 1, metrics=None, run: str = RUN, scale: int = 1) -> Path:
    """A committed checkpoint; its step and attempt come from the folder's name."""
    key = Key.parse(folder.name)
    folder.mkdir(parents=True)
    shared = weights(key.step, scale) if tensors is None else tensors
    for rank in range(ranks):
        held = shared if rank == 0 else {"rng/torch": np.full(16, rank, np.uint8)}
        half = [name for name in held if name.startswith("model/")]
        if rank == 0 and half:
            save_file({name: held[name] for name in half}, folder / "rank-0-0.safetensors")
            save_file({name: one for name, one in held.items() if name not in half}, folder / "rank-0-1.safetensors")
        else:
            save_file(held, folder / f"rank-{rank}.safetensors")
        write_rank(folder, rank, ranks, list(held), key.step)
    commit(folder, ranks=ranks, metrics=metrics, run=run)
    return folder


def sharded(folder: Path, cuts: dict[str, list[Box]], tensors=None, change=None, run: str = RUN) -> Path:
    """A committed checkpoint in which each rank holds its box of the tensors that `cuts` names; rank 0 keeps the others.

    `change(rank, held, tree)` may hurt what a rank is about to write.
    """
    key = Key.parse(folder.name)
    folder.mkdir(parents=True)
    tensors = weights(key.step) if tensors is None else tensors
    ranks = len(next(iter(cuts.values())))
    for rank in range(ranks):
        held = {name: one for name, one in tensors.items() if name not in cuts and rank == 0}
        held["rng/torch"] = np.full(16, rank, np.uint8)
        tree = {name: {"$tensor": name} for name in held}
        for name, boxes in cuts.items():
            whole = tensors[name]
            held[name] = np.ascontiguousarray(whole[boxes[rank].within(Box.whole(whole.shape))])
            word = {"shape": list(whole.shape), "offset": list(boxes[rank].offset), "dim": 0}
            tree[name] = {"$tensor": name, "shard": word}
        tree |= {new: tree[old] | {"$tensor": new} for new, old in ALIASES.items() if old in tree}
        if change is not None:
            change(rank, held, tree)
        save_file(held, folder / f"rank-{rank}.safetensors")
        nested: dict = {}
        for name, node in tree.items():
            member, _, rest = name.partition("/")
            nested.setdefault(member, {})[rest] = node
        write_rank(folder, rank, ranks, list(held), key.step, tree=nested)
    commit(folder, ranks=ranks, run=run)
    return folder


def write_rank(folder: Path, rank: int, ranks: int, names, step: int, **changed) -> None:
    alias = {new: old for new, old in ALIASES.items() if old in names}
    value = {
        "schema_version": 1,
        "rank": rank,
        "world_size": ranks,
        "tree": {name: {"$tensor": name} for name in [*names, *alias]},
        "aliases": alias,
        "progress": {"step": step, "samples": step * 4, "epoch": 0, "finished": 0},
        "probe": {"loss": None, "dtype": "float32"},
        "environment": {},
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(value | changed))


def commit(folder: Path, *, ranks: int = 1, metrics=None, run: str = RUN, **changed) -> Manifest:
    """Write the manifest of what lies in the folder now."""
    key = Key.parse(folder.name)
    entries = [
        FileEntry(path=path.name, size=path.stat().st_size, blake3=digest.of_file(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    ]
    fields = {
        "job": JOB,
        "run": run,
        "attempt": key.attempt,
        "step": key.step,
        "world_size": ranks,
        "parent_step": 0,
        "samples": key.step * 4,
        "time": 1000.0 + key.step,
        "metrics": metrics or {},
        "code_version": "abc",
        "files": entries,
    }
    manifest = Manifest(**(fields | changed))
    (folder / MANIFEST).write_text(manifest.to_json())
    return manifest


def claim(places: RunPlaces, attempt: int, resumed_from: int = 0) -> None:
    path = places.claim(attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    one = AttemptClaim(attempt=attempt, resumed_from=resumed_from, host="here", pid=1, boot="b", time=1.0)
    path.write_text(one.to_json())


def wish(places, step: int, *, release: bool = False, **metrics) -> Wish:
    """Commit a checkpoint on the persistent tier, verified and durable, and wish its promotion, judged by `loss`."""
    key = Key(step, 1)
    folder = places.checkpoint("persistent", key)
    if not folder.exists():
        checkpoint(folder, metrics=metrics)
    manifest = digest.of_bytes(committed.read_manifest_bytes(folder))
    marks.verified(places, key.folder, "persistent", committed.verify(folder, structure()))
    marks.durable(places, key.folder, "persistent", manifest)
    one = Candidate(
        job=JOB, run=RUN, checkpoint=key.folder, step=step, uri=folder.as_uri(), manifest=manifest, metrics=metrics
    )
    return Wish(candidate=one, release=release, best=Best(metric="loss"))
