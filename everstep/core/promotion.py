"""Promotion: may a checkpoint become its job's production model, and if not, why not.

Every verified and durable checkpoint becomes a version of the registered model that is named like the job. Aliases
point at versions, and say what a version is good for:

    candidate   the newest one that was brought in; at the end of a run its best checkpoint
    production  the best checkpoint of a run with `release: true` that was not refused; or what a person chose
    previous    what was in production before, for a rollback
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field, TypeAdapter, ValidationError

from everstep.core.job import Best
from everstep.core.record import Record

CANDIDATE, PRODUCTION, PREVIOUS = "candidate", "production", "previous"
METRICS_LIMIT = 4000
"""Characters of the metrics' tag. A model with more metrics shows the one that counts."""

Metrics = Mapping[str, float | str]
_METRICS = TypeAdapter(dict[str, float | str])


class Candidate(Record):
    """A checkpoint for the registry. `uri` names its bytes on the most durable tier; digests are BLAKE3 in hex.

    `digest` is that of the weights, empty while nobody has computed it; `manifest` that of the manifest.
    """

    job: str
    run: str
    checkpoint: str
    step: int = Field(ge=0)
    uri: str
    manifest: str = ""
    digest: str = ""
    dataset: str = ""
    metrics: dict[str, float | str] = {}


class Wish(Record):
    """What is to happen to a candidate: only be registered, or also be released.

    `refused` is why it may not be, `unproven` why nobody can tell yet: then the release waits for another flow run.
    """

    candidate: Candidate
    release: bool = False
    best: Best | None = None
    refused: str = ""
    unproven: str = ""

    def ended(self, status: Literal["refused", "waiting"], reason: str) -> "Promotion":
        """What became of it when the registry was never asked."""
        one = self.candidate
        return Promotion(status=status, checkpoint=one.checkpoint, step=one.step, reason=reason)


class Version(Record):
    """A version in the registry, with its tags."""

    number: str
    tags: dict[str, str] = {}

    @property
    def metrics(self) -> dict[str, float | str]:
        """What its tag says; empty where there is no readable one."""
        try:
            return _METRICS.validate_json(self.tags.get("everstep.metrics", ""))
        except ValidationError:
            return {}


class Probe(Record):
    """What came of computing the loss on the fixed batch once more. `loss` is None where the program has none.

    Not `known`: it was not computed, which says nothing of the checkpoint.
    """

    checkpoint: str
    ok: bool
    known: bool = True
    loss: float | None = None
    why: str = ""


class Promotion(Record):
    """What became of a wish, as the run's last line tells it. `reason` is one plain sentence; empty if all went well.

    `waiting`: MLflow could not be told yet, or the checkpoint not be proven; the next flow run of this job does it.
    """

    status: Literal["candidate", "production", "refused", "waiting"]
    checkpoint: str
    step: int
    version: str | None = None
    previous: str | None = None
    reason: str = ""


def choose(candidates: Iterable[Candidate], best: Best | None) -> Candidate | None:
    """The best one by the job's metric, the newest of equals; the newest where none is measured. None for none."""
    known = sorted(candidates, key=lambda one: (one.step, one.checkpoint))
    measured = [one for one in known if worth(one.metrics, best) is not None]
    if not measured:
        return known[-1] if known else None
    return max(measured, key=lambda one: (worth(one.metrics, best), one.step))


def worth(metrics: Metrics, best: Best | None) -> float | None:
    """How good by the job's metric, greater is better; None without such a metric, or where it is no finite number."""
    value = metrics.get(best.metric) if best else None
    if best is None or not isinstance(value, float | int) or not math.isfinite(value):
        return None
    return float(value) if best.mode == "max" else -float(value)


def refusal(wish: Wish, production: Version | None, known: Version | None = None) -> str:
    """Why the wished checkpoint is not released over what is in production now; empty if it may be.

    `known` is the checkpoint's own version. Equal is good enough.
    """
    one, best = wish.candidate, wish.best
    what = f"{one.checkpoint} stays candidate"
    if wish.refused:
        return f"{what}: {wish.refused.rstrip('.')}."
    if known is not None and "everstep.rolled_back" in known.tags:
        return f"{what}: version {known.number} was rolled back; set the alias production by hand if it is to return."
    if best is None:
        return ""
    mine = worth(one.metrics, best)
    if mine is None:
        shown = one.metrics.get(best.metric)
        why = f"is {shown}" if shown is not None else f"is not among its metrics ({_listed(one.metrics)})"
        return f"{what}: {best.metric!r}, which checkpoint.best names, {why}."
    if production is None:
        return ""
    theirs = worth(production.metrics, best)
    if theirs is None:
        return (
            f"{what}: production (version {production.number}) has no {best.metric!r} to compare with; "
            "set the alias production by hand if it is to be replaced."
        )
    if mine < theirs:
        return (
            f"{what}: its {best.metric} of {abs(mine):.6g} is worse than the {abs(theirs):.6g} of production "
            f"(version {production.number})."
        )
    return ""


def tags(one: Candidate, best: Best | None) -> dict[str, str]:
    """What the registry shows of a version."""
    shown = {
        "uri": one.uri,
        "digest": one.digest,
        "step": str(one.step),
        "dataset": one.dataset,
        "run": one.run,
        "checkpoint": one.checkpoint,
        "manifest": one.manifest,
        "metrics": _as_text(one.metrics, best),
    }
    return {f"everstep.{name}": value for name, value in shown.items() if value}


def _as_text(metrics: Metrics, best: Best | None) -> str:
    text = json.dumps(dict(metrics), sort_keys=True)
    if len(text) <= METRICS_LIMIT:
        return text
    return json.dumps({name: value for name, value in metrics.items() if best and name == best.metric})


def _listed(metrics: Metrics) -> str:
    names = sorted(metrics)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "it has none"
