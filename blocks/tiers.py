"""The block that names a run's places and holds the keys of its object store."""

from typing import ClassVar, Literal
from urllib.parse import urlsplit

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from everstep.core.job import Tiers
from everstep.core.place import S3Settings
from everstep.store.s3_access import Keys


class StorageTiers(Block):
    """The places of runs: fast and near, persistent, object store, with the way to that store and its keys.

    A job names it (`tiers: prod`) in place of its own tiers. Keys never leave this block but for the process that moves
    the bytes. Without keys here, the worker's own (environment, profile, instance role) are used.
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # a wrong block's message would hold its secrets

    _block_type_name: ClassVar[str] = "Storage Tiers"
    _block_type_slug: ClassVar[str] = "storage-tiers"
    _description: ClassVar[str] = "The places of Everstep runs: fast local, persistent, and object store with its keys."

    local: str = Field(title="Local", description="Fast local directory (NVMe) on the worker's machine; it may vanish.")
    persistent: str = Field(title="Persistent", description="Directory that survives the machine; holds the runs.")
    object: str | None = Field(None, title="Object store", description="s3://bucket/prefix, or a directory.")
    object_required: bool = Field(
        True, title="Object store required", description="A run is complete only when it has its last checkpoint there."
    )
    budget_gb: float | None = Field(None, gt=0, title="Budget, GB", description="Space for staged data on local.")
    endpoint_url: str | None = Field(
        None, title="Endpoint", description="Address of the store; AWS's own if not given."
    )
    region: str | None = Field(None, title="Region", description="Region of the bucket.")
    addressing: Literal["auto", "path", "virtual"] = Field(
        "auto", title="Addressing", description="auto, path or virtual: where the bucket stands."
    )
    access_key: str | None = Field(None, title="Access key", description="The id of the key.")
    secret_key: SecretStr | None = Field(None, title="Secret key", description="The key's secret.")
    session_token: SecretStr | None = Field(None, title="Session token", description="For keys that run out.")
    allowed_hosts: list[str] = Field(
        [],
        title="Allowed hosts",
        description="Other hosts (host or host:port) whose stores jobs may name with these keys.",
    )

    @field_validator("local", "persistent")
    @classmethod
    def _is_absolute(cls, where: str) -> str:
        """A worker starts a flow run in a folder of its own choice."""
        if not where.startswith(("/", "~")):
            raise ValueError("must be an absolute path, as the folder in which a worker runs is not known")
        return where

    @model_validator(mode="after")
    def _is_sound(self) -> "StorageTiers":
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("access_key and secret_key belong together; give both or none")
        self.tiers()
        self.s3(S3Settings())
        return self

    def tiers(self) -> Tiers:
        """The places, as a job would write them."""
        names = ("local", "persistent", "object", "object_required", "budget_gb")
        given = {name: getattr(self, name) for name in names}
        return Tiers.model_validate({name: value for name, value in given.items() if value is not None})

    def s3(self, job: S3Settings) -> S3Settings:
        """How to reach the object store; what the job itself says comes first. A form says every default."""
        own = {"endpoint_url": self.endpoint_url, "region": self.region, "addressing": self.addressing}
        return S3Settings.model_validate(own | job.model_dump(exclude_defaults=True))

    def keys(self) -> Keys | None:
        """The keys, None where the worker's own are to be used."""
        if self.access_key is None or self.secret_key is None:
            return None
        return Keys(self.access_key, self.secret_key, self.session_token)

    def hosts(self) -> tuple[str, ...]:
        """The hosts that may be given the keys: the block's own endpoint, and those it allows."""
        own = (urlsplit(self.endpoint_url).netloc,) if self.endpoint_url else ()
        return (*own, *self.allowed_hosts)
