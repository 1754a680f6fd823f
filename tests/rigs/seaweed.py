"""A real S3 server for tests: SeaweedFS, loopback only, free ports, its data in a folder, dead when its parent is.

It answers to three identities: `admin` may do all, `reader` may list and read, `stranger` is known and may do nothing.
"""

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.host import launcher

WEED = Path(sys.executable).with_name("weed")
READY_SECONDS = 60.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ACTIONS = {"admin": ["Admin", "Read", "Write", "List", "Tagging"], "reader": ["Read", "List"], "stranger": []}
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
_MORE_PORTS = ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")


@dataclass
class Seaweed:
    """A running server. `access_key` and `secret_key` are the admin's; `keys` has those of every identity."""

    endpoint: str
    keys: dict[str, tuple[str, str]]
    log: Path
    process: subprocess.Popen[bytes]
    region: str = "us-east-1"
    _clients: dict[str, Any] = field(default_factory=dict)

    @property
    def access_key(self) -> str:
        return self.keys["admin"][0]

    @property
    def secret_key(self) -> str:
        return self.keys["admin"][1]

    def env(self, identity: str = "admin") -> dict[str, str]:
        """The standard AWS variables; no file of the user's is read."""
        key, secret = self.keys[identity]
        return {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, identity: str = "admin") -> Any:
        """A boto3 client, to prepare and to look at what is there."""
        if identity not in self._clients:
            import boto3
            from botocore.config import Config

            key, secret = self.keys[identity]
            self._clients[identity] = boto3.session.Session().client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id=key,
                aws_secret_access_key=secret,
                region_name=self.region,
                config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 5}),
            )
        return self._clients[identity]

    def sign(self, method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        """The headers of a request with the admin's signature, in place of the one that they hold."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        class Auth(S3SigV4Auth):
            def payload(self, request: Any) -> str:
                return body

        body = next((value for name, value in headers.items() if name.lower() == "x-amz-content-sha256"), "")
        old = ("authorization", "x-amz-date", "x-amz-content-sha256")
        request = AWSRequest(method, url, {name: value for name, value in headers.items() if name.lower() not in old})
        Auth(Credentials(self.access_key, self.secret_key), "s3", self.region).add_auth(request)
        return dict(request.headers.items())

    def bucket(self) -> str:
        """Make a fresh bucket."""
        name = f"bucket-{secrets.token_hex(6)}"
        self.client().create_bucket(Bucket=name)
        return name

    def put(self, bucket: str, objects: dict[str, bytes]) -> None:
        for key, body in objects.items():
            self.client().put_object(Bucket=bucket, Key=key, Body=body)

    def stop(self) -> None:
        """SIGTERM takes it seconds to obey; nothing of it is wanted afterwards."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        self.process.kill()
        self.process.wait(10)
        for client in self._clients.values():
            client.close()


def start(folder: Path) -> Seaweed:
    """Start a server with its data in `folder` and wait until it answers. Another one may take a port first: again."""
    if not WEED.exists():
        raise RuntimeError(f"{WEED} is not there; install the extra 'test'")
    keys = {name: (f"{name}-{secrets.token_hex(8)}", secrets.token_hex(20)) for name in _ACTIONS}
    for turn in range(3):
        place = folder / f"weed-{turn}"
        place.mkdir(parents=True)
        server = _launch(place, keys)
        if _is_ready(server):
            return server
        server.stop()
    raise RuntimeError(f"SeaweedFS did not start: {server.log.read_text()[-2000:]}")


def _launch(place: Path, keys: dict[str, tuple[str, str]]) -> Seaweed:
    identities = [
        {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": _ACTIONS[name]}
        for name, (key, secret) in keys.items()
    ]
    (place / "s3.json").write_text(json.dumps({"identities": identities}))
    ports = dict(zip((*_PORTS, *_MORE_PORTS), free_ports(8), strict=True))
    log = place / "weed.log"
    command = [str(WEED), "-logtostderr=true", *_flags(place, ports)]
    started = [
        sys.executable,
        "-I",
        "-S",
        launcher.__file__,
        str(os.getpid()),
        str(int(signal.SIGKILL)),
        "--",
        *command,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(started, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    return Seaweed(f"http://127.0.0.1:{ports['s3.port']}", keys, log, process)


def _flags(place: Path, ports: dict[str, int]) -> Iterator[str]:
    yield from ("server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={place}", "-master.telemetry=false")
    yield from ("-volume.max=2000", "-master.volumeSizeLimitMB=1024", "-volume.minFreeSpace=1", "-filer", "-s3")
    yield from (
        f"-s3.config={place / 's3.json'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
        "-s3.autoCreateBucket=false",
    )
    yield from (f"-{flag}={port}" for flag, port in ports.items())


def _is_ready(server: Seaweed) -> bool:
    """Whether it comes to answer, with the filer behind it. It has died if its ports were taken."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until and server.process.poll() is None:
        if _answers(f"{server.endpoint}/status") and _makes_buckets(server):
            return True
        time.sleep(0.1)
    return False


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _makes_buckets(server: Seaweed) -> bool:
    """Objects can be written some time after the port answers."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        server.put(server.bucket(), {"ready": b"yes"})
    except (BotoCoreError, ClientError):
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, below the range from which the kernel gives ports to connections."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(10_000, 32_000)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
