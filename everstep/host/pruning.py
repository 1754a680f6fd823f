"""What people ask of retention: what stays on each tier and why, what goes, and what is to stay for good.

`python -m everstep.host.pruning <run_dir>` shows it, and changes nothing. With `--apply` what may go is removed now; a
run that is being trained does that by itself. `--pin STEP` and `--unpin STEP` say what is kept whatever the policy says.
"""

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from everstep.core.checkpoint import Key, State, candidates
from everstep.core.errors import AlreadyOwned, EverstepError
from everstep.core.job import CheckpointPolicy
from everstep.core.ledger import Event
from everstep.core.words import size
from everstep.host import retention, runs
from everstep.store import checkpoint, jsonl, marks
from everstep.store.layout import RunPlaces


class Line(NamedTuple):
    """One checkpoint on one tier: whether it stays, and why."""

    tier: str
    checkpoint: str
    bytes: int
    stays: bool
    why: str


def explain(places: RunPlaces, policy: CheckpointPolicy) -> list[Line]:
    """What a policy keeps and removes on every tier of a run, oldest first. Changes nothing.

    What this run did not write is listed, too: it is left alone.
    """
    resumed = {number: claim.resumed_from for number, claim in runs.claims(places).items()}
    fates = retention.plan(places, policy, resumed, set())
    if places.object:
        fates += [("object", fate) for fate in retention.plan_far(places, policy, resumed)]
    lines = [Line(tier, fate.key.folder, fate.bytes, fate.keeps, fate.why) for tier, fate in fates]
    judged = {(line.tier, line.checkpoint) for line in lines}
    for tier in retention.TIERS:
        lines += [
            Line(tier, name, 0, stays=True, why="not known to be this run's: it is left alone")
            for name in _names(places.checkpoints(tier))
            if (tier, name) not in judged
        ]
    order = list(places.tiers)
    return sorted(lines, key=lambda line: (order.index(line.tier), line.checkpoint))


def policy_of(places: RunPlaces) -> CheckpointPolicy | None:
    """The policy that the run's newest flow run was asked for; None if that is not known any more."""
    try:
        asked = json.loads((places.persistent / "job.json").read_bytes())
        return CheckpointPolicy.model_validate(asked["job"].get("checkpoint", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def apply(places: RunPlaces) -> list[retention.Removed]:
    """Remove what the run's own policy lets go on the local and the persistent tier.

    Raises AlreadyOwned for a run that is being trained, ValueError where its policy is not known, OSError for what a
    disk refuses, when all else has been removed.
    """
    policy = policy_of(places)
    if policy is None:
        raise ValueError(f"{places.persistent}: job.json cannot be read, so what it keeps is not known; nothing goes.")
    with runs.alone(places) as alone:
        if not alone:
            raise AlreadyOwned(f"{places.persistent}: the run is being trained, and removes what may go by itself.")
        resumed = {number: claim.resumed_from for number, claim in runs.claims(places).items()}
        swept = retention.apply(places, policy, resumed, set())
    for one in swept.removed:
        key = Key.parse(one.folder)
        step = key.step if key else None
        _note(places, "checkpoint.removed", step, one.why, checkpoint=one.folder, tier=one.tier, bytes=one.bytes)
    if swept.failures:
        raise swept.failures[0]
    return list(swept.removed)


def pin(places: RunPlaces, step: int) -> str:
    """Keep the checkpoint of a step on every tier, whatever the policy says; its name. Raises ValueError without one."""
    resumed = {number: claim.resumed_from for number, claim in runs.claims(places).items()}
    known = marks.states(places)
    there = candidates(
        (
            key
            for tier in places.tiers
            for key in checkpoint.find(places.checkpoints(tier))[0]
            if State.quarantined not in known.get((key.folder, tier), set())
        ),
        resumed,
    )
    chosen = next((key for key in there if key.step == step), None)
    if chosen is None:
        steps = ", ".join(str(key.step) for key in reversed(there)) or "none"
        raise ValueError(f"step: there is no checkpoint of step {step} to keep; there are: {steps}.")
    marks.pin(places, chosen.folder)
    _note(places, "checkpoint.pinned", step, "kept whatever the policy says", checkpoint=chosen.folder)
    return chosen.folder


def unpin(places: RunPlaces, step: int) -> list[str]:
    """Leave the checkpoint of a step to the policy again; its names. Raises ValueError if it was not pinned."""
    pinned = sorted(key for folder in marks.pinned(places) if (key := Key.parse(folder)))
    chosen = [key for key in pinned if key.step == step]
    if not chosen:
        steps = ", ".join(str(key.step) for key in pinned) or "none"
        raise ValueError(f"step: no checkpoint of step {step} is pinned; pinned are: {steps}.")
    for key in chosen:
        marks.unpin(places, key.folder)
        _note(places, "checkpoint.unpinned", step, "left to the policy again", checkpoint=key.folder)
    return [key.folder for key in chosen]


def table(lines: Sequence[Line]) -> str:
    """The lines as text, and what goes in all."""
    rows = [("tier", "checkpoint", "size", "", "why")]
    rows += [(one.tier, one.checkpoint, size(one.bytes), "stays" if one.stays else "goes", one.why) for one in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    text = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows]
    going = [one for one in lines if not one.stays]
    freed = size(sum(one.bytes for one in going)) or "0 B"
    return "\n".join([*text, "", f"{len(going)} of {len(lines)} may go, which frees {freed}."])


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith(".removing-"))
    except FileNotFoundError:
        return []


def _note(places: RunPlaces, kind: str, step: int | None, text: str, **data: str | int) -> None:
    """An event in the run's journal; its next flow run brings it to the ledger."""
    event = Event(
        id=uuid.uuid4().hex,
        time=time.time(),
        kind=kind,
        job=places.persistent.parent.name,
        run=places.persistent.name,
        step=step,
        text=text,
        data=dict(data),
    )
    jsonl.append(places.events, [event.model_dump_json()], sync=True)


def main(arguments: Sequence[str]) -> int:
    """The command; see the module."""
    from everstep.host.browse import open_run

    parser = argparse.ArgumentParser(
        prog="python -m everstep.host.pruning", description="What retention keeps, and why."
    )
    parser.add_argument("run_dir", help="the run_dir of a result")
    parser.add_argument("--apply", action="store_true", help="remove what may go")
    parser.add_argument("--pin", type=int, metavar="STEP", help="keep the checkpoint of this step for good")
    parser.add_argument("--unpin", type=int, metavar="STEP", help="leave it to the policy again")
    asked = parser.parse_args(arguments)
    try:
        places = open_run(asked.run_dir).places
        if asked.unpin is not None:
            unpin(places, asked.unpin)
        if asked.pin is not None:
            pin(places, asked.pin)
        removed = apply(places) if asked.apply else []
        policy = policy_of(places)
        if policy is None:
            sys.stderr.write("The run's own policy is not known any more; this is what the default would do.\n")
        told = table(explain(places, policy or CheckpointPolicy()))
    except (ValueError, EverstepError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2 if isinstance(error, ValueError) else 1
    if asked.apply:
        told += f"\n{len(removed)} removed, {size(sum(one.bytes for one in removed)) or '0 B'} freed."
    sys.stdout.write(told + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
