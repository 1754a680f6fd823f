"""The block that bounds what a job may name that comes through Prefect's API."""

from typing import ClassVar

from prefect.blocks.core import Block
from pydantic import Field, field_validator

from everstep.core import guardrails


class Guardrails(Block):
    """What jobs of deployments may name. The one that is called `default` holds for every deployed flow run.

    Without it nothing is bounded. Blocks that a job names (tiers, tracking) are trusted: whoever makes blocks may.
    """

    NAME: ClassVar[str] = "default"

    _block_type_name: ClassVar[str] = "Everstep Guardrails"
    _block_type_slug: ClassVar[str] = "everstep-guardrails"
    _description: ClassVar[str] = "What jobs may name that are started through Prefect: programs, data, tiers, servers."

    programs: list[str] = Field(
        min_length=1, title="Programs", description="Modules or packages, and absolute folders with program files."
    )
    data: list[str] = Field(
        min_length=1, title="Data", description="Absolute folders and s3://bucket/prefix: data below them."
    )
    tiers: list[str] = Field(
        [], title="Tiers", description="The same, for tiers and SQLite files that a job names itself."
    )
    hosts: list[str] = Field(
        [], title="Hosts", description="Servers (host or host:port) that a job may name itself: MLflow, ledger, S3."
    )
    variables: list[str] = Field(
        [], title="Variables", description="Environment variables that a job may hand to its program."
    )

    @field_validator("programs")
    @classmethod
    def _are_programs(cls, programs: list[str]) -> list[str]:
        for one in programs:
            if not one.startswith("/") and not all(part.isidentifier() for part in one.split(".")):
                raise ValueError(f"{one!r} is neither a module nor an absolute folder")
        return programs

    @field_validator("data", "tiers")
    @classmethod
    def _are_places(cls, places: list[str]) -> list[str]:
        return [guardrails.check_entry(one) for one in places]

    def rules(self) -> guardrails.Guardrails:
        """The same as a plain object."""
        return guardrails.Guardrails(
            programs=tuple(self.programs),
            data=tuple(self.data),
            tiers=tuple(self.tiers),
            hosts=tuple(self.hosts),
            variables=tuple(self.variables),
        )
