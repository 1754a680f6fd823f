"""Checkpoints: manifest, structure, states, and which one to resume from. Which ones to keep: `core.retention`.

Commit rule: the manifest is written last. A folder without a manifest that verifies is not a checkpoint.
Layout on every tier: `<tier>/<name>/<run>/checkpoints/step-<8 digits>.a<attempt>/`.

States of one checkpoint on one tier, and who sets them:

    saved        the child, by committing the manifest
    verified     whoever read it back (flow or copier): digests, structure and finite values are right
    durable      the copier, when a verified copy stands on a tier that survives the machine
    quarantined  whoever found it damaged: kept with the reason, never chosen
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, JsonValue, field_validator

from everstep.core.dataset import FileEntry
from everstep.core.errors import Damaged
from everstep.core.record import Record, Versioned

NAME = re.compile(r"^step-(\d{8})\.a(\d+)$")
MANIFEST = "manifest.json"


class State(StrEnum):
    """What is known of a checkpoint on a tier; see the module for who sets it."""

    saved = "saved"
    verified = "verified"
    durable = "durable"
    quarantined = "quarantined"


@dataclass(frozen=True, order=True)
class Key:
    """A checkpoint's identity within its run; a newer step is greater, then a newer attempt."""

    step: int
    attempt: int

    @property
    def folder(self) -> str:
        return f"step-{self.step:08d}.a{self.attempt}"

    @classmethod
    def parse(cls, folder: str) -> Self | None:
        """The key in a folder's name, or None if it is no checkpoint's folder."""
        match = NAME.match(folder)
        key = cls(int(match[1]), int(match[2])) if match else None
        return key if key and key.folder == folder else None


class Manifest(Versioned):
    """What a checkpoint consists of. Written last; its presence is the commit.

    `to_json` seals it with a digest of all that it says, so that `parse` finds a flipped bit in the manifest itself.
    The seal is over the fields as they stand in the file: one that a later Everstep adds breaks no older manifest.
    """

    job: str
    run: str
    attempt: int = Field(ge=1)
    step: int = Field(ge=0)
    world_size: int = Field(ge=1)
    parent_step: int = Field(ge=0)
    samples: int = Field(ge=0)
    dataset_fingerprint: str = ""
    code_version: str = ""
    time: float
    metrics: dict[str, float | str] = {}
    files: tuple[FileEntry, ...]
    seal: str = ""

    @field_validator("files")
    @classmethod
    def _each_once(cls, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        paths = [entry.path for entry in files]
        if len(set(paths)) != len(paths) or MANIFEST in paths:
            raise ValueError("files name one path twice, or the manifest itself")
        if any("/" in path for path in paths):
            raise ValueError("files name a path in a folder below")
        return files

    @classmethod
    def parse(cls, text: str | bytes, where: str, path: str) -> Self:
        """As for every versioned record; Damaged also where it does not match its seal, or says something twice."""
        manifest = super().parse(text, where, path)
        try:
            fields = json.loads(text, object_pairs_hook=each_once)
        except ValueError as error:
            raise Damaged(where, path, f"is not a readable {cls.__name__} ({error})") from None
        if manifest.seal != _seal(fields):
            raise Damaged(where, path, "was altered: it does not match its own seal")
        return manifest

    @property
    def key(self) -> Key:
        return Key(self.step, self.attempt)

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.files)

    def to_json(self) -> str:
        plain = type(self).model_validate_json(self.model_dump_json())
        seal = _seal(json.loads(plain.model_dump_json()))
        return plain.model_copy(update={"seal": seal}).model_dump_json(indent=1) + "\n"


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON (`object_pairs_hook`). ValueError where a name stands twice: readers differ in which counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _seal(fields: Mapping[str, Any]) -> str:
    """SHA-256 over every field but the seal, in a canonical form."""
    sealed = {name: value for name, value in fields.items() if name != "seal"}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class TensorShape(Record):
    """Dtype (safetensors' word, e.g. F32) and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


class Structure(Versioned):
    """`structure.json` of a run: what every checkpoint of it must hold. Written once, before the first save.

    `model` has the names, dtypes and shapes of the model's state; `tensors` counts nothing else, because an optimizer
    grows its state with its first step. Batch size and environment are compared on resume.
    """

    batch_size: int
    model: dict[str, TensorShape]
    parameters: tuple[str, ...]
    world_size: int
    threads: int
    torch_version: str
    processor: str


class Verification(Record):
    """The result of an independent read of one checkpoint on one tier."""

    ok: bool
    file: str = ""
    why: str = ""
    bytes: int = 0
    seconds: float = 0.0
    manifest_digest: str = ""


class Mark(Versioned):
    """A state of a checkpoint on a tier, with its reason; rests in `marks/` of the run directory."""

    checkpoint: str
    tier: str
    state: State
    time: float
    reason: str = ""
    manifest_digest: str = ""


class SaveCost(Versioned):
    """What one save cost rank 0; a row of `saves.jsonl` in the run directory. Times in seconds.

    The training thread stood still for `copy` (into the snapshot's buffer), for `wait` (both buffers were still being
    written) and for `fence` (an overlapped copy was not complete when the optimizer was to step). `write` is what the
    writer took from then to the commit, beside the training. `held` are the bytes of all snapshot buffers.
    """

    attempt: int
    step: int
    time: float
    bytes: int = Field(ge=0)
    copy_seconds: float = Field(ge=0)
    wait_seconds: float = Field(ge=0)
    fence_seconds: float = Field(ge=0)
    write_seconds: float = Field(ge=0)
    overlapped: bool = False
    held: int = 0

    @property
    def stall_seconds(self) -> float:
        """All that the training thread stood still for."""
        return self.copy_seconds + self.wait_seconds + self.fence_seconds


class AttemptClaim(Versioned):
    """`attempts/<n>.json` on the persistent tier, made by exclusive create: the fencing token of a run."""

    attempt: int = Field(ge=1)
    resumed_from: int = Field(ge=0, description="Step of the checkpoint it resumed from; 0 for a new start.")
    checkpoint: str = ""
    host: str
    pid: int
    boot: str
    flow_run: str = ""
    time: float


class RunRecord(Versioned):
    """`run.json`: the run's identity, written when it is created."""

    name: str
    run: str
    fingerprint: str
    dataset_fingerprint: str
    created: float
    program: str
    seed: int
    config: dict[str, JsonValue]
    flow_run: str = ""
    threads: int
    code_version: str = ""


def abandoned(key: Key, claims: Mapping[int, int]) -> bool:
    """Whether a later attempt went back behind this checkpoint.

    `claims` maps each claimed attempt to the step it resumed from. A checkpoint beyond the step from which any later
    attempt resumed belongs to a history that was left, however late its copy arrives.
    """
    return any(attempt > key.attempt and resumed < key.step for attempt, resumed in claims.items())


def candidates(keys: Iterable[Key], claims: Mapping[int, int]) -> list[Key]:
    """The checkpoints that may be resumed from, best first: not abandoned, newest step, newest attempt."""
    return sorted((key for key in set(keys) if not abandoned(key, claims)), reverse=True)
