"""What tests of the hands share: MLflow, as a database and as a server."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs import mlflow_server

from everstep.host import mlflow_run


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated MLflow database; migrations take seconds, a copy does not."""
    file = tmp_path_factory.mktemp("mlflow") / "template.db"
    mlflow_run.connect(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def uri(template: Path, tmp_path: Path) -> str:
    shutil.copy(template, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(scope="session")
def server(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """An MLflow server on a free port; its database."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(template, folder / "server.db")
    with mlflow_server.serving(folder / "server.db", folder / "artifacts") as port:
        yield port, f"sqlite:///{folder / 'server.db'}"


@pytest.fixture
def proxy(server: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[mlflow_server.Proxy]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    proxy = mlflow_server.Proxy(server[0])
    try:
        yield proxy
    finally:
        proxy.close()
