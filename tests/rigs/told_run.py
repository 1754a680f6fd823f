"""Writes the directory of a run that never was: any length, any number of restarts, with what one may not trust in it."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.core.checkpoint import AttemptClaim, Key, Manifest, Mark, RunRecord, State, Structure
from everstep.core.dataset import FileEntry
from everstep.core.ledger import Event
from everstep.core.segment import Phase, PhaseMark
from everstep.store import checkpoint, jsonl, marks
from everstep.store.layout import RunPlaces

BEGAN = 1_790_000_000.0


@dataclass
class ToldRun:
    """A run under `folder`. `step_seconds` is the time of a step, `lost` steps are thrown away at each restart."""

    folder: Path
    steps: int = 900
    restarts: int = 0
    step_seconds: float = 0.1
    every: int = 100
    name: str = "digits"
    program: str = "everstep.programs.digits:build"
    cause: str = "rank 0 was killed by signal 9"
    status: str | None = "completed"
    job: dict[str, Any] = field(default_factory=dict)
    loss: Any = None
    evaluate_every: int = 300
    standing: int = 4
    quarantined: tuple[int, ...] = ()
    quarantine_reason: str = "rank-0.safetensors: does not match its BLAKE3 digest in the manifest"
    now: float = BEGAN
    places: RunPlaces = field(init=False)
    _events: list[str] = field(default_factory=list)
    _phases: list[str] = field(default_factory=list)

    def write(self) -> RunPlaces:
        self.places = RunPlaces.of(
            str(self.folder / "nvme"), str(self.folder / "persistent"), None, "digits", "r001-3f2a90c1"
        )
        for one in ("attempts", "marks", "segments", "checkpoints", "logs"):
            (self.places.persistent / one).mkdir(parents=True)
        self.places.local.mkdir(parents=True)
        self._records()
        self._event("run.created", queued_since=self.now - 2)
        self._event("flow.started", 2)
        self._event("stage.started", 0)
        self._event("stage.finished", 3)
        with self.places.metrics.open("w") as metrics:
            self._train(metrics)
        if self.status:
            self._event("flow.finalizing", 1)
            self._event("flow.ended", 2, step=self.steps, status=self.status)
        jsonl.append(self.places.events, self._events)
        jsonl.append(self.places.phases, self._phases)
        self._stand()
        return self.places

    def _train(self, metrics: Any) -> None:
        resumed = 0
        for attempt in range(1, self.restarts + 2):
            last = self.steps * attempt // (self.restarts + 1)
            committed = last // self.every * self.every
            self._claim(attempt, resumed)
            for phase, seconds in ((Phase.start, 4.0), (Phase.restore, 1.0), (Phase.train, 0.5)):
                self._phase(attempt, phase, resumed, seconds)
            for lines in self._rows(attempt, resumed + 1, last):
                metrics.write(lines)
            if attempt <= self.restarts:
                seen = self.now
                self._event("attempt.noticed", 0.6, attempt, last, text=self.cause)
                told = {"outcome": "failed", "last_seen": seen, "committed_step": committed}
                self._event("attempt.ended", 0.2, attempt, last, text=self.cause, **told)
                self._event("decision.made", 0.1, attempt, last, text=self.cause, next="restart")
                resumed = committed
            elif self.status:
                self._event("attempt.ended", 0.1, attempt, last, outcome="done", committed_step=last)

    def _rows(self, attempt: int, first: int, last: int) -> Iterator[str]:
        for step in range(first, last + 1):
            self.now += self.step_seconds
            loss = self.loss(step) if self.loss else 2.3 * math.exp(-4 * step / self.steps) + 0.05 + step * 37 % 11 / 90
            row: dict[str, Any] = {
                "attempt": attempt,
                "step": step,
                "time": self.now,
                "loss": loss,
                "samples": step * 50,
            }
            if self.evaluate_every and step % self.evaluate_every == 0:
                row["eval"] = {"accuracy": 1 - math.exp(-5 * step / self.steps)}
            yield json.dumps(row) + "\n"
            if step % self.every == 0:
                self._save(attempt, step)

    def _save(self, attempt: int, step: int) -> None:
        key = Key(step, attempt)
        self._phase(attempt, Phase.save, step, 0.0)
        self.now += 0.2
        self._phase(attempt, Phase.train, step, 0.0)
        bad = step in self.quarantined
        for seconds, kind, tier in ((0, "saved", "local"), (0.1, "verified", "local"), (0.2, "durable", "persistent")):
            if not (bad and kind != "saved"):
                self._event(f"checkpoint.{kind}", seconds, attempt, step, checkpoint=key.folder, tier=tier)
        if bad:
            self._event("checkpoint.quarantined", 0.1, attempt, step, checkpoint=key.folder, tier="local")

    def _stand(self) -> None:
        """The newest checkpoints are there, on both tiers; those set aside too."""
        saved = [json.loads(line) for line in self._events if '"checkpoint.saved"' in line]
        for event in saved:
            key = Key(event["step"], event["attempt"])
            if key.step in self.quarantined:
                self._folder(key, "local", State.quarantined)
            elif event in saved[-self.standing :]:
                self._folder(key, "local", State.verified)
                self._folder(key, "persistent", State.durable)

    def _folder(self, key: Key, tier: str, state: State) -> None:
        folder = self.places.checkpoint(tier, key)
        folder.mkdir(parents=True)
        entry = FileEntry(path="rank-0.safetensors", size=1_234_567_890, blake3="0" * 64)
        told = {"job": "digits", "run": "r001-3f2a90c1", "attempt": key.attempt, "step": key.step, "world_size": 8}
        manifest = Manifest(**told, parent_step=0, samples=1, time=self.now, files=(entry,))
        (folder / "manifest.json").write_text(manifest.to_json())
        digest = checkpoint.manifest_digest(folder) or ""
        why = self.quarantine_reason if state is State.quarantined else ""
        mark = Mark(checkpoint=key.folder, tier=tier, state=state, time=self.now, reason=why, manifest_digest=digest)
        marks.write(self.places, mark)

    def _records(self) -> None:
        told = {
            "name": self.name,
            "run": "r001-3f2a90c1",
            "fingerprint": "3f2a90c1" * 8,
            "dataset_fingerprint": "d" * 64,
        }
        record = RunRecord(
            **told, created=BEGAN, program=self.program, seed=0, config={}, threads=2, code_version="c0de"
        )
        self.places.run_record.write_text(record.to_json())
        structure = Structure(
            batch_size=50,
            model={},
            parameters=(),
            world_size=8,
            threads=2,
            torch_version="2.13.0",
            processor="AMD EPYC",
        )
        self.places.structure.write_text(structure.to_json())
        asked = {
            "name": self.name,
            "program": self.program,
            "steps": self.steps,
            "device": "auto",
            "ranks": 8,
        } | self.job
        tiers = {name: str(folder) for name, folder in self.places.tiers.items()}
        (self.places.persistent / "owner.json").write_text(json.dumps({"tiers": tiers}))
        environment = {"python": "3.11.2", "prefect": "3.9.1"}
        file = self.places.persistent / "job.json"
        file.write_text(json.dumps({"job": asked, "environment": environment, "gpus": ["NVIDIA H200"] * 8}))

    def _claim(self, attempt: int, resumed: int) -> None:
        claim = AttemptClaim(attempt=attempt, resumed_from=resumed, host="node-17", pid=1, boot="b", time=self.now)
        self.places.claim(attempt).write_text(claim.to_json())
        self._event("attempt.claimed", 0.1, attempt, resumed, resumed_from=resumed)

    def _event(
        self, kind: str, seconds: float = 0.0, attempt: int = 0, step: int | None = None, text: str = "", **data: Any
    ) -> None:
        self.now += seconds
        name = f"{len(self._events)}"
        made = Event(id=name, time=self.now, kind=kind, attempt=attempt, step=step, text=text, data=data)
        self._events.append(made.model_dump_json())

    def event(self, kind: str, text: str = "", **data: Any) -> None:
        """One more, after the run was written."""
        made = Event(id=kind, time=self.now, kind=kind, text=text, data=data)
        jsonl.append(self.places.events, [made.model_dump_json()])

    def _phase(self, attempt: int, phase: Phase, step: int, seconds: float) -> None:
        self._phases.append(PhaseMark(attempt=attempt, time=self.now, phase=phase, step=step).model_dump_json())
        self.now += seconds
