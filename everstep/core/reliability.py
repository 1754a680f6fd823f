"""How often a node interrupts the job on it: what others have published, and what this fleet has seen itself.

Published rates differ twentyfold, and count different things (failed nodes, failed GPUs, interrupted jobs). So together
they make a prior that is broad: a Gamma distribution over the rate of a fleet that nobody has measured yet, with the
mean and variance of the published ones (method of moments). It weighs as much as `alpha` failures seen in `beta`
node-hours; a fleet's own failures and node-hours are added to these (the conjugate update of Gamma and Poisson).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, variance
from typing import Any

from everstep.core.ledger import Event
from everstep.core.record import Record
from everstep.core.segment import CauseKind, Outcome

GPUS_OF_A_NODE = 8
HOURS_OF_A_DAY = 24.0
SUDDEN = frozenset({CauseKind.exception, CauseKind.killed, CauseKind.exit, CauseKind.hang, CauseKind.lost})
"""Ends before which nobody could save. A stop on request saves, a full disk or a bad checkpoint is no end of a node."""
ENOUGH_FAILURES = 3
FAR_MORE_OFTEN = 3.0


@dataclass(frozen=True)
class Published:
    """A published rate, as events in 1,000 days of a node of eight GPUs. `what` says what was counted."""

    fleet: str
    what: str
    per_1000_node_days: float
    source: str


PUBLISHED = (
    Published("Meta RSC-1, 16,000 A100", "failed nodes", 6.5, "arXiv:2410.21680"),
    Published("Meta RSC-2, 8,000 A100", "failed nodes", 2.34, "arXiv:2410.21680"),
    # 419 unexpected interruptions in 54 days on 2,048 nodes
    Published("Meta, Llama 3, 16,384 H100", "unexpected interruptions of the job", 3.79, "arXiv:2407.21783"),
    Published("Meta, FT-HSDP, 32,768 H100", "interruptions, by servers and days", 2.3, "arXiv:2602.00277"),
    # 2.5 and 5 failures in 1,000 days of a GPU: a mean time to failure of 400 and 200 days
    Published("Alibaba, A100", "failed GPUs, eight to a node", 20.0, "Aegis, NSDI 2025"),
    Published("Alibaba, H100", "failed GPUs, eight to a node", 40.0, "Aegis, NSDI 2025"),
)

GPU_SHARE = 268 / 419
"""Of the unexpected interruptions of Llama 3 so many came from GPUs and their memory, the others from what a node has
once (arXiv:2407.21783, table 5)."""


class Fleet(Record):
    """What a fleet has seen: sudden ends of attempts that were training, and the node-hours they trained in all."""

    failures: int = 0
    node_hours: float = 0.0


class MeanTime(Record):
    """Mean time between two failures of a job, in seconds, and where it comes from, in words."""

    seconds: float
    source: str


@dataclass(frozen=True)
class Prior:
    """A Gamma distribution over failures in a node-hour: `alpha` failures were as if seen in `beta` node-hours."""

    alpha: float
    beta: float

    @classmethod
    def of(cls, published: Sequence[Published] = PUBLISHED) -> "Prior":
        """The one whose mean and variance are those of the published rates."""
        rates = [one.per_1000_node_days / 1000 / HOURS_OF_A_DAY for one in published]
        middle, spread = mean(rates), variance(rates)
        return cls(alpha=middle**2 / spread, beta=middle / spread)

    def rate(self, fleet: Fleet) -> float:
        """The mean rate, in failures a node-hour, after what the fleet has seen."""
        return (self.alpha + fleet.failures) / (self.beta + fleet.node_hours)


def whole_nodes(nodes: int, ranks: int) -> float:
    """A job's size in nodes of eight GPUs, by how often they interrupt it. `ranks` on each node stand for its GPUs."""
    used = min(ranks, GPUS_OF_A_NODE) / GPUS_OF_A_NODE
    return nodes * (1 - GPU_SHARE + GPU_SHARE * used)


def mean_time(fleet: Fleet, run: Fleet, nodes: int, ranks: int) -> MeanTime:
    """Mean time between two failures of a job on so many nodes.

    A run that itself fails far more often than the fleet foretells is believed: a prior of many node-hours would take
    days to learn what a bad node or a flaky program shows within the hour.
    """
    size = whole_nodes(nodes, ranks)
    seconds = 3600 / (Prior.of().rate(fleet) * size)
    if run.failures >= ENOUGH_FAILURES and run.node_hours > 0:
        own = run.node_hours * 3600 / run.failures
        if own * FAR_MORE_OFTEN < seconds:
            return MeanTime(seconds=own, source=f"this run itself: {_seen(run)}, more often than its fleet")
    known = "published rates of six fleets"
    if fleet.node_hours > 0:
        known += f" and this ledger: {_seen(fleet)}"
    return MeanTime(seconds=seconds, source=known)


def seen(events: Iterable[Event]) -> Fleet:
    """What a ledger's events tell of the fleet: of every attempt that trained, how long it did and whether it broke.

    An attempt that broke before its first step lost no work, and a crash at every start says nothing of nodes. One
    whose end nobody has told yet (it trains now) counts when it has ended.
    """
    started: dict[tuple[str, str, int], Event] = {}
    ended: dict[tuple[str, str, int], Event] = {}
    for event in events:
        place = (event.job, event.run, event.attempt)
        if event.kind == "attempt.started":
            started[place] = event
        elif event.kind in ("attempt.ended", "attempt.lost"):
            ended.setdefault(place, event)
    failures, hours = 0, 0.0
    for place, end in ended.items():
        begin = started.get(place)
        if begin is None:
            continue
        lived = _number(end.data.get("last_seen"), end.time) - begin.time
        trained = end.kind == "attempt.lost" or (end.step or 0) > (begin.step or 0)
        if lived <= 0 or not trained:
            continue
        pids = begin.data.get("pids")
        hours += lived / 3600 * whole_nodes(1, len(pids) if isinstance(pids, list) else GPUS_OF_A_NODE)
        failures += end.kind == "attempt.lost" or _is_sudden(end.data)
    return Fleet(failures=failures, node_hours=hours)


def _is_sudden(end: Mapping[str, Any]) -> bool:
    cause = end.get("cause")
    kind = cause.get("kind") if isinstance(cause, Mapping) else None
    return end.get("outcome") == Outcome.failed and kind in SUDDEN


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _seen(fleet: Fleet) -> str:
    hours = f"{fleet.node_hours:,.0f}" if fleet.node_hours >= 10 else f"{fleet.node_hours:.2g}"
    return f"{fleet.failures:,} sudden end{'' if fleet.failures == 1 else 's'} in {hours} node-hours"
