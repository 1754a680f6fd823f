"""A proxy before an HTTP server that does harm by plan: what a store, or the network before it, may do to a client.

It passes requests on as they are (the Host header too: it is part of S3's signature) and keeps a list of them. A
`Fault` says which requests it is for and what happens to them; the first fault of the plan that fits and is not used up
is done. All waits end when the proxy is closed.
"""

import contextlib
import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

CHUNK = 64 << 10
UPSTREAM_SECONDS = 60
ERRORS = {
    "internal": (500, "InternalError"),
    "slow_down": (503, "SlowDown"),
    "expired": (403, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
    "skewed": (403, "RequestTimeTooSkewed"),
}
"""S3's own refusals. The server behind does not see the request."""

KINDS = (*ERRORS, "reset", "stall", "lose_reply", "cut", "short", "changed", "stale", "zeros", "call", "drop")


@dataclass
class Fault:
    """Harm for the requests that fit; see `KINDS`.

    internal, slow_down, expired, denied, skewed: the answer is that error of S3.
    reset: after `at` bytes of the request's body the connection is reset; the server behind does not see it.
    stall: silence for `seconds` before the answer, or after `at` bytes of its body; then it goes on.
    lose_reply: the server behind has done it, and the connection is reset in place of its answer.
    cut: `at` bytes of the answer's body, then a clean close; the Content-Length still promises all of it.
    short: `at` bytes of the answer's body, with a Content-Length that says so.
    changed: the answer's body has its bits turned over and the object another ETag.
    zeros: `count` bytes of the answer's body from `at` on are zeros.
    stale: the oldest answer that was given to the same listing is given again.
    drop: the answer is 200 as for a body that was stored, and the server behind gets its first `at` bytes as the object,
        through `keep(target, body)`, or nothing where there is no `keep`.
    call: `hook` is called before the request is passed on.
    """

    do: str
    method: str = ""
    path: str = ""
    """A regular expression that is searched in the path with its query."""
    times: int = 1
    """How many requests it is for; -1 for all."""
    skip: int = 0
    """How many that fit go unharmed before."""
    at: int = 0
    count: int = 4096
    seconds: float = 3600.0
    hook: Callable[[], Any] | None = None
    keep: Callable[[str, bytes], Any] | None = None
    done: int = 0

    def __post_init__(self) -> None:
        assert self.do in KINDS, f"{self.do} is none of {KINDS}"

    def fits(self, method: str, target: str) -> bool:
        return (not self.method or self.method == method) and re.search(self.path, target) is not None


@dataclass
class Request:
    """A request that came: `status` is what the client was told, 0 if nothing."""

    method: str
    target: str
    time: float
    fault: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class FaultProxy:
    """Listens on loopback until it is closed; `endpoint` is its URL. Safe to plan while requests run."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream)
        self.requests: list[Request] = []
        self.closed = threading.Event()
        self.listings: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        self.ignored: str = ""
        """A header, in lower case, that the store behind does not know; `sign` signs a request anew without it."""
        self.sign: Callable[[str, str, dict[str, str]], dict[str, str]] | None = None
        self._plan: list[Fault] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def plan(self, *faults: Fault) -> None:
        """Add faults to the plan."""
        with self._lock:
            self._plan += faults

    def clear(self) -> None:
        """From now on every request passes unharmed, and the list of requests is empty."""
        with self._lock:
            self._plan.clear()
            self.requests.clear()

    def seen(self, method: str = "", path: str = "") -> list[Request]:
        """The requests that came, oldest first."""
        return [
            one for one in list(self.requests) if method in ("", one.method) and re.search(path, one.target) is not None
        ]

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def note(self, method: str, target: str, headers: dict[str, str]) -> tuple[Request, Fault | None]:
        """Write the request down; the fault that it meets."""
        request = Request(method, target, time.monotonic(), headers=headers)
        with self._lock:
            self.requests.append(request)
            for fault in self._plan:
                if not fault.fits(method, target):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                if fault.times != 0:
                    fault.times -= 1
                    fault.done += 1
                    request.fault = fault.do
                    return request, fault
        return request, None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away, or that we threw out, is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = UPSTREAM_SECONDS
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's word
        """The proxy keeps its own list."""

    def _serve(self) -> None:
        self.proxy = self.server.proxy
        self.request_, fault = self.proxy.note(self.command, self.path, dict(self.headers.items()))
        do = fault.do if fault else ""
        if fault and do == "reset":
            self._take(fault.at)
            self._reset()
        elif do in ERRORS:
            for _ in self._body():
                pass
            self._refuse(*ERRORS[do])
        elif fault and do == "drop":
            self._drop(fault)
        else:
            self._pass_on(fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _serve  # noqa: N815 - the base class looks them up by these names

    def _pass_on(self, fault: Fault | None) -> None:
        do = fault.do if fault else ""
        if fault and do == "call" and fault.hook:
            fault.hook()
        if fault and do == "stall" and not fault.at and self.proxy.closed.wait(fault.seconds):
            self._reset()
            return
        with contextlib.closing(self._ask()) as upstream:
            try:
                answer = upstream.getresponse()
            except (OSError, HTTPException):
                self._reset()
                return
            if do == "lose_reply":
                answer.read()
                self._reset()
            elif self.command == "GET" and re.search(r"[?&]list-type=|[?&]prefix=", self.path):
                self._listing(answer, stale=do == "stale", fault=fault)
            else:
                self._answer(answer, fault)

    def _ask(self) -> HTTPConnection:
        """The request, passed on; its answer is still to be read."""
        upstream = HTTPConnection(
            self.proxy.upstream.hostname or "", self.proxy.upstream.port, timeout=UPSTREAM_SECONDS
        )
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")}
        if self.proxy.ignored in (name.lower() for name in headers) and self.proxy.sign:
            kept = {name: value for name, value in headers.items() if name.lower() != self.proxy.ignored}
            headers = self.proxy.sign(self.command, f"http://{self.headers['Host']}{self.path}", kept)
        for name, value in headers.items():
            upstream.putheader(name, value)
        upstream.endheaders()
        try:
            for data in self._body():
                upstream.send(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
            if chunked:
                upstream.send(b"0\r\n\r\n")
        except OSError:
            pass  # the server has answered early; its answer is read next
        return upstream

    def _answer(self, answer: HTTPResponse, fault: Fault | None) -> None:
        length = answer.getheader("Content-Length")
        if length is None and self.command != "HEAD":
            self._whole(answer.status, answer.getheaders(), answer.read(), fault)
            return
        total = int(length or 0)
        said = min(fault.at, total) if fault and fault.do == "short" else total
        body = answer if self.command != "HEAD" else None
        self._stream(answer.status, answer.getheaders(), _pieces(body), said, fault)

    def _whole(self, status: int, headers: list[tuple[str, str]], data: bytes, fault: Fault | None) -> None:
        said = min(fault.at, len(data)) if fault and fault.do == "short" else len(data)
        pieces = (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
        self._stream(status, headers, pieces, said, fault)

    def _listing(self, answer: HTTPResponse, *, stale: bool, fault: Fault | None) -> None:
        fresh = (answer.status, answer.getheaders(), answer.read())
        oldest = self.proxy.listings.setdefault(self.path, fresh)
        self._whole(*(oldest if stale else fresh), fault)

    def _stream(
        self, status: int, headers: list[tuple[str, str]], body: Iterator[bytes], said: int, fault: Fault | None
    ) -> None:
        """Send an answer that says it has `said` bytes."""
        do, at = (fault.do, fault.at) if fault else ("", 0)
        self.request_.status = status
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() in ("content-length", "transfer-encoding", "connection"):
                continue
            self.send_header(name, f'"{"0" * 32}"' if do == "changed" and name.lower() == "etag" else value)
        self.send_header("Content-Length", str(said))
        if do == "short":  # honest about that, too: else the next request might meet the closing connection
            self.send_header("Connection", "close")
        self.end_headers()
        done = 0
        for data in body:
            if do in ("cut", "short") and done + len(data) >= at:
                self.wfile.write(data[: at - done])
                self.wfile.flush()
                self.close_connection = True
                return
            if do == "stall" and at and done <= at < done + len(data):
                self.wfile.write(data[: at - done])
                self.wfile.flush()
                if self.proxy.closed.wait(fault.seconds if fault else 0):
                    self._reset()
                    return
                data, done = data[at - done :], at
                at = 0
            self.wfile.write(_harmed(data, done, fault))
            done += len(data)

    def _body(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left and (data := self.rfile.read1(min(CHUNK, left))):
            left -= len(data)
            yield data

    def _take(self, count: int) -> None:
        for data in self._body() if count else ():
            count -= len(data)
            if count <= 0:
                return

    def _refuse(self, status: int, code: str) -> None:
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code} by plan</Message>'
            "<RequestId>0</RequestId></Error>"
        )
        headers = [("Content-Type", "application/xml")]
        self._stream(status, headers, iter([] if self.command == "HEAD" else [text.encode()]), len(text), None)

    def _drop(self, fault: Fault) -> None:
        """Lie: say that all of it is stored."""
        body = b"".join(self._body())
        if fault.keep is not None:
            fault.keep(self.path, body[: fault.at])
        etag = hashlib.md5(body).hexdigest()
        self._stream(200, [("ETag", f'"{etag}"')], iter([]), 0, None)

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.wfile = _Nowhere()
            self.rfile.close()
            self.connection.close()


class _Nowhere:
    """What is written after a reset."""

    closed = True

    def write(self, data: bytes) -> int:
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _pieces(answer: HTTPResponse | None) -> Iterator[bytes]:
    while answer is not None and (data := answer.read1(CHUNK)):
        yield data


def _harmed(data: bytes, at: int, fault: Fault | None) -> bytes:
    if fault is not None and fault.do == "changed":
        return bytes(byte ^ 0xFF for byte in data)
    if fault is not None and fault.do == "zeros":
        begin, end = max(fault.at, at), min(fault.at + fault.count, at + len(data))
        if begin < end:
            return data[: begin - at] + bytes(end - begin) + data[end - at :]
    return data
