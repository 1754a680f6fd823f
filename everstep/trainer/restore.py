"""Go on from a checkpoint: read and check it, load it, check the loss on the fixed batch, and set the clock back."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from everstep.core.checkpoint import MANIFEST, Manifest
from everstep.core.errors import Damaged
from everstep.core.segment import AttemptSpec
from everstep.store import checkpoint as committed
from everstep.trainer import rng, sharding
from everstep.trainer.evaluation import Probe
from everstep.trainer.failure import describe
from everstep.trainer.fitting import Fit
from everstep.trainer.order import Order
from everstep.trainer.program import Program, ProgramError
from everstep.trainer.reading import Part, Reading
from everstep.trainer.vitals import Vitals

_RANK = 0x72616E6B


@dataclass(frozen=True)
class Start:
    """Where training begins: optimizer steps done, samples consumed, epoch, and whether the program was done there."""

    step: int = 0
    samples: int = 0
    epoch: int = 0
    finished: int = 0


def seed_rank(spec: AttemptSpec, step: int) -> None:
    """From here on the ranks draw different numbers. `step` keeps a changed number of ranks from repeating them."""
    rng.seed_all(rng.mix(_RANK, spec.seed, spec.rank, step))


def from_checkpoint(
    spec: AttemptSpec,
    program: Program,
    probe: Probe,
    environment: Mapping[str, Any],
    vitals: Vitals,
    order: Order | None,
) -> Start:
    """Load the checkpoint that the spec names. Raises Damaged, ProbeMismatch, or ProgramError.

    The probe runs as soon as the model is there, before anything that its forward pass could disturb is loaded; the
    random state is put back last.
    """
    folder = Path(spec.restore or "")
    manifest = committed.opened(folder)
    _check_identity(spec, folder, manifest)
    if program.loader is not None and manifest.world_size != spec.world_size:
        raise ProgramError("loader: a program with its own loader cannot change the number of ranks in a run.")
    reading = Reading(folder, manifest, spec.threads, vitals.moved)
    shared, own = _parts(spec, reading, program)
    start = _start(folder, manifest, shared, order)
    _load_model(folder, program, shared, own)
    if spec.check_probe:
        mine = own or shared
        probe.check(mine.probe, folder.name, exactly=mine.environment == dict(environment))
    _load_helpers(folder, program, shared, own)
    if own is None:
        seed_rank(spec, start.step)
    else:
        rng.restore(own.state["rng"])
    return start


def _check_identity(spec: AttemptSpec, folder: Path, manifest: Manifest) -> None:
    for name, is_, should in (
        ("job", manifest.job, spec.name),
        ("run", manifest.run, spec.run),
        ("step", manifest.step, spec.resumed_from),
    ):
        if is_ != should:
            raise Damaged(folder.name, MANIFEST, f"says {name} {is_}, which is not {should}")
    if spec.dataset_fingerprint and manifest.dataset_fingerprint not in ("", spec.dataset_fingerprint):
        raise Damaged(folder.name, MANIFEST, "was trained on another data set")


def _parts(spec: AttemptSpec, reading: Reading, program: Program) -> tuple[Part, Part | None]:
    """Rank 0's part, with what is sharded as this program shards it, and this rank's own part; None as own part where
    the number of ranks was another one.
    """
    shared = reading.part(0)
    same = reading.manifest.world_size == spec.world_size
    own = reading.part(spec.rank) if same and spec.rank > 0 else None
    fitted = replace(shared, state=_fitted(reading, shared.state, program))
    if spec.rank == 0:
        reading.check_rest(range(1, spec.world_size) if same else ())
    return fitted, own or (fitted if same else None)


def _fitted(reading: Reading, state: dict[str, Any], program: Program) -> dict[str, Any]:
    """Before anything is loaded: missing and overlapping parts of sharded tensors are found here."""
    mesh = sharding.mesh_of(program.model)
    if mesh is None and not reading.sharded:
        return state
    fit = Fit(reading.want, mesh)
    here = {"model": program.model, "scheduler": program.scheduler, "scaler": program.scaler}
    living = {name: one.state_dict() for name, one in here.items() if one is not None and name in state}
    living["state"] = {name: one.state_dict() for name, one in program.state.items()}
    fitted = {name: fit.fit(one, living.get(name)) for name, one in state.items() if name != "optimizer"}
    if "optimizer" in state:
        fitted["optimizer"] = fit.optimizer(state["optimizer"], program.optimizer)
    reading.fill()
    return fitted


def _start(folder: Path, manifest: Manifest, shared: Part, order: Order | None) -> Start:
    start = Start(**shared.progress)
    expected = (manifest.step, manifest.samples)
    if (start.step, start.samples) != expected or start.epoch < 0:
        raise Damaged(folder.name, "rank-0.json", f"says {start}, but the manifest says step and samples {expected}")
    if order is not None and start.epoch != order.epoch_of(start.samples):
        why = f"says epoch {start.epoch}, but {start.samples} samples are in epoch {order.epoch_of(start.samples)}"
        raise Damaged(folder.name, "rank-0.json", why)
    return start


def _load_model(folder: Path, program: Program, shared: Part, own: Part | None) -> None:
    state: Any = OrderedDict(_member(folder, shared, "model"))
    state._metadata = getattr(program.model.state_dict(), "_metadata", None)  # noqa: SLF001 - versions of modules
    try:
        program.model.load_state_dict(state)
    except RuntimeError as error:
        raise ProgramError(f"model: does not take the state of {folder.name}: {describe(error)}.") from error
    if own is not None and own is not shared:
        with torch.no_grad():
            here = dict(program.model.named_buffers(remove_duplicate=False))
            for name, value in _member(folder, own, "buffers").items():
                here[name].copy_(value)


def _load_helpers(folder: Path, program: Program, shared: Part, own: Part | None) -> None:
    program.optimizer.load_state_dict(_member(folder, shared, "optimizer"))
    for name, helper in (("scheduler", program.scheduler), ("scaler", program.scaler)):
        if helper is not None:
            helper.load_state_dict(_member(folder, shared, name))
    kept = shared.state.get("state", {})
    if set(kept) != set(program.state):
        was, now = ", ".join(sorted(kept)) or "nothing", ", ".join(sorted(program.state)) or "nothing"
        raise ProgramError(f"state: names {now}, but {folder.name} holds {was}; put the program back.")
    for name, one in program.state.items():
        one.load_state_dict(kept[name])
    if program.loader is not None:
        program.loader.load_state_dict(_member(folder, own or shared, "loader"))


def _member(folder: Path, part: Part, name: str) -> Any:
    if name not in part.state:
        raise ProgramError(f"{name}: {folder.name} was saved by a program without it; put the program back.")
    return part.state[name]
