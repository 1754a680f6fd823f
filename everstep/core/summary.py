"""A run's report as one record: what `report.json` holds, and all that the page, the text and the artifact are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, JsonValue

from everstep.core.cadence import Cadence
from everstep.core.checkpoint import Structure
from everstep.core.chronicle import Chronicle
from everstep.core.curve import Curve
from everstep.core.job import Price
from everstep.core.record import Record, Versioned
from everstep.core.retention import Freed


class Spent(Record):
    """Where the time went, in seconds by bucket; the buckets add up to `wall`."""

    wall: float = 0.0
    ettr: float = 0.0
    buckets: dict[str, float] = {}


class TimeMap(Record):
    """The time line in columns of equal length; each says which part of it belongs to which bucket."""

    begin: float = 0.0
    seconds: float = Field(0.0, description="Length of a column.")
    columns: tuple[dict[str, float], ...] = ()


class AttemptLine(Record):
    """An attempt, and what its end cost: seconds in all, and of these until it was noticed; steps trained in vain."""

    attempt: int
    began: float
    host: str
    resumed_from: int
    step: int | None
    outcome: str
    cause: str
    decision: str
    detect_seconds: float = 0.0
    lost_work_seconds: float = 0.0
    cost_seconds: float = 0.0
    lost_steps: int = 0
    money: float | None = None


class CauseLine(Record):
    """A cause of restarts: how often, and what those restarts cost in seconds."""

    text: str
    times: int
    cost_seconds: float


class CheckpointLine(Record):
    """A checkpoint that stands, or one that was set aside, with its state on each tier."""

    folder: str
    step: int
    attempt: int
    bytes: int
    saved: float | None
    tiers: dict[str, str] = Field(description="State by tier: saved, verified, durable, quarantined, torn, gone.")
    promoted: bool = False
    abandoned: bool = False
    reason: str = ""


class Rhythm(Record):
    """How often the run saves. `chosen` is the newest choice where it chooses itself; `choices` counts them."""

    text: str = Field(description="In a sentence.")
    chosen: Cadence | None = None
    choices: int = 0


class Happened(Record):
    """Something that happened to a checkpoint at a moment: saved, verified, durable, quarantined, removed, promoted."""

    time: float
    step: int
    what: str
    tier: str = ""


class GateLine(Record):
    """The answer of a gate. `passed` is None where it could not tell."""

    gate: str
    time: float
    step: int | None
    passed: bool | None
    text: str
    link: str = ""


class Cost(Record):
    """What the run held and what that cost. `hours` are GPU-hours, or rank-hours where no GPU was used."""

    ranks: int = 1
    gpus: bool = False
    charged_seconds: float = Field(0.0, description="The wall time without queued and idle.")
    hours: float = 0.0
    restart_hours: float = 0.0
    per_hour: float | None = None
    currency: str = ""
    total: float | None = None
    restarts: float | None = Field(None, description="What restarts cost, of the total.")


class Notice(Record):
    """An event of medium severity or worse."""

    time: float
    severity: str
    kind: str
    text: str


class RunReport(Versioned):
    """`report.json`: a run in one record. Times are Unix seconds, UTC; numbers that are not finite rest as text."""

    made: float = Field(description="When this report was made.")
    name: str
    run: str
    status: str = Field(description="completed, stopped, failed, running, or killed: its flow vanished.")
    headline: tuple[str, ...] = Field(description="What happened, in sentences.")
    step: int = Field(description="The last step that counts.")
    steps: int | None = Field(None, description="Steps that the job asks for.")
    began: float | None = None
    last_sign: float | None = None
    metrics: dict[str, float | str] = Field({}, description="The newest evaluation that counts.")
    last_loss: float | str | None = None
    samples_per_second: float | None = None
    loss: Curve = Field(Curve(), description="Loss by step.")
    speed: Curve = Field(Curve(), description="Samples a second by seconds since the beginning.")
    evaluations: dict[str, Curve] = {}
    time: Spent
    time_map: TimeMap
    attempts: tuple[AttemptLine, ...] = ()
    attempts_in_all: int = 0
    restarts: int = 0
    causes: tuple[CauseLine, ...] = Field((), description="Why attempts failed, the most frequent first.")
    checkpoints: tuple[CheckpointLine, ...] = ()
    checkpoints_in_all: int = 0
    checkpoint_counts: dict[str, int] = Field(
        {}, description="How many were ever saved, durable, quarantined, removed."
    )
    checkpoint_marks: tuple[Happened, ...] = ()
    cadence: Rhythm | None = Field(None, description="How often it saves, and why so often.")
    freed: dict[str, Freed] = Field({}, description="What retention has removed, by tier.")
    gates: tuple[GateLine, ...] = ()
    promotion: dict[str, JsonValue] = {}
    promotion_events: tuple[Notice, ...] = ()
    cost: Cost
    notices: tuple[Notice, ...] = ()
    notices_in_all: int = 0
    identity: dict[str, str] = Field({}, description="Program, fingerprints, code version, seed.")
    environment: dict[str, str] = {}
    job: dict[str, JsonValue] | None = Field(None, description="The job as it was run, without secrets.")
    places: dict[str, str] = Field({}, description="Run directory, newest durable checkpoint, MLflow, and the like.")


@dataclass(frozen=True)
class Curves:
    """The curves of a run, read from its metrics. `whole` is False where only samples of a very long log were read."""

    loss: Curve = field(default_factory=Curve)
    speed: Curve = field(default_factory=Curve)
    evaluations: Mapping[str, Curve] = field(default_factory=dict)
    last_loss: float | None = None
    began: float | None = None
    whole: bool = True


@dataclass(frozen=True)
class Facts:
    """All that a report is made from. `final` is the JSON line of a run that has ended."""

    chronicle: Chronicle
    made: float
    curves: Curves = field(default_factory=Curves)
    final: Mapping[str, Any] = field(default_factory=dict)
    status: str = ""
    job: Mapping[str, Any] | None = None
    price: Price | None = None
    structure: Structure | None = None
    gpus: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
