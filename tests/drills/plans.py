"""Seeded plans of kills, and what must hold after each."""

import random
from dataclasses import dataclass

SAMPLES = 97
BALLAST = 750_000  # parameters; with AdamW's moments 9 MB
RANK_POINTS = (
    "train.first_step",
    "train.mid_step",
    "train.step_end",
    "save.begin",
    "save.mid_file",
    "save.before_manifest",
    "save.rename",
    "save.after_commit",
    "segment.end",
    "run.end",
)
WRITER_POINTS = tuple(
    f"writer.{point}" for point in ("begin", "mid_file", "written", "before_manifest", "rename", "after_commit")
)
COMMITTING = ("save.before_manifest", "save.rename", "save.after_commit", "segment.end")
"""Points that only rank 0 passes."""
COPIER_POINTS = ("copy.begin", "copy.mid_file", "copy.before_manifest", "copy.verify")
FLOW_POINTS = ("verify.mid", "flow.decide", "flow.report")


@dataclass(frozen=True)
class Shape:
    """How a TINY job is run: what may change the bits, so every shape has its own reference."""

    ranks: int = 1
    workers: int = 0
    accumulation: int = 1
    ballast: bool = False
    """A state so large that it is copied beside the training."""

    def job(self, pause: float = 0.0) -> dict:
        """The job's fields; `pause` seconds a micro-batch let a kill be aimed and change no bit."""
        config = {"workers": self.workers, "accumulation": self.accumulation, "batch_size": 4 * self.accumulation}
        config |= {"pause": pause} | ({"ballast": BALLAST} if self.ballast else {})
        return {"ranks": self.ranks, "config": config}

    def __str__(self) -> str:
        name = f"ranks{self.ranks}-workers{self.workers}-accumulation{self.accumulation}"
        return f"{name}-ballast" if self.ballast else name


SHAPES = (
    *(Shape(ranks, workers, accumulation) for ranks in (1, 2, 4) for workers in (0, 2) for accumulation in (1, 3)),
    Shape(1, 0, 1, ballast=True),
    Shape(2, 2, 3, ballast=True),
)


def rank_plan(dice: random.Random, shape: Shape, kills: int) -> list[dict]:
    """Kills of ranks at named points, each at a random pass of the point."""
    plan = []
    for _ in range(kills):
        point = dice.choice(RANK_POINTS)
        most = {"train": 50, "save": 5, "segment": 3, "run": 1}[point.partition(".")[0]]
        hit = 1 if point == "train.first_step" else dice.randint(1, most)
        rank = 0 if point in COMMITTING else dice.randrange(shape.ranks)
        plan.append({"point": point, "hit": hit, "rank": rank})
    return plan


def every_rank_point(shape: Shape) -> list[dict]:
    """Each named point of a rank once, spread over the run so that every kill happens.

    Between most of them a checkpoint is committed: kills without progress are answered with ever longer pauses.
    """
    hits = {
        "train.first_step": 1,
        "train.mid_step": 7,
        "train.step_end": 8,
        "save.begin": 2,
        "save.mid_file": 2,
        "save.before_manifest": 2,
        "save.rename": 1,
        "save.after_commit": 1,
        "segment.end": 1,
        "run.end": 1,
    }
    last = shape.ranks - 1
    return [{"point": point, "hit": hit, "rank": 0 if point in COMMITTING else last} for point, hit in hits.items()]


def check_journal(drill, shape: Shape, reference) -> None:
    """Accepted micro-batches equal the reference's bit for bit, and every sample comes once an epoch."""
    accepted, untouched = drill.accepted(), reference.accepted()
    assert accepted == untouched
    seen = [
        identity
        for step in range(1, drill.job["steps"] + 1)
        for rank in sorted(accepted)
        for row in accepted[rank].get(step, [])
        for identity in row["ids"]
    ]
    for begin in range(0, len(seen) - SAMPLES + 1, SAMPLES):
        assert sorted(seen[begin : begin + SAMPLES]) == list(range(SAMPLES))
