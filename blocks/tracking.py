"""The block that names an MLflow server or database, and holds its credentials."""

import re
from collections.abc import Mapping
from typing import ClassVar

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from everstep.core import job


class Tracking(Block):
    """The MLflow in which people browse runs. A job names it (`tracking: prod`) in place of a URI of its own."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a wrong block's message would hold its secrets

    _block_type_name: ClassVar[str] = "Everstep Tracking"
    _block_type_slug: ClassVar[str] = "everstep-tracking"
    _description: ClassVar[str] = "The MLflow server or database of Everstep runs, with its credentials."

    uri: str = Field(title="URI", description="http(s)://host[:port], or sqlite:////absolute/path/mlflow.db.")
    username: str | None = Field(None, title="User", description="For a server that asks for one.")
    password: SecretStr | None = Field(None, title="Password", description="Of that user.")
    token: SecretStr | None = Field(None, title="Token", description="In place of user and password.")

    @field_validator("uri")
    @classmethod
    def _holds_no_secret(cls, uri: str) -> str:
        if re.search(r"//[^/@]*:[^/@]*@", uri):
            raise ValueError("holds a password; put user and password into their own fields")
        return uri

    @model_validator(mode="after")
    def _one_kind(self) -> "Tracking":
        if self.token and self.password:
            raise ValueError("has a token and a password; give one of them")
        if (self.username is None) != (self.password is None):
            raise ValueError("username and password belong together; give both or none")
        return self

    def tracking(self) -> job.Tracking:
        """The place, as a job would write it."""
        return job.Tracking(uri=self.uri)

    def environment(self) -> Mapping[str, str]:
        """MLflow's own variables for the credentials; for the flow's process only."""
        found = {}
        if self.username is not None and self.password is not None:
            found["MLFLOW_TRACKING_USERNAME"] = self.username
            found["MLFLOW_TRACKING_PASSWORD"] = self.password.get_secret_value()
        if self.token is not None:
            found["MLFLOW_TRACKING_TOKEN"] = self.token.get_secret_value()
        return found
