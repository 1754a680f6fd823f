import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.core.checkpoint import RunRecord
from everstep.host import process

DOUBLE_FORK = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "deaf" else signal.SIG_DFL)
        open(sys.argv[2], "w").close()
        time.sleep(600)
    os._exit(0)
os.wait()
"""


@pytest.fixture
def token(tmp_path):
    name = f"test/{os.getpid()}-{tmp_path.name}"
    yield name
    process.sweep(name, 0.0)


def python(program, *arguments):
    return [sys.executable, "-I", "-S", "-c", program, *arguments]


def spawn(tmp_path, token, argv, **options):
    return process.spawn(argv, process.child_environment((), {}), token, tmp_path / "log", **options)


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_both_outputs_go_to_the_file_and_the_status_is_kept(tmp_path, token):
    (tmp_path / "log").write_text("before\n")
    child = spawn(tmp_path, token, ["sh", "-c", "echo out; echo err >&2; exit 5"])
    assert child.wait(10) == 5
    assert child.status() == 5
    assert child.close() == 5
    assert child.status() == 5
    assert (tmp_path / "log").read_text() == "before\nout\nerr\n"


def test_death_by_a_signal_is_negative(tmp_path, token):
    child = spawn(tmp_path, token, ["sleep", "600"])
    assert child.status() is None
    assert child.wait(0.0) is None
    child.kill_group()
    assert child.wait(10) == -signal.SIGKILL
    child.signal(signal.SIGTERM)
    assert child.close() == -signal.SIGKILL
    child.kill_group()


def test_an_ignored_sigchld_is_an_end_without_a_status(tmp_path, token):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child = spawn(tmp_path, token, ["sh", "-c", "exit 5"])
        assert child.wait(10) == 0
        child.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_megabytes_without_a_newline_block_nobody_even_with_the_streams_held_open(tmp_path, token):
    """BC-178."""
    program = (
        "import os\nif os.fork() == 0:\n import time; time.sleep(600)\nfor fd in (1, 2): os.write(fd, b'x' * 5_000_000)"
    )
    started = time.monotonic()
    child = spawn(tmp_path, token, python(program))
    assert child.wait(10) == 0
    assert time.monotonic() - started < 2
    assert (tmp_path / "log").stat().st_size == 10_000_000
    child.close()
    assert len(process.marked(token)) == 1
    process.sweep(token, 0.0)
    assert process.marked(token) == []


@pytest.mark.parametrize("ears", ["good", "deaf"])
def test_sweep_finds_what_left_session_group_and_parent(tmp_path, token, ears):
    """BC-069: found by the mark, whatever it did to its parents."""
    child = spawn(tmp_path, token, python(DOUBLE_FORK, ears, str(tmp_path / "there")))
    assert child.wait(10) == 0
    child.close()
    until((tmp_path / "there").exists)
    (grandchild,) = process.marked(token)
    started = time.monotonic()
    killed = process.sweep(token, 0.5)
    assert killed == ([grandchild] if ears == "deaf" else [])
    assert time.monotonic() - started < (1.5 if ears == "deaf" else 0.5)
    assert process.marked(token) == []


def _members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            if fields and fields[0] != "Z" and int(fields[2]) == group:
                found.append(int(entry.name))
    return found


def test_sweep_catches_up_with_a_process_that_keeps_forking(tmp_path, token):
    program = (
        "import os, time, signal\nsignal.signal(15, signal.SIG_IGN)\nuntil = time.monotonic() + 60\n"
        "while time.monotonic() < until:\n if os.fork(): os._exit(0)\n time.sleep(0.002)"
    )
    child = spawn(tmp_path, token, python(program))
    child.wait(10)
    child.close()
    process.sweep(token, 0.1)
    group = child.pid
    looks = [_members(group) for _ in range(200)]
    assert not any(looks), "the whole chain is dead, not only what one look shows"


def test_a_prefix_ends_at_a_slash_and_a_spared_one_lives(tmp_path, token):
    children = {name: spawn(tmp_path, f"{token}/{name}", ["sleep", "600"]) for name in ("1", "10", "2/a")}
    until = time.monotonic() + 30
    while len(process.marked(token)) < 3 and time.monotonic() < until:
        time.sleep(0.01)  # a process that is just becoming another program shows no environment
    assert process.marked(f"{token}/1") == [children["1"].pid]
    assert sorted(process.marked(token)) == sorted(child.pid for child in children.values())
    process.sweep(token, 0.0, spare=f"{token}/2")
    assert process.marked(token) == [children["2/a"].pid]
    process.sweep(token, 0.0)
    assert [child.wait(5) for child in children.values()] == [-9, -9, -9]
    assert process.marked(token) == []
    for child in children.values():
        child.close()


def test_the_environment_is_an_allow_list(monkeypatch):
    for name in (
        "PREFECT_API_URL",
        "MLFLOW_TRACKING_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "MY_TOKEN",
        "CUDA_HOME",
        "LC_ALL",
    ):
        monkeypatch.setenv(name, name.lower())
    env = process.child_environment(("MY_TOKEN",), {"EXTRA": "1"})
    assert env["PATH"] == os.environ["PATH"]
    assert (env["CUDA_HOME"], env["LC_ALL"], env["MY_TOKEN"], env["EXTRA"]) == ("cuda_home", "lc_all", "my_token", "1")
    assert not {name for name in env if name.startswith(("PREFECT", "MLFLOW", "AWS"))}
    assert "AWS_SECRET_ACCESS_KEY" in process.child_environment(("AWS_SECRET_ACCESS_KEY",), {})


def test_a_long_line_is_told_before_the_child_reads_and_a_longer_one_is_refused(tmp_path, token):
    child = spawn(
        tmp_path,
        token,
        python("import sys, time; time.sleep(0.3); print(len(sys.stdin.readline()))"),
        stdin=subprocess.PIPE,
    )
    started = time.monotonic()
    process.tell(child, b"x" * 500_000 + b"\n")
    assert time.monotonic() - started < 0.2
    with pytest.raises(ValueError, match="put large values into a file"):
        process.tell(child, b"x" * 2_000_000)
    process.hang_up(child)
    assert child.wait(10) == 0
    child.close()
    assert (tmp_path / "log").read_text() == "500001\n"


def test_the_mark_of_a_run_differs_with_its_name_and_its_birth():
    def record(**change):
        return RunRecord(**{"name": "a", "run": "r001-x", "fingerprint": "", "dataset_fingerprint": "", "created": 1.5,
                            "program": "p:b", "seed": 0, "config": {}, "threads": 1} | change)  # fmt: skip

    assert process.token(record()).startswith("r001-x/")
    assert len({process.token(record()), process.token(record(name="b")), process.token(record(created=2.5))}) == 3
