"""What an S3 store says of its objects: in the XML of a listing, and in the headers of one object."""

from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from everstep.store.objects import ObjectStat
from everstep.store.s3_errors import Asked, Passing


def parse(asked: Asked, data: bytes) -> tuple[list[ObjectStat], str]:
    """The objects on one page of a listing with URL-encoded keys, and the token of the next page, empty on the last.

    Raises Passing for what is no whole listing.
    """
    try:
        page = ET.fromstring(data)  # noqa: S314 - expat itself refuses entities that grow without bound
        name = page.tag.rpartition("ListBucketResult")[0]
        found = [_listed(one, name) for one in page.iterfind(f"{name}Contents")]
        token = page.findtext(f"{name}NextContinuationToken", "")
        is_cut = page.findtext(f"{name}IsTruncated", "false") == "true"
        if not page.tag.endswith("ListBucketResult") or is_cut != bool(token):
            raise ValueError("no listing")
    except (ET.ParseError, ValueError, TypeError):
        raise Passing(f"{asked.store} gives a listing that cannot be read") from None
    return found, token


def stat(key: str, headers: Mapping[str, str]) -> ObjectStat:
    """An object by the headers of the answer to a HEAD request."""
    version = headers.get("x-amz-version-id")
    modified = headers.get("last-modified")
    return ObjectStat(
        key=key,
        size=int(headers.get("content-length", "0")),
        modified=parsedate_to_datetime(modified).timestamp() if modified else 0.0,
        etag=headers.get("etag", "").strip('"'),
        version=None if version == "null" else version,
    )


def crc32(headers: Mapping[str, str]) -> str:
    """The CRC32 of the whole object as the store keeps it, in base64; empty where it keeps none."""
    is_whole = headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT"
    return headers.get("x-amz-checksum-crc32", "") if is_whole and "-" not in headers.get("etag", "") else ""


def is_encrypted_apart(headers: Mapping[str, str]) -> bool:
    """Whether an object has a key of its own, so that its ETag is no MD5 although it looks like one."""
    kind = headers.get("x-amz-server-side-encryption", "")
    return "kms" in kind or "x-amz-server-side-encryption-customer-algorithm" in headers


def _listed(one: ET.Element, name: str) -> ObjectStat:
    text = {child.tag.removeprefix(name): child.text or "" for child in one}
    return ObjectStat(
        key=unquote_plus(text["Key"]),
        size=int(text["Size"]),
        modified=datetime.fromisoformat(text["LastModified"]).timestamp(),
        etag=text.get("ETag", "").strip('"'),
    )
