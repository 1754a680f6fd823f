"""A run's checkpoints as a person looks for one: a line for each, with all that is known of it."""

from collections.abc import Iterable, Mapping

from everstep.core.checkpoint import Key, Manifest
from everstep.core.chronicle import Held
from everstep.core.record import Record


class CheckpointRow(Record):
    """One checkpoint. `saved` is Unix seconds, None if unknown; `tiers` has its state by tier: saved, verified, durable,
    quarantined, torn (never committed) or gone. `metric` is that by which the job calls a checkpoint the best, of which
    `metric_name` is the name. `kept` says by tier why retention keeps it, or that it may go.
    """

    checkpoint: str
    step: int
    attempt: int
    tiers: dict[str, str]
    bytes: int
    saved: float | None
    metric: float | str | None = None
    metric_name: str = ""
    metrics: dict[str, float | str] = {}
    kept: dict[str, str] = {}
    pinned: bool = False
    abandoned: bool = False
    reason: str = ""

    @property
    def why(self) -> str:
        """Why it was set aside; else that it was left behind, or why it is kept, each reason once."""
        if self.reason:
            return self.reason
        words = list(dict.fromkeys(self.kept.values()))
        if self.pinned and "pinned" not in words:
            words.insert(0, "pinned")
        return "; ".join(["abandoned: a later attempt went back behind it", *words] if self.abandoned else words)


def rows(
    held: Iterable[Held],
    manifests: Mapping[Key, Manifest],
    kept: Mapping[tuple[str, str], str],
    pinned: Iterable[str],
    best: str,
) -> list[CheckpointRow]:
    """The lines, newest first. `kept` is by folder and tier; `best` names the metric, empty if the job names none."""
    copies: dict[Key, list[Held]] = {}
    for one in held:
        copies.setdefault(one.key, []).append(one)
    fixed = set(pinned)
    return [
        _row(key, copies[key], manifests.get(key), kept, best, pinned=key.folder in fixed)
        for key in sorted(copies, reverse=True)
    ]


def _row(
    key: Key,
    copies: list[Held],
    manifest: Manifest | None,
    kept: Mapping[tuple[str, str], str],
    best: str,
    *,
    pinned: bool,
) -> CheckpointRow:
    metrics = manifest.metrics if manifest else {}
    return CheckpointRow(
        checkpoint=key.folder,
        step=key.step,
        attempt=key.attempt,
        tiers={one.tier: state(one) for one in copies},
        bytes=max(one.bytes for one in copies),
        saved=manifest.time if manifest else None,
        metric=metrics.get(best),
        metric_name=best,
        metrics=metrics,
        kept={one.tier: kept[key.folder, one.tier] for one in copies if (key.folder, one.tier) in kept},
        pinned=pinned,
        abandoned=copies[0].abandoned,
        reason=next((one.reason for one in copies if one.reason), ""),
    )


def state(held: Held) -> str:
    """The state of a checkpoint on a tier, in a word."""
    if held.gone:
        return "gone"
    return "torn" if held.torn else held.state.value
