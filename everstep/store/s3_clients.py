"""The clients behind a bucket: an s3fs file system and an obstore store, both with our deadlines and one source of keys."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from everstep.store.s3_access import Access, session_of

if TYPE_CHECKING:
    from obstore.store import S3Store

CONNECT_SECONDS = 5
READ_SECONDS = 30
"""Silence of the store, in the middle of a body too, that ends a request."""
REQUEST_SECONDS = 600
KEYS_SECONDS = 600
"""So long obstore keeps keys before it asks for them again; botocore renews them 10 minutes before they run out."""


def make_s3fs(access: Access) -> Any:
    """A file system without s3fs's caches of instances and listings, and without repeats of its own."""
    import s3fs

    keys: dict[str, Any] = {"profile": access.profile} if access.profile else {}
    if access.keys:
        token = access.keys.token
        keys = {"key": access.keys.access_key, "secret": access.keys.secret.get_secret_value()}
        keys["token"] = token.get_secret_value() if token else None
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "retries": {"max_attempts": 0},
        "s3": {"addressing_style": addressing(access)},
    }
    files = s3fs.S3FileSystem(
        **keys,
        endpoint_url=access.endpoint_url,
        client_kwargs={"region_name": access.region},
        config_kwargs=config,
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    files.retries = 1
    return files


def make_obstore(bucket: str, access: Access) -> "S3Store":
    """A client that sends large files. It repeats single parts: a file is not sent again for the sake of one."""
    from obstore.store import S3Store

    virtual = addressing(access) == "virtual" and "." not in bucket
    config: dict[str, Any] = {"region": access.region, "virtual_hosted_style_request": virtual}
    if access.endpoint_url:
        parts = urlsplit(access.endpoint_url)
        endpoint = f"{parts.scheme}://{bucket}.{parts.netloc}" if virtual else access.endpoint_url
        config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}  # the second would be taken from a variable
    client: dict[str, Any] = {
        "allow_http": (access.endpoint_url or "").startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=READ_SECONDS),
        "timeout": timedelta(seconds=REQUEST_SECONDS),
    }
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        client["root_certificate"] = Path(bundle).read_bytes()
    retry: dict[str, Any] = {"max_retries": 5, "retry_timeout": timedelta(seconds=120)}
    return S3Store(
        bucket,
        config=cast("Any", config),
        client_options=cast("Any", client),
        retry_config=cast("Any", retry),
        credential_provider=_provider(access),
    )


@dataclass(frozen=True)
class Frozen:
    """Keys as they are at this moment."""

    access_key: str
    secret: str = field(repr=False)
    token: str | None = field(repr=False)


def keys_of(access: Access) -> Callable[[], Frozen]:
    """What gives the keys of an access, renewed when they are about to run out. ValueError if there are none."""
    if access.keys is not None:
        token = access.keys.token
        fixed = Frozen(
            access.keys.access_key, access.keys.secret.get_secret_value(), token.get_secret_value() if token else None
        )
        return lambda: fixed
    env = os.environ
    if not access.profile and env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
        told = Frozen(env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"], env.get("AWS_SESSION_TOKEN") or None)
        return lambda: told  # first in AWS's own order too; it saves loading botocore
    found = session_of(access).get_credentials()
    if found is None:
        raise no_keys()

    def frozen() -> Frozen:
        one = found.get_frozen_credentials()
        return Frozen(one.access_key, one.secret_key, one.token)

    return frozen


def _provider(access: Access) -> Callable[[], Any]:
    """What obstore asks for keys."""
    keys = keys_of(access)

    def provide() -> dict[str, Any]:
        now = keys()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret,
            "token": now.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=KEYS_SECONDS),
        }

    return provide


def addressing(access: Access) -> str:
    """Stores that are not AWS rarely have a name for each bucket."""
    if access.addressing != "auto":
        return access.addressing
    return "path" if access.endpoint_url else "virtual"


def no_keys() -> ValueError:
    return ValueError(
        "s3: no AWS credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile, or use a block."
    )
