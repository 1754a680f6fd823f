"""Bodies of objects, straight from the socket into a buffer: GET requests over kept connections, signed here.

Measured (`docs/decisions/0004-staging-from-s3.md`): obstore takes a third more processor time per byte, because a body is
gathered in pieces and copied once more, and its threads do not survive a fork. There is one attempt in here; patience is
the bucket's.
"""

import datetime as dt
import hashlib
import hmac
import os
import re
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from everstep.store import s3_clients, s3_errors
from everstep.store.objects import Changed
from everstep.store.s3_access import Access
from everstep.store.s3_clients import Frozen
from everstep.store.s3_errors import Asked, Passing

CHUNK = 1 << 20
UNSIGNED = "UNSIGNED-PAYLOAD"
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")


@dataclass
class Body:
    """An answer: `length` bytes of an object of `size`, to be read in order."""

    response: HTTPResponse
    asked: Asked
    length: int
    size: int
    etag: str
    until: float

    @property
    def crc32(self) -> str:
        """The CRC32 of the whole object as the store keeps it, in base64; empty where it keeps none."""
        kind = self.response.getheader("x-amz-checksum-type", "FULL_OBJECT")
        return self.response.getheader("x-amz-checksum-crc32", "") if kind == "FULL_OBJECT" else ""

    def chunks_into(self, buffer: memoryview) -> Iterator[int]:
        """Fill the buffer from its start; yields how many bytes there are so far. It may end before it is full."""
        done = 0
        while done < len(buffer):
            count = self.response.readinto(buffer[done : done + CHUNK])
            if not count:
                return
            done += count
            yield done
            if time.monotonic() > self.until:
                raise Passing(f"{self.asked.store} gives its bytes too slowly")


class Bodies:
    """The connections to one bucket. Several threads may ask at once; each answer has a connection to itself."""

    def __init__(self, bucket: str, access: Access, keys: Callable[[], Frozen]) -> None:
        self._keys = keys
        self._region = access.region
        scheme, self._host, self._base = _address(bucket, access)
        self._connect, self._prefix = _connector(scheme, self._host)
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
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
        connection, is_used = self._take()
        self._busy.add(connection)
        response, is_kept = None, False
        try:
            response = self._answer(connection, asked, start, end, etag, whole=whole)
            yield _body(asked, response, start, end, etag)
            if response.isclosed():
                self._idle.append(connection)
                is_kept = True
        except ssl.SSLCertVerificationError as error:
            raise ValueError(
                f"s3: the certificate of {asked.store} is not trusted ({error.verify_message}); name the authority's "
                "file in AWS_CA_BUNDLE."
            ) from None
        except (OSError, HTTPException) as error:
            if is_used:
                _close_all(self._idle)  # it was closed while nobody used it, and so were the others, most likely
            raise Passing(f"{asked.store} does not answer or breaks off ({type(error).__name__})") from None
        finally:
            self._busy.discard(connection)
            if not is_kept:
                connection.close()
                if response is not None:
                    response.close()

    def close(self) -> None:
        """Close the idle connections, and break off what is under way."""
        _close_all(self._idle)
        for connection in list(self._busy):
            with suppress(OSError):
                if connection.sock:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _take(self) -> tuple[HTTPConnection, bool]:
        if os.getpid() != self._pid:  # the parent's connections are not ours to use
            _close_all(self._idle)
            self._pid = os.getpid()
        try:
            return self._idle.pop(), True
        except IndexError:
            return self._connect(), False

    def _answer(
        self, connection: HTTPConnection, asked: Asked, start: int, end: int | None, etag: str | None, *, whole: bool
    ) -> HTTPResponse:
        path = f"{self._base}/{quote(asked.key, safe='/')}"
        connection.putrequest("GET", self._prefix + path, skip_host=True, skip_accept_encoding=True)
        headers = {"x-amz-checksum-mode": "ENABLED"} if whole else {}
        for name, value in self._signed(path, headers):
            connection.putheader(name, value)
        if not whole:
            connection.putheader("Range", f"bytes={start}-{'' if end is None else end - 1}")
        if etag:
            connection.putheader("If-Match", f'"{etag}"')
        connection.endheaders()
        return connection.getresponse()

    def _signed(self, path: str, headers: dict[str, str]) -> Iterator[tuple[str, str]]:
        """The headers of AWS's Signature Version 4 for a GET without a query. Range and If-Match need no signature."""
        keys, now = self._keys(), dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = headers | {"host": self._host, "x-amz-content-sha256": UNSIGNED, "x-amz-date": now}
        if keys.token:
            headers["x-amz-security-token"] = keys.token
        names = sorted(headers)
        lines = "".join(f"{name}:{headers[name]}\n" for name in names)
        request = f"GET\n{path}\n\n{lines}\n{';'.join(names)}\n{UNSIGNED}"
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = hmac.digest(self._signing_key(keys.secret, scope), text.encode(), "sha256").hex()
        yield from headers.items()
        yield (
            "Authorization",
            (
                f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{scope}, SignedHeaders={';'.join(names)}, "
                f"Signature={signature}"
            ),
        )

    def _signing_key(self, secret: str, scope: str) -> bytes:
        known, key = self._signing
        wanted = f"{scope}/{hash(secret)}"
        if known != wanted:
            key = f"AWS4{secret}".encode()
            for part in scope.split("/"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._signing = (wanted, key)
        return key


def _close_all(connections: list[HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _body(asked: Asked, response: HTTPResponse, start: int, end: int | None, etag: str | None) -> Body:
    """The answer, if it is one to what was asked."""
    if response.status not in (200, 206):
        text = response.read(65536).decode("utf-8", "replace")
        raise s3_errors.judge(asked, s3_errors.code_in(text)[0], response.status)
    found, length = response.getheader("ETag", "").strip('"'), response.length
    if etag and found and found != etag:
        raise Changed(f"{asked.uri} is not the object any more that it was.")
    if length is None:
        raise Passing(f"{asked.store} does not say how long its answer is")
    size = length
    if response.status == 206:
        told = _RANGE.match(response.getheader("Content-Range", ""))
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
    return Body(response, asked, length, size, found, time.monotonic() + s3_clients.REQUEST_SECONDS)


def _address(bucket: str, access: Access) -> tuple[str, str, str]:
    """Scheme, host, and the path before the key."""
    china = ".cn" if access.region.startswith("cn-") else ""
    endpoint = access.endpoint_url or f"https://s3.{access.region}.amazonaws.com{china}"
    scheme, host = urlsplit(endpoint)[:2]
    if s3_clients.addressing(access) == "virtual" and "." not in bucket:
        return scheme, f"{bucket}.{host}", ""
    return scheme, host, f"/{bucket}"


def _connector(scheme: str, host: str) -> tuple[Callable[[], HTTPConnection], str]:
    """How to connect, by way of the proxy that the usual variables name if there is one; what stands before a path."""
    proxy = None if proxy_bypass(host) else getproxies().get(scheme)
    parts = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy or host}")
    address, port = parts.hostname or "", parts.port
    if scheme != "https":
        return lambda: HTTPConnection(address, port, timeout=s3_clients.READ_SECONDS), f"http://{host}" if proxy else ""
    context = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE"))

    def connect() -> HTTPConnection:
        made = HTTPSConnection(address, port, timeout=s3_clients.READ_SECONDS, context=context)
        if proxy:
            made.set_tunnel(host)
        return made

    return connect, ""
