"""What MLflow is to be told and has not been told yet: of each kind the latest."""

from pathlib import Path
from typing import Self

from everstep.core.errors import Damaged
from everstep.core.promotion import Wish
from everstep.core.record import Versioned


class Wishes(Versioned):
    """`tracking.json`: what MLflow has not been told yet."""

    tags: dict[str, str] = {}
    status: str | None = None
    candidate: Wish | None = None
    release: Wish | None = None
    artifacts: tuple[str, ...] = ()

    @classmethod
    def left_over(cls, file: Path) -> Self:
        """What an earlier flow run could not say; the file of a dying writer may be unreadable, and is then no loss."""
        try:
            return cls.parse(file.read_bytes(), str(file.parent), file.name)
        except (OSError, Damaged):
            return cls()

    def with_no_release(self) -> Self:
        """The same, but for a release that was wished once and is no longer: the checkpoint is registered only."""
        release = self.release and self.release.model_copy(update={"release": False})
        return self.model_copy(update={"release": release})

    def without(self, told: Self) -> Self:
        """What is left when `told` has been said. Promotions are taken out one by one, when each is fulfilled."""
        tags = {key: value for key, value in self.tags.items() if told.tags.get(key) != value}
        status = None if self.status == told.status else self.status
        artifacts = tuple(name for name in self.artifacts if name not in told.artifacts)
        return self.model_copy(update={"tags": tags, "status": status, "artifacts": artifacts})
