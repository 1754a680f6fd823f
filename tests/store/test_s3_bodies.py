"""Requests for bodies: signed as AWS's own library does, over connections that are kept."""

import http.server
import threading
from urllib.parse import quote

import pytest
from pydantic import SecretStr

from everstep.store import s3, s3_clients, s3_errors
from everstep.store.s3_bodies import Bodies, _address
from everstep.store.s3_errors import Asked


def access(**changes):
    keys = s3.Keys("AKIDEXAMPLE", SecretStr("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"), SecretStr("to/ken=="))
    return s3.Access(**({"endpoint_url": "http://127.0.0.1:9", "region": "eu-west-1", "keys": keys} | changes))


@pytest.mark.parametrize("key", ["a", "a/b c.txt", "ü #%*~+&=/x", "a//b", "~_-."])
def test_the_signature_is_that_of_botocore(key):
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    way = access()
    bodies = Bodies("bucket", way, s3_clients.keys_of(way))
    path = f"/bucket/{quote(key, safe='/')}"
    query = "list-type=2&prefix=a%2Fb%20c" if key == "a" else ""
    ours = bodies._signed("GET", path, query, {"x-amz-checksum-mode": "ENABLED", "Range": "bytes=0-1"})
    keys = s3_clients.keys_of(way)()
    auth = S3SigV4Auth(Credentials(keys.access_key, keys.secret, keys.token), "s3", "eu-west-1")
    request = AWSRequest(
        "GET", f"http://127.0.0.1:9{path}?{query}".rstrip("?"), headers={"x-amz-checksum-mode": "ENABLED"}
    )
    request.context["timestamp"] = ours["x-amz-date"]
    for name in ("x-amz-content-sha256", "x-amz-date", "x-amz-security-token"):
        request.headers[name] = ours[name]
    theirs = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    assert ours["Authorization"].endswith(f"Signature={theirs}")


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({}, ("http", "127.0.0.1:9", "/bucket")),
        ({"addressing": "virtual"}, ("http", "bucket.127.0.0.1:9", "")),
        ({"endpoint_url": None}, ("https", "bucket.s3.eu-west-1.amazonaws.com", "")),
        ({"endpoint_url": None, "region": "cn-north-1"}, ("https", "bucket.s3.cn-north-1.amazonaws.com.cn", "")),
        ({"endpoint_url": None, "addressing": "path"}, ("https", "s3.eu-west-1.amazonaws.com", "/bucket")),
    ],
)
def test_where_a_bucket_is(changes, address):
    assert _address("bucket", access(**changes)) == address
    assert _address("my.bucket", access(endpoint_url=None))[2] == "/my.bucket"


class Odd(http.server.BaseHTTPRequestHandler):
    """Answers as the test says."""

    protocol_version = "HTTP/1.1"
    status, headers_, body = 200, {}, b""

    def do_GET(self):
        self.send_response(self.status)
        for name, value in ({"Content-Length": str(len(self.body))} | self.headers_).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.body)
        self.close_connection = "Content-Length" in self.headers_

    def log_message(self, *args):
        pass


@pytest.fixture
def odd():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Odd,), {}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


ODD = {
    "ignores the range": (200, {}, b"x" * 100, s3_errors.Passing, "the whole object where a part"),
    "another range": (206, {"Content-Range": "bytes 0-9/100"}, b"x" * 10, s3_errors.Passing, "another range"),
    "no range": (206, {}, b"x" * 10, s3_errors.Passing, "another range"),
    "too few": (206, {"Content-Range": "bytes 10-14/100"}, b"x" * 5, s3_errors.Passing, "offers 5 bytes where 10"),
    "too many": (206, {"Content-Range": "bytes 10-29/100"}, b"x" * 20, s3_errors.Passing, "offers 20 bytes"),
    "no length": (
        206,
        {"Content-Range": "bytes 10-19/100", "Content-Length": None},
        b"",
        s3_errors.Passing,
        "how long",
    ),
    "smaller": (206, {"Content-Range": "bytes 10-14/15"}, b"x" * 5, s3.Changed, "shorter than it was"),
    "a page": (502, {}, b"<html>Bad gateway</html>", s3_errors.Passing, "answers 502"),
    "elsewhere": (301, {}, b"<Error><Code>PermanentRedirect</Code></Error>", ValueError, "in another region; set s3"),
    "clock": (403, {}, b"<Error><Code>RequestTimeTooSkewed</Code></Error>", ValueError, "set the clock right"),
    "html": (403, {}, b"<html>hush-hush</html>", ValueError, "no right to read it"),
}


@pytest.mark.parametrize("case", ODD)
def test_answers_that_are_none(odd, case):
    status, headers, body, kind, words = ODD[case]
    for name, value in (("status", status), ("headers_", headers), ("body", body)):
        setattr(odd.RequestHandlerClass, name, value)
    way = access(endpoint_url=f"http://127.0.0.1:{odd.server_port}")
    bodies = Bodies("bucket", way, s3_clients.keys_of(way))
    asked = Asked("read", "bucket", "a", way.endpoint_url)
    with pytest.raises(kind, match=words) as error, bodies.get(asked, 10, 20, None):
        pass
    assert "hush" not in str(error.value)


def test_connections_are_kept_and_a_dead_one_is_replaced(s3_server, s3_proxy):
    bucket = s3_server.bucket()
    s3_server.put(bucket, {"a": b"x" * 100_000})
    key, secret = s3_server.keys["admin"]
    way = access(endpoint_url=s3_proxy.endpoint, keys=s3.Keys(key, SecretStr(secret)), region=s3_server.region)
    store = s3.open_store(bucket, way)
    for _ in range(3):
        assert store.read("a") == b"x" * 100_000
    (kept,) = store._bodies()._idle
    kept.abort()
    assert store.read("a") == b"x" * 100_000
    assert store._bodies()._idle != [kept]
    store.close()
    assert store._bodies()._idle == []
