"""MLflow's own web application without the process manager that makes its start slow, and a proxy that misbehaves."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def serving(database: Path, artifacts: Path, admin: tuple[str, str] | None = None) -> Iterator[int]:
    """The port of a server on this SQLite file, for the length of the block. It ends with this process.

    With `admin`, a name and a password, it is MLflow's own basic-auth application, and lets in nobody else.
    """
    environment = os.environ | {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{database}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(artifacts),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    if admin:
        environment |= _guarded(database, *admin)
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def _guarded(database: Path, user: str, password: str) -> dict[str, str]:
    file = database.with_name("auth.ini")
    file.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{database}.auth\nadmin_username = {user}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    secrets = {"MLFLOW_AUTH_ADMIN_PASSWORD": password, "MLFLOW_FLASK_SERVER_SECRET_KEY": "of-a-test"}
    return {"MLFLOW_AUTH_CONFIG_PATH": str(file), **secrets}


SERVER = """
import os, sys, threading
from werkzeug.serving import make_server
from mlflow.server import app
if "MLFLOW_AUTH_CONFIG_PATH" in os.environ:
    from mlflow.server.auth import create_app, sqlalchemy_store
    from werkzeug.security import generate_password_hash
    # Each request proves the password several times, at a tenth of a second each.
    sqlalchemy_store.generate_password_hash = lambda password: generate_password_hash(password, "pbkdf2:sha256:1")
    app = create_app(app)
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.server_port, flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
server.serve_forever()
"""


class Proxy:
    """Stands in front of a server and misbehaves on request: 500, hang, or do the work and drop the reply.

    As a gateway does, it refuses bodies of more than `limit` bytes and answers 504 for what takes longer than `seconds`.
    `sizes` has the bytes of every body that came.
    """

    def __init__(self, target: int, limit: int | None = None, seconds: float = 30) -> None:
        self.mode = "pass"
        self.dropped = 0
        self.sizes: list[int] = []
        self.refused: list[int] = []
        self.release = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                assert "chunked" not in self.headers.get("Transfer-Encoding", ""), "the size is not known"
                proxy.sizes.append(size)
                if limit is not None and size > limit:
                    self.close_connection = True
                    self.refuse(413)
                    return
                body = self.rfile.read(size)
                if proxy.mode == "hang":
                    proxy.release.wait(30)
                if proxy.mode in ("hang", "500"):
                    self.refuse(500)
                    return
                backend = HTTPConnection("127.0.0.1", target, timeout=seconds)
                try:
                    backend.request(self.command, self.path, body, dict(self.headers))
                    answer = backend.getresponse()
                    content = answer.read()
                except TimeoutError:
                    self.refuse(504)
                    return
                finally:
                    backend.close()
                if proxy.mode == "drop" and self.path.endswith("log-batch"):
                    proxy.dropped += 1
                    proxy.mode = "pass"
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def refuse(self, status: int) -> None:
                proxy.refused.append(status)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - http.server names them

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
