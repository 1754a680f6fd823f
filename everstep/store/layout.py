"""Where the files of a run are. The run directory is `<persistent>/<name>/<run>/`, the local one `<local>/<name>/<run>/`.

The object tier is reached by `everstep.store.object_tier` only. What is known to be committed there stands in the run
directory as a mirror: `object/checkpoints/<checkpoint>/manifest.json`, the manifest as it is there.
"""

from dataclasses import dataclass
from pathlib import Path

from everstep.core.checkpoint import Key
from everstep.core.place import is_object


@dataclass(frozen=True)
class RunPlaces:
    """The places of one run, one for each tier. `object` is its URI there: `s3://...`, or a directory's path."""

    persistent: Path
    local: Path
    object: str | None = None

    @classmethod
    def of(cls, tiers_local: str, tiers_persistent: str, tiers_object: str | None, name: str, run: str) -> "RunPlaces":
        return cls(
            persistent=Path(tiers_persistent) / name / run,
            local=Path(tiers_local) / name / run,
            object=f"{tiers_object.rstrip('/')}/{name}/{run}" if tiers_object else None,
        )

    @property
    def tiers(self) -> dict[str, Path]:
        """The tiers by name, nearest first: their folders, and the mirror of the object tier."""
        tiers = {"local": self.local, "persistent": self.persistent}
        return tiers | {"object": self.persistent / "object"} if self.object else tiers

    def checkpoints(self, tier: str) -> Path:
        return self.tiers[tier] / "checkpoints"

    def checkpoint(self, tier: str, key: Key) -> Path:
        return self.checkpoints(tier) / key.folder

    def uri(self, tier: str, folder: str) -> str:
        """The URI under which a checkpoint's bytes are on a tier."""
        if tier == "object" and self.object:
            place = f"{self.object}/checkpoints/{folder}"
            return place if is_object(place) else Path(place).absolute().as_uri()
        return (self.checkpoints(tier) / folder).absolute().as_uri()

    def heartbeat(self, rank: int) -> Path:
        return self.local / f"heartbeat-{rank}.json"

    def claim(self, attempt: int) -> Path:
        return self.persistent / "attempts" / f"{attempt:06d}.json"

    def end(self, attempt: int, rank: int) -> Path:
        return self.persistent / "attempts" / f"{attempt:06d}" / f"end-{rank}.json"

    def result(self, segment: int) -> Path:
        return self.persistent / "segments" / f"{segment:06d}" / "result.json"

    def mark(self, folder: str, tier: str, state: str) -> Path:
        return self.persistent / "marks" / f"{folder}.{tier}.{state}.json"

    def log(self, attempt: int, rank: int) -> Path:
        return self.persistent / "logs" / f"attempt-{attempt:06d}-rank-{rank}.log"

    @property
    def run_record(self) -> Path:
        return self.persistent / "run.json"

    @property
    def structure(self) -> Path:
        return self.persistent / "structure.json"

    @property
    def lease(self) -> Path:
        return self.persistent / "lease.json"

    @property
    def stop_file(self) -> Path:
        return self.persistent / "stop"

    @property
    def metrics(self) -> Path:
        return self.persistent / "metrics.jsonl"

    @property
    def saves(self) -> Path:
        return self.persistent / "saves.jsonl"

    @property
    def phases(self) -> Path:
        return self.persistent / "phases.jsonl"

    @property
    def events(self) -> Path:
        return self.persistent / "events.jsonl"

    @property
    def final(self) -> Path:
        return self.persistent / "result.json"

    @property
    def report(self) -> Path:
        return self.persistent / "report.txt"
