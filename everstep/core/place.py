"""Places of bytes: a directory, or a prefix in an S3 bucket. Pure words, no access."""

import re
from typing import Self

from pydantic import Field, field_validator

from everstep.core.record import Record

_BUCKET = re.compile(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")


def is_object(place: str) -> bool:
    """Whether the place is in an object store (s3://...); else it is a directory."""
    return place.startswith("s3://")


def check(place: str) -> str:
    """The place itself if it is a directory or a sound s3:// URI; ValueError with a plain reason otherwise."""
    if is_object(place):
        return ObjectPlace.parse(place).uri
    if "://" in place:
        raise ValueError("is a URL of another kind; give a directory or s3://bucket/prefix")
    return place


class ObjectPlace(Record):
    """A prefix in a bucket. `prefix` has no slash at either end and may be empty."""

    bucket: str
    prefix: str = ""

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Read `s3://bucket/prefix`. Raises ValueError with a plain reason."""
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not _BUCKET.match(bucket) or ".." in bucket:
            raise ValueError(f"names no bucket ({bucket!r}); write s3://bucket/prefix")
        prefix = prefix.strip("/")
        if any(part in ("", ".", "..") for part in prefix.split("/") if prefix) or "\0" in prefix:
            raise ValueError("has an empty or dotted part in its prefix; write s3://bucket/prefix")
        return cls(bucket=bucket, prefix=prefix)

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, path: str) -> str:
        """The object's key of a relative path below this place."""
        return f"{self.prefix}/{path}" if self.prefix else path

    def below(self, path: str) -> "ObjectPlace":
        return ObjectPlace(bucket=self.bucket, prefix=self.key(path))


class S3Settings(Record):
    """How to reach the object store. Anything not given is taken from the standard AWS variables and profiles.

    There is no place for keys here: they come from the environment, a profile, or a block.
    """

    endpoint_url: str | None = Field(None, description="Address of the store; AWS's own if not given.")
    region: str | None = Field(None, description="Region of the bucket.")
    profile: str | None = Field(None, description="A profile in the AWS configuration files.")
    addressing: str = Field("auto", pattern="^(auto|path|virtual)$", description="How the bucket stands in the URL.")

    @field_validator("endpoint_url")
    @classmethod
    def _is_web_address(cls, url: str | None) -> str | None:
        if url is not None and not re.match(r"^https?://[^/@\s]+/?$", url):
            raise ValueError("must be http(s)://host[:port], without a user or a path")
        return url.rstrip("/") if url else url
