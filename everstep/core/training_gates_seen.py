"""What the training gates look at, and their thresholds. Pure. The rules are in `training_gates` and `training_gates_trends`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pydantic import Field

from everstep.core.checkpoint import SaveCost
from everstep.core.record import Record


class TrainingGates(Record):
    """When a training gate says fail. Where no source is named the value is derived, in the comment above it."""

    # GradScaler begins at 2^16 and halves its scale at each skipped step: after 16 of them nothing is scaled any more.
    skips_in_a_row: int = Field(
        20, ge=1, description="With a gradient scaler: so many values in a row that are not finite fail."
    )
    restore_steps: int = Field(20, ge=5, description="Values after a restore that are compared.")
    restore_least: int = Field(5, ge=3, description="With fewer values after a restore nothing is measured.")
    before_steps: int = Field(50, ge=10, description="Values before a restore that they are compared with.")
    before_least: int = Field(10, ge=5, description="With fewer values before a restore nothing is measured.")
    # The median of 20 values has a standard error of 0.28 sigma, so 6 sigma leave room for noise that is not normal.
    jump_noise: float = Field(6.0, gt=0, description="A jump exceeds so many robust standard deviations of the noise.")
    loss_jump: float = Field(0.1, gt=0, description="And the loss by so much of itself: 0.1 = a tenth.")
    # ByteRobust (arXiv 2509.16293): a gradient norm, or a loss, five times as large is a fault.
    norm_jump: float = Field(4.0, gt=0, description="And the gradient norm by so much of itself: 4 = five times.")
    # A loss that falls as a power of the steps, with an exponent of 0.05, still loses 1.7 % from one quarter to the next.
    plateau_steps: int | None = Field(
        1000, ge=100, description="Steps of a window at least; None: plateaus never fail."
    )
    plateau_share: float = Field(0.25, gt=0, le=0.5, description="A window is this share of the run's steps at least.")
    plateau_gain: float = Field(
        0.001, ge=0, description="The smoothed loss must fall by more than this share of itself."
    )
    # Issue: 20 % below its own baseline. Normal wobble is 1 to 2 % (Llama 3, arXiv 2407.21783). Minder (arXiv 2411.01791):
    # faults last, disturbances pass; so the drop must hold for the whole of a window.
    throughput_share: float = Field(0.8, gt=0, lt=1, description="Share of the baseline below which throughput fails.")
    # EROICA, too, compares the last 50 steps.
    throughput_steps: int = Field(50, ge=20, description="Steps of the newest window at least.")
    throughput_seconds: float = Field(60.0, ge=0, description="Seconds that the newest window covers at least.")
    baseline_steps: int = Field(100, ge=20, description="Steps of the baseline at least.")
    # The first steps compile, choose kernels and fill caches; medians take care of what is still slow after them.
    warm_steps: int = Field(10, ge=1, description="The first steps of an attempt, which count for no throughput.")
    # NVIDIA resiliency extension: a relative performance score under 0.7 is a straggler.
    slow_score: float = Field(
        0.7, gt=0, lt=1, description="A rank's peers' work divided by its own, below which it fails."
    )
    # A busy host delays a process by a few milliseconds now and then, and steps that are so short show nothing.
    slow_seconds: float = Field(0.005, ge=0, description="And its work must be longer by so much.")
    saves_least: int = Field(8, ge=5, description="With fewer saves no trend is looked for.")
    # Mann-Kendall, one-sided, p < 0.001: a run is looked at many times. (At 0.01, healthy save times with a spread of
    # 25 % were blamed in 6 of 2,500 looks.)
    trend_z: float = Field(3.09, gt=0, description="The Mann-Kendall score above which save times have a trend.")
    save_growth: float = Field(0.5, gt=0, description="And they must have grown by this share, by the Theil-Sen slope.")
    save_seconds: float = Field(0.5, ge=0, description="And by so many seconds: a disk's wobble is no trend.")


DEFAULT = TrainingGates()


class StepSeen(NamedTuple):
    """A row of `metrics.jsonl`. `loss` and `grad_norm` may be no numbers; `samples` counts all since the run's begin.

    `evaluated`: an evaluation was made before the row was taken, so that the step took longer.
    """

    attempt: int
    step: int
    time: float
    loss: float
    samples: float = 0.0
    grad_norm: float | None = None
    evaluated: bool = False


@dataclass(frozen=True)
class TrainingSeen:
    """What is known of a run's training, in any order. Of a long run the rows may be parts of all.

    `resumed` has the step from which each attempt went on, 0 for a new start. `alike` are the attempts before the newest
    one that ran on as many ranks of the same machine, so that their speed can be compared. `since` is the step after
    which the segment in question begins, `steps` how many the run is to make. `work` is each rank's median of seconds a
    step without waiting for others, None where that is unknown. `weights_finite` is what verification of its checkpoint
    found. `scaled`: a gradient scaler is in use, so an infinite gradient now and then is a skipped step.
    """

    rows: Sequence[StepSeen] = ()
    resumed: Mapping[int, int] = field(default_factory=dict)
    alike: frozenset[int] = frozenset()
    since: int = 0
    steps: int | None = None
    saves: Sequence[SaveCost] = ()
    work: Mapping[int, float | None] = field(default_factory=dict)
    weights_finite: bool | None = None
    scaled: bool = False

    @cached_property
    def by_attempt(self) -> dict[int, list[StepSeen]]:
        """All rows, also of steps that were thrown away, by attempt and step."""
        found: dict[int, dict[int, StepSeen]] = {}
        for row in sorted(self.rows, key=lambda row: row.time):
            found.setdefault(row.attempt, {})[row.step] = row
        return {attempt: [rows[step] for step in sorted(rows)] for attempt, rows in sorted(found.items())}

    @cached_property
    def accepted(self) -> list[StepSeen]:
        """The rows that count, by step: for each step that of the last attempt that got past it."""
        found: dict[int, StepSeen] = {}
        for attempt, rows in self.by_attempt.items():
            left = min((step for later, step in self.resumed.items() if later > attempt), default=math.inf)
            found |= {row.step: row for row in rows if row.step <= left}
        return [found[step] for step in sorted(found)]

    @property
    def newest(self) -> int:
        """The newest attempt; 0 where there is none."""
        return max([*self.resumed, *self.by_attempt], default=0)


def spread(values: Sequence[float]) -> float:
    """A robust standard deviation: 1.4826 times the median distance from the median."""
    middle = middle_of(values)
    return 1.4826 * middle_of([abs(one - middle) for one in values])


def middle_of(values: Iterable[float]) -> float:
    """The median, where a value that is not finite counts as the worst: plus infinity."""
    ordered = sorted(one if math.isfinite(one) else math.inf for one in values)
    half = len(ordered) // 2
    if len(ordered) % 2 or ordered[half] == math.inf:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
