"""What is read from a bucket: bodies, straight from the socket into a buffer, and lists. Requests are signed here.

Measured (`docs/decisions/0004-staging-from-s3.md`): obstore takes a third more processor time per byte, because a body is
gathered in pieces and copied once more, and its threads do not survive a fork; s3fs takes half a second to begin. There
is one attempt in here; patience is the bucket's.
"""

import datetime as dt
import hashlib
import hmac
import os
import re
import ssl
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from everstep.store import http, s3_clients, s3_errors, s3_listing
from everstep.store.http import Connection, Head
from everstep.store.objects import Changed
from everstep.store.s3_access import Access
from everstep.store.s3_clients import Frozen
from everstep.store.s3_errors import Asked, Passing

CHUNK = 4 << 20
LIST_LIMIT = 64 << 20
ERROR_LIMIT = 1 << 20
UNSIGNED = "UNSIGNED-PAYLOAD"
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")


@dataclass
class Body:
    """An answer: `length` bytes of an object of `size`, to be read in order."""

    connection: Connection
    head: Head
    asked: Asked
    length: int
    size: int
    until: float
    done: int = 0

    @property
    def crc32(self) -> str:
        """The CRC32 of the whole object as the store keeps it, in base64; empty where it keeps none."""
        return s3_listing.crc32(self.head.headers)

    def chunks_into(self, buffer: memoryview) -> Iterator[int]:
        """Fill the buffer from its start; yields how many bytes there are so far. It may end before it is full."""
        for begin in range(0, len(buffer), CHUNK):
            part = buffer[begin : begin + CHUNK]
            for count in self.connection.into(part):
                self.done = begin + count
                yield self.done
                if time.monotonic() > self.until:
                    raise Passing(f"{self.asked.store} gives its bytes too slowly")
            if self.done < begin + len(part):
                return


class Bodies:
    """The connections to one bucket. Several threads may ask at once; each answer has a connection to itself."""

    def __init__(self, bucket: str, access: Access, keys: Callable[[], Frozen]) -> None:
        self._keys = keys
        self._region = access.region
        scheme, self._host, self._base = _address(bucket, access)
        self._connect, self._prefix = http.connector(
            scheme, self._host, s3_clients.CONNECT_SECONDS, s3_clients.READ_SECONDS
        )
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._signing: tuple[str, bytes] = ("", b"")
        self._pid = os.getpid()
        weakref.finalize(self, _close_all, self._idle)

    @contextmanager
    def get(
        self, asked: Asked, start: int, end: int | None, etag: str | None, *, whole: bool = False
    ) -> Iterator[Body]:
        """Ask for bytes from `start` up to, not with, `end`; `whole` says that this is all of the object.

        Raises Passing and what `s3_errors.judge` makes of a refusal. A body that is not read to its end costs the
        connection.
        """
        headers = {"If-Match": f'"{etag}"'} if etag else {}
        if whole:
            headers["x-amz-checksum-mode"] = "ENABLED"
        else:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with self._connection(asked) as (connection, keep):
            head = self._answer(connection, asked, "GET", "", headers)
            body = _body(connection, head, asked, start, end, etag)
            yield body
            if body.done == body.length:
                keep(head)

    def listed(self, asked: Asked, query: Mapping[str, str]) -> bytes:
        """The answer to a question about the bucket itself, which is XML."""
        text = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items()))
        with self._connection(asked) as (connection, keep):
            head = self._answer(connection, asked, "GET", text, {})
            body = connection.rest(head, LIST_LIMIT)
            keep(head)
        return body

    def described(self, asked: Asked) -> Mapping[str, str]:
        """The headers of an object, its checksums among them."""
        with self._connection(asked) as (connection, keep):
            head = self._answer(connection, asked, "HEAD", "", {"x-amz-checksum-mode": "ENABLED"})
            keep(head)
        return head.headers

    def close(self) -> None:
        """Close the idle connections, and break off what is under way."""
        _close_all(self._idle)
        for connection in list(self._busy):
            connection.abort()

    @contextmanager
    def _connection(self, asked: Asked) -> Iterator[tuple[Connection, Callable[[Head], None]]]:
        """A connection for one question; it is kept for another if `keep` is called when the answer has been read."""
        connection, kept = None, False

        def keep(head: Head) -> None:
            nonlocal kept
            kept = head.headers.get("connection", "").lower() != "close"

        try:
            connection, is_used = self._take()
            self._busy.add(connection)
            yield connection, keep
        except ssl.SSLCertVerificationError as error:
            raise ValueError(
                f"s3: the certificate of {asked.store} is not trusted ({error.verify_message}); name the authority's "
                "file in AWS_CA_BUNDLE."
            ) from None
        except OSError as error:
            if connection and is_used:
                _close_all(self._idle)  # it was closed while nobody used it, and so were the others, most likely
            raise Passing(f"{asked.store} does not answer or breaks off ({type(error).__name__})") from None
        finally:
            if connection:
                self._busy.discard(connection)
                if kept:
                    self._idle.append(connection)
                else:
                    connection.close()

    def _take(self) -> tuple[Connection, bool]:
        if os.getpid() != self._pid:  # the parent's connections are not ours to use
            _close_all(self._idle)
            self._pid = os.getpid()
        try:
            return self._idle.pop(), True
        except IndexError:
            return self._connect(), False

    def _answer(self, connection: Connection, asked: Asked, method: str, query: str, headers: dict[str, str]) -> Head:
        """Send a request and read the head of its answer; a refusal is raised."""
        path = self._base + (f"/{quote(asked.key, safe='/')}" if not query else "" if self._base else "/")
        target = f"{self._prefix}{path}?{query}" if query else f"{self._prefix}{path}"
        connection.send(method, target, self._signed(method, path, query, headers))
        head = connection.head()
        if head.status in (200, 206):
            return head
        text = b"" if method == "HEAD" else connection.rest(head, ERROR_LIMIT)
        raise s3_errors.judge(asked, s3_errors.code_in(text.decode("utf-8", "replace"))[0], head.status)

    def _signed(self, method: str, path: str, query: str, more: Mapping[str, str]) -> dict[str, str]:
        """All headers of a request, with AWS's Signature Version 4. Only those of AWS's own need be signed."""
        keys, now = self._keys(), dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": self._host, "x-amz-content-sha256": UNSIGNED, "x-amz-date": now, **more}
        if keys.token:
            headers["x-amz-security-token"] = keys.token
        names = sorted(name for name in headers if name == "host" or name.startswith("x-amz-"))
        lines = "".join(f"{name}:{headers[name]}\n" for name in names)
        request = f"{method}\n{path}\n{query}\n{lines}\n{';'.join(names)}\n{UNSIGNED}"
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = hmac.digest(self._signing_key(keys.secret, scope), text.encode(), "sha256").hex()
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{scope}, SignedHeaders={';'.join(names)}, "
            f"Signature={signature}"
        )
        return headers

    def _signing_key(self, secret: str, scope: str) -> bytes:
        known, key = self._signing
        wanted = f"{scope}/{hash(secret)}"
        if known != wanted:
            key = f"AWS4{secret}".encode()
            for part in scope.split("/"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._signing = (wanted, key)
        return key


def _close_all(connections: list[Connection]) -> None:
    while connections:
        connections.pop().close()


def _body(connection: Connection, head: Head, asked: Asked, start: int, end: int | None, etag: str | None) -> Body:
    """The answer, if it is one to what was asked."""
    found, length = head.headers.get("etag", "").strip('"'), head.length
    if etag and found and found != etag:
        raise Changed(f"{asked.uri} is not the object any more that it was.")
    if length is None:
        raise Passing(f"{asked.store} does not say how long its answer is")
    size = length
    if head.status == 206:
        told = _RANGE.match(head.headers.get("content-range", ""))
        if not told or int(told[1]) != start:
            raise Passing(f"{asked.store} gives another range than was asked for")
        size = int(told[3])
        if end is not None and size < end:
            raise Changed(f"{asked.uri} is shorter than it was.")
    elif start:
        raise Passing(f"{asked.store} gives the whole object where a part was asked for")
    wanted = (size if end is None else end) - start
    if length != wanted:
        raise Passing(f"{asked.store} offers {length} bytes where {wanted} were asked for")
    return Body(connection, head, asked, length, size, time.monotonic() + s3_clients.REQUEST_SECONDS)


def _address(bucket: str, access: Access) -> tuple[str, str, str]:
    """Scheme, host, and the path before the key."""
    china = ".cn" if access.region.startswith("cn-") else ""
    endpoint = access.endpoint_url or f"https://s3.{access.region}.amazonaws.com{china}"
    scheme, host = urlsplit(endpoint)[:2]
    if s3_clients.addressing(access) == "virtual" and "." not in bucket:
        return scheme, f"{bucket}.{host}", ""
    return scheme, host, f"/{bucket}"
