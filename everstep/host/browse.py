"""Look at a run in its directory, while it trains or long after: `open_run(path)`. Only pins change anything there."""

import json
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from everstep.core import listing
from everstep.core.checkpoint import Key, Manifest
from everstep.core.chronicle import Chronicle, Row
from everstep.core.errors import Damaged, EverstepError
from everstep.core.job import CheckpointPolicy
from everstep.core.ledger import Event
from everstep.host import history, pruning, runs
from everstep.report import text
from everstep.report.listing import CheckpointTable
from everstep.store import checkpoint, marks
from everstep.store.layout import RunPlaces

LISTED = 12
SCRUBS = "scrub.jsonl"


def open_run(path: str | Path) -> "RunView":
    """The run in a run directory, `<persistent>/<name>/<run>`, as its files tell it now.

    Also takes the folder of a job, `<persistent>/<name>`, for its newest run. Raises ValueError for another folder.
    """
    folder = Path(path).expanduser().absolute()
    if not (folder / "run.json").is_file():
        known = runs.runs(folder) if folder.is_dir() else []
        if not known:
            raise ValueError(f"{path}: there is no run here; give the run_dir of a result, or its parent folder.")
        folder = folder / known[-1].run
    return RunView(places_of(folder))


class RunView:
    """What is known of a run, read when the view was opened; open the run again for news."""

    def __init__(self, places: RunPlaces) -> None:
        self.places = places
        self.run_dir = places.persistent
        self.chronicle: Chronicle = history.read(places)
        self.result: dict[str, Any] | None = runs.final_line(places)

    @property
    def name(self) -> str:
        """The job's name."""
        return self.run_dir.parent.name

    @property
    def run(self) -> str:
        """The run's own name."""
        return self.run_dir.name

    @property
    def status(self) -> str:
        """`running`, or how the last flow run ended: `completed`, `stopped`, `failed`."""
        return self.chronicle.status

    @property
    def step(self) -> int:
        """The newest step that counts, whether it is committed yet or not."""
        return self.chronicle.newest.step if self.chronicle.newest else 0

    def checkpoints(self) -> CheckpointTable:
        """Every checkpoint, newest first: its state on each tier, size, age, metric, and why it is kept or set aside.

        Prints well, shows well in a notebook, and is a sequence of records; `.frame` is a pandas data frame.
        """
        return self._checkpoints(None)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Everything that happened, oldest first; what scrubs found, too."""
        scrubbed = history.events(self.places, SCRUBS)
        return tuple(sorted((*self.chronicle.events, *scrubbed), key=lambda event: event.time))

    @cached_property
    def metrics(self) -> Any:
        """The steps that count as a pandas data frame by step: time, loss, and whatever else was recorded."""
        return _frame([{"step": row.step, "time": row.time, **row.figures} for row in self._rows])

    @cached_property
    def evaluations(self) -> Any:
        """What evaluate() gave, as a pandas data frame by step."""
        return _frame([{"step": row.step, **row.evaluation} for row in self._rows if row.evaluation])

    def retention(self) -> Any:
        """What the run's policy keeps on each tier and what it removes, with the reason, as a pandas data frame.

        The files are looked at now, and nothing is changed. Where the policy is not known any more, the default counts.
        """
        lines = pruning.explain(self.places, pruning.policy_of(self.places) or CheckpointPolicy())
        return _frame([line._asdict() for line in lines], index="checkpoint")

    def pin(self, step: int) -> str:
        """Keep the checkpoint of a step on every tier, whatever the policy says; its name.

        A run that is being trained heeds it, too. Raises ValueError if there is no such checkpoint.
        """
        return pruning.pin(self.places, step)

    def unpin(self, step: int) -> list[str]:
        """Leave the checkpoint of a step to the policy again; its names. Raises ValueError if it was not pinned."""
        return pruning.unpin(self.places, step)

    @cached_property
    def _rows(self) -> list[Row]:
        return history.rows(self.places)

    @cached_property
    def report(self) -> str:
        """The page that `report.txt` holds at a flow run's end, as of now."""
        final = self.result if self.status != "running" else None
        return text.render(self.chronicle, final)

    def __repr__(self) -> str:
        return f"<run {self.name}/{self.run}: {self.status} at step {self.step}>"

    def _repr_html_(self) -> str:
        """A small table for notebooks: the newest checkpoints."""
        return self._checkpoints(LISTED)._repr_html_()

    def _checkpoints(self, most: int | None) -> CheckpointTable:
        places, held = self.places, self.chronicle.checkpoints
        newest = set(sorted({one.key for one in held}, reverse=True)[:most])
        held = tuple(one for one in held if one.key in newest)
        policy = pruning.policy_of(places)
        manifests = {key: found for key in newest if (found := _manifest(places, key))}
        kept: dict[tuple[str, str], str] = {}
        if policy:
            with suppress(EverstepError, OSError):  # what cannot be read says nothing of what is kept
                kept = {(line.checkpoint, line.tier): _kept(line) for line in pruning.explain(places, policy)}
        best = policy.best.metric if policy and policy.best else ""
        rows = listing.rows(held, manifests, kept, marks.pinned(places), best)
        figures = ", ".join(f"{key} {value:.4g}" for key, value in sorted(self.chronicle.last_metrics.items()))
        title = f"{self.name} / {self.run}: {self.status} at step {self.step}" + (f", {figures}" if figures else "")
        return CheckpointTable(rows, title)


def _kept(line: pruning.Line) -> str:
    return line.why if line.stays else f"may go: {line.why}"


def _manifest(places: RunPlaces, key: Key) -> Manifest | None:
    """What a checkpoint says of itself, from the nearest tier that holds it; None if none can be read."""
    for tier in places.tiers:
        with suppress(Damaged, OSError):
            return checkpoint.read_manifest(places.checkpoint(tier, key))
    return None


def _frame(rows: list[dict[str, Any]], index: str = "step") -> Any:
    import pandas as pd

    return pd.DataFrame(rows or [{index: None}]).set_index(index)[: len(rows)]


def places_of(folder: Path) -> RunPlaces:
    """The run's places, with the other tiers as its last owner named them."""
    try:
        owner = json.loads((folder / "owner.json").read_bytes())
    except (OSError, ValueError):
        owner = {}
    tiers = owner.get("tiers", {}) if isinstance(owner, dict) else {}
    local, far = tiers.get("local"), tiers.get("object")
    return RunPlaces(folder, Path(local) if local else folder / ".no-local-tier", str(far) if far else None)
