"""The copier, killed at each of its file operations, one by one: the next one ends its work, and nothing else is lost."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from rigs import syscalls

sys.path.insert(0, str(Path(__file__).parent))
from test_copier import is_durable, is_whole, places, rows, save, spec, until

from everstep.core.job import CheckpointPolicy
from everstep.host.backlog import pending
from everstep.store import checkpoint, marks

ALL = "EVERSTEP_ALL" in os.environ
__all__ = ["places"]


def waiting() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "everstep.host.copier"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )


def copy(places, log, at=None):
    """A copier that ends what is pending, or dies at a file operation after it was told what to do."""
    process = waiting()
    ready(process)
    with syscalls.watching(process.pid, log, syscalls.KILL if at else "", at or ("", 0)) as seen:
        process.stdin.write(spec(places).model_dump_json().encode() + b"\n")
        process.stdin.flush()
        process.stdin.close()
        process.stdin = None
        status = process.wait(120)  # it is a nice process, and traced
    process.communicate()
    return status, seen


def ready(process) -> None:
    """Until it waits for its first line: then all is imported."""

    def reads() -> bool:
        with open(f"/proc/{process.pid}/syscall") as file:
            return file.read().split()[:2] == ["0", "0x0"]  # read(0, ...)

    until(reads, 60)


@pytest.mark.timeout(1200)
def test_a_copier_killed_at_each_file_operation_is_taken_up_by_the_next(places, tmp_path):
    syscalls.needed()
    log = tmp_path / "strace.log"
    before = save(places, 10)
    status, seen = copy(places, log)
    assert status == 0
    operations = seen.operations
    assert len(operations) > 20
    for step, at in enumerate(operations if ALL else random.Random(3).sample(operations, 6), start=11):
        key = save(places, 10 * step)
        status, _ = copy(places, log, at)
        assert status == -9 or at in operations[-10:], at  # its last ones depend on the time
        committed, _ = checkpoint.find(places.checkpoints("persistent"))
        assert all(is_whole(places, held) for held in committed), at
        assert is_durable(places, before), at
        assert copy(places, log)[0] == 0
        assert is_durable(places, key), at
        assert is_whole(places, key), at
        assert pending(places, {1: 0}, CheckpointPolicy(keep=3)) == [], at
        assert marks.copying(places) == set(), at
        before = key
    assert not list(places.persistent.rglob("*.tmp")), "nothing is left lying about"
    assert rows(places, "checkpoint.durable")
