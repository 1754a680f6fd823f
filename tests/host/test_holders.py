"""Who holds a GPU: a number from the driver is a process here only if it has the device open."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from everstep.core.gpu import GpuProcess
from everstep.host.holders import Where, holder
from everstep.host.process import MARK


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process that opens the file that it is told, and sleeps."""
    code = "import sys; held = [open(line.strip()) for line in iter(sys.stdin.readline, '\\n')]; print('on'); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: "run/1a2b/7/1"},
    ) as child:
        yield child
        child.kill()


def begin(child: subprocess.Popen[str], *files: object) -> None:
    child.stdin.write("".join(f"{file}\n" for file in files) + "\n")
    child.stdin.flush()
    assert child.stdout.readline() == "on\n"


def test_unrelated_process_of_the_same_number_is_not_the_holder(sleeper, tmp_path):
    """BC-144: pid X exists here as an unrelated sleeper: it must never be taken for the holder."""
    (tmp_path / "other").touch()
    begin(sleeper, tmp_path / "other")
    found = holder(GpuProcess(pid=sleeper.pid, memory_bytes=3 << 30), device=str(tmp_path / "nvidia"))
    assert found.where is Where.outside
    assert found.sentence == "held by a process outside this namespace (3.0 GiB)"
    assert (found.name, found.attempt) == ("", "")


def test_number_that_is_nobody_here(tmp_path):
    """BC-144: pid Y does not exist here."""
    found = holder(GpuProcess(pid=2**22 + 1))
    assert found.where is Where.outside
    assert found.sentence == "held by a process outside this namespace"


def test_process_that_has_the_device_open_is_the_holder_and_tells_its_run(sleeper, tmp_path):
    (tmp_path / "nvidia3").touch()
    begin(sleeper, tmp_path / "nvidia3")
    found = holder(GpuProcess(pid=sleeper.pid, memory_bytes=1 << 30), device=str(tmp_path / "nvidia"))
    assert (found.where, found.attempt) == (Where.here, "run/1a2b/7/1")
    assert found.sentence == f"held by {found.name} ({sleeper.pid}) (1.0 GiB), a rank of run/1a2b/7/1"


def test_process_that_may_not_be_looked_at_is_unknown(tmp_path):
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        found = holder(GpuProcess(pid=1))
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
            os.setegid(0)
    assert found.where is Where.unknown
    assert "may not look at" in found.sentence
