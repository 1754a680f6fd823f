"""What a job says about the gates on GPU health and on its own training."""

from typing import Literal

from pydantic import Field

from everstep.core.record import Record


class HealthSettings(Record):
    """The gates of a job: which GPUs count, how often they are looked at, and when they are tested."""

    gates: bool = Field(True, description="Watch GPUs and training, and gate the segments on what is found.")
    gpus: Literal["used", "all"] = Field("used", description="The GPUs that count: those the ranks use, or all here.")
    every_seconds: float = Field(5.0, ge=1.0, le=60.0, description="Between two samples of the GPUs.")
    test: Literal["auto", "never"] = Field(
        "auto", description="Test suspect GPUs at a segment's end, before training goes on."
    )
    test_seconds: float = Field(20.0, ge=1.0, le=600.0, description="What one active test may take.")
    policy: str | None = Field(None, description="A YAML file with thresholds of your own, as in docs/health.md.")
