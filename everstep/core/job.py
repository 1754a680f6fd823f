"""The training job: one definition for the YAML file, the notebook object and the form in the Prefect UI."""

import difflib
import hashlib
import json
import math
import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, field_validator, model_validator

from everstep.core import place
from everstep.core.health_settings import HealthSettings
from everstep.core.place import S3Settings
from everstep.core.record import Record

NAME = r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$"


def _not_a_switch(value: object) -> object:
    """YAML reads `yes` and `on` as true, which would pass as 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not yes or no")
    return value


Steps = Annotated[int, BeforeValidator(_not_a_switch), Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DataGate(Record):
    """What the data must be before a run trains on it. Great Expectations judges; these are its defaults' bounds."""

    suite: str | None = Field(None, description="A Great Expectations suite as JSON, in place of the defaults.")
    sample_rows: int = Field(10_000, ge=1, description="Rows that are read for the checks of columns and values.")
    min_files: int = Field(1, ge=1, description="Files at least.")
    max_files: int | None = Field(None, ge=1, description="Files at most.")
    min_bytes: int = Field(1, ge=1, description="Bytes at least, all files together.")
    max_bytes: int | None = Field(None, ge=1, description="Bytes at most, all files together.")
    duplicates: bool = Field(False, description="Two files may hold the same content.")
    columns: dict[str, str] = Field({}, description="Columns or tensors that must be there, with their dtypes.")


class DataSource(Record):
    """Where the data set is: a directory or s3://bucket/prefix."""

    source: str = Field(min_length=1, description="A directory or s3://bucket/prefix with the data set.")
    gate: DataGate = DataGate()

    _is_place = field_validator("source")(place.check)

    def resolve(self, base: Path) -> Self:
        suite = self.gate.suite and _under(base, self.gate.suite)
        gate = self.gate.model_copy(update={"suite": suite})
        return self.model_copy(update={"source": _under(base, self.source), "gate": gate})


class Best(Record):
    """Which checkpoint is the best one."""

    metric: str = Field(min_length=1, description="A metric that the program's evaluate() returns.")
    mode: Literal["min", "max"] = "min"


class Budget(Record):
    """Space for a run's checkpoints on each tier, in GB of 10^9 bytes; no limit where nothing is given."""

    local: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    persistent: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    object: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class CheckpointPolicy(Record):
    """How often to save, and what to keep on each tier."""

    every: Literal["auto"] | None = Field(
        None, description="auto: as often as costs least, by what saves and failures cost. This holds if none is given."
    )
    every_steps: Steps | None = Field(None, description="Save after each so many optimizer steps.")
    every_minutes: Seconds | None = Field(None, description="Save after so many minutes of training.")
    keep: int = Field(3, ge=1, description="Newest verified checkpoints kept on each tier.")
    keep_every_steps: Steps | None = Field(
        None, description="Also keep the first checkpoint at or after each multiple of so many optimizer steps."
    )
    best: Best | None = Field(None, description="Which checkpoint counts as best; the newest if not given.")
    budget_gb: Budget = Field(
        Budget(),
        title="Budget",
        description="Space for checkpoints on each tier; what is protected stays all the same.",
    )

    @model_validator(mode="after")
    def _one_rhythm(self) -> Self:
        given = [name for name in ("every", "every_steps", "every_minutes") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"has both {given[0]} and {given[1]}; give one of them")
        return self

    @property
    def is_auto(self) -> bool:
        """Whether the rhythm of saves follows from what they cost."""
        return not (self.every_steps or self.every_minutes)


class Tiers(Record):
    """The places of a run's bytes: fast and near, then persistent, then the object store. Or a block that names them."""

    local: str = Field(".everstep/nvme", description="Fast local directory (NVMe); it may vanish.")
    persistent: str = Field(".everstep/persistent", description="Directory that survives the machine; holds the run.")
    object: str | None = Field(
        None, description="s3://bucket/prefix or a directory: takes every kept checkpoint, the newest first."
    )
    object_required: bool = Field(
        True, description="A run is complete only when the object tier has its last checkpoint."
    )
    budget_gb: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Space for staged data sets on the local tier; the one least recently used goes first."
    )
    block: str | None = Field(None, description="A StorageTiers block, in place of the other fields.")

    @model_validator(mode="before")
    @classmethod
    def _name_of_a_block(cls, value: JsonValue) -> JsonValue:
        return {"block": value} if isinstance(value, str) else value

    @field_validator("local", "persistent")
    @classmethod
    def _is_directory(cls, where: str) -> str:
        if "://" in where:
            raise ValueError("is a URL; name a folder or a mount")
        return where

    @field_validator("object")
    @classmethod
    def _is_place(cls, where: str | None) -> str | None:
        return None if where is None else place.check(where)

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.local == self.persistent:
            raise ValueError("has the same folder as local and persistent; a copy needs a second place")
        if self.block and self != type(self).model_construct(block=self.block):  # a form sends the defaults too
            raise ValueError("has a block and places of its own; give one of them")
        return self

    def resolve(self, base: Path) -> Self:
        if self.block:
            return self
        places = {"local": self.local, "persistent": self.persistent, "object": self.object}
        return self.model_copy(update={name: _under(base, where) for name, where in places.items() if where})


class Tracking(Record):
    """The MLflow server or database in which people browse runs. Or a block that names it."""

    uri: str = Field("sqlite:///.everstep/mlflow.db", description="MLflow tracking URI.")
    block: str | None = Field(None, description="A Tracking block, in place of the URI.")

    @model_validator(mode="before")
    @classmethod
    def _name_of_a_block(cls, value: object) -> object:
        return {"block": value} if isinstance(value, str) else value


class Price(Record):
    """What a GPU (without one: a rank) costs."""

    per_gpu_hour: float = Field(gt=0, allow_inf_nan=False)
    currency: str = Field("USD", pattern="^[A-Z]{3}$")


class LedgerPlace(Record):
    """The database of events."""

    uri: str | None = Field(None, description="SQLAlchemy URL; a SQLite file on the persistent tier if not given.")


class Retries(Record):
    """How often a run may restart by itself."""

    per_job: int = Field(1000, ge=0, description="Restarts in the life of a run.")
    per_cause: int = Field(5, ge=0, description="Restarts for one cause without a newly committed step in between.")


class Limits(Record):
    """How long each phase may show no progress before it counts as a hang, in seconds."""

    start: Seconds = 600.0
    restore: Seconds = 900.0
    compile: Seconds = 1800.0
    save: Seconds = 1800.0
    eval: Seconds = 3600.0
    wait: Seconds = 3600.0
    gate: Seconds = Field(300.0, description="The checks of the data; without a verdict by then nothing is trained.")
    drain: Seconds = Field(600.0, description="Bringing the last checkpoints out at the end of a flow run.")
    train_floor: Seconds = Field(120.0, description="A step is never called hung before this.")
    train_factor: float = Field(10.0, ge=2, description="Times the slowest recent step.")


class TrainJob(Record):
    """A training job."""

    name: str = Field(description="Name of the job and of the MLflow experiment: a-z, 0-9 and dashes.")
    program: str = Field(description="The training program: package.module:build or path/to/file.py:build.")
    config: dict[str, JsonValue] = Field({}, description="Handed to build() as it is.")
    data: DataSource
    steps: Steps = Field(description="Optimizer steps of the whole run.")
    segment_steps: Steps | None = Field(None, description="Optimizer steps in a segment.")
    segment_minutes: Seconds | None = Field(None, description="Minutes in a segment, in place of segment_steps.")
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    evaluate_every_steps: Steps | None = Field(None, description="Evaluate so often; at segment ends if not given.")
    ranks: int = Field(1, ge=1, le=1024, description="Processes on each node.")
    nodes: int = Field(1, ge=1, le=1, description="Nodes; this version trains on one.")
    threads: Annotated[int, Field(ge=1)] | None = Field(None, description="CPU threads of each rank.")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = Field(0, ge=0, lt=2**63)
    tiers: Tiers = Tiers()
    s3: S3Settings = S3Settings()
    tracking: Tracking = Tracking()
    ledger: LedgerPlace = LedgerPlace()
    retries: Retries = Retries()
    limits: Limits = Limits()
    health: HealthSettings = HealthSettings()
    grace_seconds: float = Field(
        25.0, gt=0, le=27, description="Time to save after a stop signal (a worker kills at 30)."
    )
    env: tuple[str, ...] = Field((), description="Environment variables handed to the program besides the usual ones.")
    standby: bool = Field(True, description="Keep warm spare processes so that a restart need not import torch again.")
    release: bool = Field(False, description="Make the best checkpoint the production model at the end.")
    price: Price | None = Field(None, title="Price", description="For the money in the report.")
    fresh: bool = Field(False, description="Start a new run even where one is unfinished.")

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(NAME, name):
            raise ValueError("must be 1 to 63 characters of a-z, 0-9 and dashes, and not begin or end with a dash")
        return name

    @field_validator("config")
    @classmethod
    def _is_finite(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """It travels to build() and into run.json as JSON, which would turn these into null."""
        where = next(_not_finite(config), None)
        if where is not None:
            raise ValueError(f"{where} is not a finite number; write it as text and let build() read it")
        return config

    @field_validator("program")
    @classmethod
    def _names_a_callable(cls, program: str) -> str:
        file, colon, attribute = program.rpartition(":")
        if not colon or not file or not attribute.isidentifier():
            raise ValueError("must name a callable as package.module:build or path/to/file.py:build")
        if not file.endswith(".py") and not all(part.isidentifier() for part in file.split(".")):
            raise ValueError("must name a callable as package.module:build or path/to/file.py:build")
        return program

    @model_validator(mode="after")
    def _one_segment_length(self) -> Self:
        if self.segment_steps and self.segment_minutes:
            raise ValueError("has both segment_steps and segment_minutes; give one of them")
        return self

    def resolve(self, base: Path) -> Self:
        """The same job with every relative path taken from `base` (the job file's folder)."""
        tiers = self.tiers
        file, _, attribute = self.program.rpartition(":")
        program = f"{_under(base, file)}:{attribute}" if file.endswith(".py") else self.program
        policy = _under(base, self.health.policy) if self.health.policy else None
        return self.model_copy(
            update={
                "program": program,
                "data": self.data.resolve(base),
                "tiers": tiers.resolve(base),
                "tracking": self.tracking.model_copy(update={"uri": _sqlite_under(base, self.tracking.uri)}),
                "ledger": LedgerPlace(uri=_sqlite_under(base, self.ledger.uri) if self.ledger.uri else None),
                "health": self.health.model_copy(update={"policy": policy}),
            }
        )

    def fingerprint(self, dataset: str) -> str:
        """What makes a run the same run: program, config, data set and seed, as 64 hex digits.

        `dataset` is the data set's own fingerprint. The batch size belongs to it too, but only build() knows it: it is
        kept in the run's structure and compared there.
        """
        parts = {
            "program": _program_identity(self.program),
            "config": self.config,
            "dataset": dataset,
            "seed": self.seed,
        }
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=True)
        return hashlib.sha256(text.encode()).hexdigest()


def explain(error: ValidationError, source: str) -> str:
    """One plain sentence for the first thing that is wrong with a job: field, value, remedy.

    A field that a job does not have comes first: the one that is missing may be the one that was meant.
    """
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{source}: {field} is not a field of a job; {_nearest(first['loc'])}"
    if first["type"] == "missing":
        return f"{source}: {field} is missing; every job needs it."
    message = _plain(first["type"], first["msg"])
    if not field:
        return f"{source}: the job {message}."
    shown = re.sub(r"//[^/@]*@", "//...@", repr(first["input"]))  # a password in a URL is not repeated
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    if isinstance(first["input"], dict):
        return f"{source}: {field}: {message}."
    return f"{source}: {field}: {shown}: {message}."


def _plain(kind: str, message: str) -> str:
    """Pydantic's words as one who writes a job file would say them."""
    words = {
        "model_type": "must be a group of fields",
        "dict_type": "must be a group of fields",
        "tuple_type": "must be a list",
    }
    if kind in words:
        return words[kind]
    message = message.removeprefix("Value error, ").rstrip(".").replace("Input should be", "must be")
    return message[0].lower() + message[1:]


def _nearest(location: tuple[int | str, ...]) -> str:
    model: type[Record] = TrainJob
    for part in location[:-1]:
        inner = model.model_fields.get(str(part))
        if inner is None or not isinstance(inner.annotation, type) or not issubclass(inner.annotation, Record):
            return "remove it."
        model = inner.annotation
    close = difflib.get_close_matches(str(location[-1]), model.model_fields, n=1)
    return f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(model.model_fields))}."


def _not_finite(value: JsonValue, at: str = "") -> Iterator[str]:
    """Where in a configuration NaN or infinity stands, as dotted keys."""
    if isinstance(value, float) and not math.isfinite(value):
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from _not_finite(one, f"{at}.{key}" if at else str(key))


def _under(base: Path, where: str) -> str:
    return where if place.is_object(where) else os.path.normpath(base / Path(where).expanduser())


def _sqlite_under(base: Path, uri: str) -> str:
    """SQLite URLs hold a path: three slashes for a relative one, four for an absolute one."""
    scheme, slashes, rest = uri.partition(":///")
    if not slashes or not scheme.startswith("sqlite") or rest.startswith("/") or rest in ("", ":memory:"):
        return uri
    return f"{scheme}:///{_under(base, rest)}"


def _program_identity(program: str) -> str:
    """A file program is the same program on another machine: its folder does not count."""
    file, _, attribute = program.rpartition(":")
    return f"{Path(file).name}:{attribute}" if file.endswith(".py") else program
