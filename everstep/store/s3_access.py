"""How to reach an object store, and whose keys it gets: the job's settings over the standard AWS variables and profiles."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pydantic import SecretStr

from everstep.core.place import S3Settings

if TYPE_CHECKING:
    from botocore.session import Session

DEFAULT_REGION = "us-east-1"
_AWS_OWN = re.compile(r"^https://s3([.-](dualstack|fips))?([.-][a-z0-9-]+)?\.amazonaws\.com(\.cn)?$")


@dataclass(frozen=True)
class Keys:
    """An access key with its secret; `token` for those that run out."""

    access_key: str
    secret: SecretStr
    token: SecretStr | None = None


@dataclass(frozen=True)
class Access:
    """A way to an object store. Without `keys` they are looked for where AWS's own tools look, again when they run out.

    No secret is in its repr. `to_dict` holds them: it is for the pipe to a child process, and nothing else.
    """

    endpoint_url: str | None = None
    region: str = DEFAULT_REGION
    addressing: str = "auto"
    profile: str | None = None
    keys: Keys | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it, secrets too."""
        keys = self.keys and {
            "access_key": self.keys.access_key,
            "secret": self.keys.secret.get_secret_value(),
            "token": self.keys.token and self.keys.token.get_secret_value(),
        }
        return {
            "endpoint_url": self.endpoint_url,
            "region": self.region,
            "addressing": self.addressing,
            "profile": self.profile,
            "keys": keys,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        keys = value.get("keys")
        if keys is not None:
            token = keys.get("token")
            keys = Keys(keys["access_key"], SecretStr(keys["secret"]), SecretStr(token) if token else None)
        return cls(value["endpoint_url"], value["region"], value["addressing"], value["profile"], keys)

    def without_keys(self) -> Self:
        return replace(self, keys=None)


def access(
    settings: S3Settings,
    *,
    keys: Keys | None = None,
    allowed_hosts: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
) -> Access:
    """The way to the store that a job's settings, the environment and the AWS configuration files describe together.

    An endpoint in the settings is served only if the environment or profile names the same one, if it is AWS's own, or
    if `allowed_hosts` has it: else ValueError, because whoever can write a job could have the keys sent anywhere.
    Raises ValueError too for a profile that is not there. Asks nothing over the network.
    """
    scoped, usual = _configured(settings.profile or env.get("AWS_PROFILE"), env)
    endpoint = settings.endpoint_url or usual
    if settings.endpoint_url and not _may_have_keys(settings.endpoint_url, usual, allowed_hosts):
        raise ValueError(
            f"s3.endpoint_url: {settings.endpoint_url!r} would be given your keys, and nothing but the job names it; "
            "set AWS_ENDPOINT_URL to it, or use a block that allows this host."
        )
    region = settings.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    region = region or scoped.get("region") or DEFAULT_REGION
    return Access(endpoint, region, settings.addressing, settings.profile or env.get("AWS_PROFILE"), keys)


def _configured(profile: str | None, env: Mapping[str, str]) -> tuple[Mapping[str, Any], str | None]:
    """What the profile says, and the endpoint that AWS's own tools would use. botocore is asked where there is a file."""
    files = [
        env.get("AWS_CONFIG_FILE", "~/.aws/config"),
        env.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ]
    if profile or any(Path(file).expanduser().is_file() for file in files):
        session = _session(profile, env)
        return session.get_scoped_config(), _usual_endpoint(session, env)
    if env.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return {}, None
    found = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    return {}, found.rstrip("/") if found else None


def session_of(access: Access) -> "Session":
    """A botocore session that finds the keys of an access without keys of its own."""
    return _session(access.profile, os.environ)


def _session(profile: str | None, env: Mapping[str, str]) -> "Session":
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    session = Session(profile=profile)
    for variable, name in (("AWS_CONFIG_FILE", "config_file"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials_file")):
        if env.get(variable):
            session.set_config_variable(name, env[variable])
    try:
        session.get_scoped_config()
    except BotoCoreError as error:
        where = f"s3.profile: {profile!r}" if profile else "s3"
        raise ValueError(f"{where}: {error}; correct the AWS configuration files or name another profile.") from None
    return session


def _usual_endpoint(session: "Session", env: Mapping[str, str]) -> str | None:
    """The endpoint for S3 that AWS's own tools would use, None for AWS."""
    from botocore.configprovider import ConfiguredEndpointProvider

    if env.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return None
    found = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3", dict(env)).provide()
    return found.rstrip("/") if found else None


def _may_have_keys(endpoint: str, usual: str | None, allowed_hosts: Sequence[str]) -> bool:
    if _AWS_OWN.match(endpoint) or endpoint == usual:
        return True
    parts = urlsplit(endpoint)
    return parts.netloc in allowed_hosts or (parts.hostname or "") in allowed_hosts
