"""What a job of a deployment may name, as a block on the server says. A job that a person runs by hand is not bounded."""

import os
from pathlib import Path
from typing import Protocol

from prefect.blocks.core import Block
from prefect.context import FlowRunContext

from everstep.core.guardrails import Guardrails
from everstep.core.job import TrainJob
from tasks.places import find


class GuardrailsBlock(Protocol):
    """What is asked of `blocks.guardrails.Guardrails`."""

    NAME: str

    def rules(self) -> Guardrails: ...


def bounded(job: TrainJob, kind: type[Block]) -> TrainJob:
    """The job, if the server's guardrails allow it or this flow run is no deployment's. Raises ValueError.

    Where the server has no such block, nothing is bounded. One that cannot be read bounds everything.
    """
    context = FlowRunContext.get()
    if not (context and context.flow_run and context.flow_run.deployment_id):
        return job
    name: str = kind.NAME  # type: ignore[attr-defined]
    block: GuardrailsBlock | None = find(kind, "guardrails", name)  # type: ignore[assignment]
    refusal = block.rules().refusal(job, Path.cwd(), os.path.realpath) if block else ""
    if refusal:
        raise ValueError(f"{refusal[:-1]}; whoever looks after the Guardrails block {name!r} can allow it.")
    return job
