"""Nodes with stand-in GPUs, for processes that a test starts.

A test does not load the library into its own process: torch and MLflow of other tests would find GPUs there.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.sim.nvml import FakeNvml, build


def node(folder: Path, gpus: int = 8) -> FakeNvml:
    """A node of idle, healthy GPUs. Skips where there is no compiler."""
    why = build.why_not()
    if "make test-setup" in why:
        pytest.skip(why)
    return FakeNvml(folder / "nvml", gpus)


def tell(fake: FakeNvml, code: str, seconds: float = 60.0) -> Any:
    """Run Python that sees the stand-in; what it prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", **fake.environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
