"""Where the files of a run are. The run directory is `<persistent>/<name>/<run>/`, the local one `<local>/<name>/<run>/`."""

from dataclasses import dataclass
from pathlib import Path

from everstep.core.checkpoint import Key


@dataclass(frozen=True)
class RunPlaces:
    """The folders of one run, one for each tier."""

    persistent: Path
    local: Path
    object: Path | None = None

    @classmethod
    def of(cls, tiers_local: str, tiers_persistent: str, tiers_object: str | None, name: str, run: str) -> "RunPlaces":
        return cls(
            persistent=Path(tiers_persistent) / name / run,
            local=Path(tiers_local) / name / run,
            object=Path(tiers_object) / name / run if tiers_object else None,
        )

    @property
    def tiers(self) -> dict[str, Path]:
        """The tiers by name, nearest first."""
        tiers = {"local": self.local, "persistent": self.persistent}
        return tiers | {"object": self.object} if self.object else tiers

    def checkpoints(self, tier: str) -> Path:
        return self.tiers[tier] / "checkpoints"

    def checkpoint(self, tier: str, key: Key) -> Path:
        return self.checkpoints(tier) / key.folder

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
