"""One bucket of an S3 store. `s3_bodies` reads and lists, s3fs writes small objects and deletes, obstore sends large files.

None repeats a request by itself, but obstore the parts of a file: the patience is here, so that one deadline holds.
"""

import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from everstep.core.errors import StoreUnavailable
from everstep.store import s3_clients, s3_errors, s3_listing
from everstep.store.objects import Changed, Exists, Moved, NotThere, ObjectStat
from everstep.store.s3_access import Access, Keys, access
from everstep.store.s3_bodies import Bodies
from everstep.store.s3_errors import Asked, Expired, Passing

if TYPE_CHECKING:
    from obstore.store import S3Store

__all__ = ["Access", "Bucket", "Keys", "Patience", "access", "open_store"]

UPLOAD_PART = 16 << 20
UPLOADS_AT_ONCE = 4
NONCE = "everstep-nonce"
PAGE = 1000
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Patience:
    """How often and how long one question is asked again. Delays grow from `first` to `most` seconds, with jitter."""

    attempts: int = 8
    seconds: float = 180.0
    first: float = 0.25
    most: float = 10.0

    def delay(self, attempt: int) -> float:
        return min(self.most, self.first * 2.0**attempt) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter is no secret


def open_store(bucket: str, access: Access, *, patience: Patience = Patience()) -> "Bucket":
    """The bucket, reached when it is first asked something. `close` it when done."""
    return Bucket(bucket, access, patience)


class Bucket:
    """An `everstep.store.objects.ObjectStore`. May be used by several threads, and after a fork."""

    def __init__(self, bucket: str, access: Access, patience: Patience) -> None:
        self.bucket = bucket
        self._access = access
        self._patience = patience
        self._closing = threading.Event()
        self._making = threading.Lock()
        self._pid = os.getpid()
        self._clients: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Bucket({self.bucket!r}, {self._access!r})"

    def close(self) -> None:
        """Waiting threads stop to ask again."""
        self._closing.set()
        if bodies := self._clients.get("bodies"):
            bodies.close()

    def list(self, prefix: str) -> Iterator[ObjectStat]:
        """See ObjectStore. Every call asks the store: nothing is remembered of earlier ones."""
        asked = self._asked("list", prefix)
        query = {"list-type": "2", "encoding-type": "url", "max-keys": str(PAGE)}
        query["prefix"] = prefix.rstrip("/") + "/" if prefix else ""
        while True:
            page, token = self._patiently(asked, lambda: s3_listing.parse(asked, self._bodies().listed(asked, query)))
            yield from page
            if not token:
                return
            query["continuation-token"] = token

    def head(self, key: str) -> ObjectStat | None:
        """See ObjectStore."""
        found = self.describe(key)
        return None if found is None else s3_listing.stat(key, found)

    def describe(self, key: str) -> Mapping[str, str] | None:
        """The headers with which the store describes an object, names in lower case; None if it is not there.

        A refusal of a HEAD request does not say why, so that is asked for by reading a byte.
        """
        asked = self._asked("read", key)
        try:
            return self._patiently(asked, lambda: self._bodies().described(asked))
        except NotThere:
            return None
        except ValueError:
            with suppress(NotThere, Changed):
                self.read(key, 0, 1)
            raise

    def read(self, key: str, start: int = 0, end: int | None = None, *, etag: str | None = None) -> bytes:
        """See ObjectStore."""
        if end is not None and end <= start:
            return b""
        asked = self._asked("read", key)
        try:
            return self._patiently(asked, lambda: self._read(asked, start, end, etag))
        except Changed:
            if start == 0 and end is None:  # an empty object has no range of bytes to give
                found = self.head(key)
                if found is not None and found.size == 0 and etag in (None, found.etag):
                    return b""
            raise

    def fill(self, key: str, start: int, into: memoryview, *, etag: str, whole: bool = False) -> str:
        """As `read`, into a buffer that has the length of what is wanted; `whole` if that is all of the object.

        What has come before the store breaks off is not asked for again. Returns the CRC32 of the whole object where
        the store keeps one and the answer came in one piece, in base64.
        """
        asked, done, crc32 = self._asked("read", key), 0, ""

        def once() -> None:
            nonlocal done, crc32
            begin, rest = start + done, into[done:]
            before = done
            with self._bodies().get(asked, begin, start + len(into), etag, whole=whole and not done) as body:
                for count in body.chunks_into(rest):
                    done = before + count
            crc32 = body.crc32 if whole and not before else ""
            if done < len(into):
                raise Passing(f"{asked.store} gives {done} bytes where {len(into)} were asked for")

        self._patiently(asked, once)
        return crc32

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """See ObjectStore."""
        nonce = secrets.token_hex(8)
        how = {"Key": key, "Body": data} | ({"IfNoneMatch": "*", "Metadata": {NONCE: nonce}} if create else {})
        try:
            self._ask("write", key, "put_object", **how)
        except Changed:
            found = self.describe(key)
            if found and found.get(f"x-amz-meta-{NONCE}") == nonce:  # we created it; only the answer was lost
                return
            raise Exists(f"s3://{self.bucket}/{key} is there already.") from None

    def put_file(self, key: str, path: Path, *, moved: Moved | None = None) -> None:
        """See ObjectStore."""
        size = path.stat().st_size
        asked = self._asked("write", key)
        self._patiently(asked, lambda: self._put_file(asked, path, size, moved))
        found = self.head(key)
        if found is None or found.size != size:
            raise StoreUnavailable(f"{asked.uri} has another size in the store than the {size} bytes that were sent.")

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        with suppress(NotThere):
            self._ask("delete", key, "delete_object", Key=key)

    def abort_uploads(self, prefix: str) -> int:
        """See ObjectStore."""
        found = self._ask("list", prefix, "list_multipart_uploads", Prefix=f"{prefix}/").get("Uploads", ())
        for one in found:
            with suppress(NotThere):
                how = {"Key": one["Key"], "UploadId": one["UploadId"]}
                self._ask("delete", one["Key"], "abort_multipart_upload", **how)
        return len(found)

    def _asked(self, verb: str, key: str) -> Asked:
        return Asked(verb, self.bucket, key, self._access.endpoint_url)

    def _ask(self, verb: str, key: str, method: str, **how: Any) -> dict[str, Any]:
        asked = self._asked(verb, key)
        return self._patiently(asked, lambda: self._once(asked, method, how))

    def _patiently(self, asked: Asked, once: Callable[[], _Answer]) -> _Answer:
        """Ask until there is an answer, the patience ends, or the store is closed."""
        until = time.monotonic() + self._patience.seconds
        renewed = False
        for attempt in range(self._patience.attempts):
            try:
                return once()
            except Expired as error:
                if renewed or self._access.keys is not None:
                    raise ValueError(str(error)) from None
                renewed, why = True, str(error)
                self._forget_clients()
            except Passing as error:
                why = str(error)
            delay = self._patience.delay(attempt)
            if time.monotonic() + delay > until or self._closing.wait(delay):
                break
        raise StoreUnavailable(
            f"{asked.uri}: {why.rstrip('.')}, after {attempt + 1} attempts; the same command goes on when it is mended."
        )

    def _once(self, asked: Asked, method: str, how: dict[str, Any]) -> dict[str, Any]:
        """One request through s3fs."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

        try:
            return cast("dict[str, Any]", self._s3fs().call_s3(method, Bucket=self.bucket, **how))
        except (NoCredentialsError, PartialCredentialsError):
            raise s3_clients.no_keys() from None
        except (OSError, ClientError, BotoCoreError) as error:
            told = error if isinstance(error, ClientError) else error.__cause__
            if isinstance(told, ClientError):
                raise _judge_client_error(asked, told) from None
            raise Passing(f"{asked.store} does not answer ({type(error).__name__})") from None

    def _read(self, asked: Asked, start: int, end: int | None, etag: str | None) -> bytes:
        with self._bodies().get(asked, start, end, etag) as body:
            buffer = bytearray(body.length)
            done = max(body.chunks_into(memoryview(buffer)), default=0)
        if done < len(buffer):
            raise Passing(f"{asked.store} gives {done} bytes where {len(buffer)} were asked for")
        return bytes(buffer)

    def _put_file(self, asked: Asked, path: Path, size: int, moved: Moved | None) -> None:
        import obstore
        from obstore.exceptions import BaseError

        store = self._sender()
        try:
            obstore.put(
                store,
                asked.key,
                _chunks(path, moved),
                use_multipart=size > UPLOAD_PART,
                chunk_size=UPLOAD_PART,
                max_concurrency=UPLOADS_AT_ONCE,
            )
        except (BaseError, ValueError) as error:
            raise _judge_text(asked, str(error)) from None

    def _forget_clients(self) -> None:
        """Keys are looked for anew with the next request."""
        with self._making:
            self._clients.clear()

    def _s3fs(self) -> Any:
        return self._client("s3fs", lambda: s3_clients.make_s3fs(self._access))

    def _sender(self) -> "S3Store":
        return cast("S3Store", self._client("obstore", lambda: s3_clients.make_obstore(self.bucket, self._access)))

    def _bodies(self) -> Bodies:
        made = self._client("bodies", lambda: Bodies(self.bucket, self._access, s3_clients.keys_of(self._access)))
        return cast("Bodies", made)

    def _client(self, kind: str, make: Callable[[], Any]) -> Any:
        """The client of a kind, made when it is first wanted; a forked child makes its own."""
        if os.getpid() != self._pid:
            self._pid, self._clients, self._making = os.getpid(), {}, threading.Lock()
        with self._making:
            if kind not in self._clients:
                self._clients[kind] = make()
            return self._clients[kind]


def _judge_client_error(asked: Asked, error: Any) -> Exception:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return s3_errors.judge(asked, str(error.response.get("Error", {}).get("Code", "")), status)


def _judge_text(asked: Asked, text: str) -> Exception:
    code, status = s3_errors.code_in(text)
    if not code and not status:
        return Passing(f"{asked.store} does not answer or breaks off")
    return s3_errors.judge(asked, code, status)


def _chunks(path: Path, moved: Moved | None) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(4 << 20):
            yield chunk
            if moved:
                moved(len(chunk))
