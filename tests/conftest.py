"""What tests of several rooms share."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from rigs import proxy, sampling, seaweed

DRILLS = Path(__file__).parent / "drills"


def pytest_terminal_summary(terminalreporter, config) -> None:
    if not sampling.is_whole(os.environ, config.args):
        seed = sampling.seed()
        terminalreporter.line(
            f"long tests: a sample of {sampling.SHARE:.0%}, EVERSTEP_SAMPLE={seed}; make test-all runs all"
        )


def pytest_collection_modifyitems(config, items) -> None:
    """Of the tests that take long, half a minute each, a sample is run."""
    if sampling.is_whole(os.environ, config.args):
        return
    long = {item.nodeid for item in items if DRILLS in item.path.parents or item.get_closest_marker("sampled")}
    left_out = long - sampling.sample(long, sampling.seed(), folder=lambda name: name.partition("::")[0])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where everything is installed, in CI, a test that misses a system package fails."""
    report = yield
    if report.skipped and "make test-setup" in str(report.longrepr) and "CI" in os.environ:
        report.outcome = "failed"
    return report


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """Mount file systems: `mount(folder, "-t", "tmpfs", "-o", "size=1m", "tmpfs")`. Skips where that is not allowed."""
    mounted: list[Path] = []

    def do(folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        if folder not in mounted:
            mounted.append(folder)

    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    yield do
    for folder in reversed(mounted):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[seaweed.Seaweed]:
    """A real S3 server; `.endpoint`, `.env()`, `.bucket()` makes a fresh bucket, `.client()` is a boto3 client."""
    server = seaweed.start(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def s3_proxy(s3_server) -> Iterator[proxy.FaultProxy]:
    """A fault proxy before the S3 server: `.endpoint`, `.plan(Fault("slow_down", "PUT", times=2))`, `.requests`."""
    made = proxy.FaultProxy(s3_server.endpoint)
    yield made
    made.close()


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory) -> Path:
    """A migrated MLflow database to copy: making one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "template.db"
    code = f"from everstep.host.mlflow_run import connect; connect('sqlite:///{path}').search_experiments()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
    return path
