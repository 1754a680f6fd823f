import json
import os
import socket
import sys
import time

import pytest

from everstep.core.segment import AttemptSpec
from everstep.host import gang as gang_module
from everstep.host import process
from everstep.host.gang import Gang

TELL = """
import json, os, socket, sys
line = sys.stdin.readline()
if not line:
    raise SystemExit(0)
spec = json.loads(line)
assert sys.stdin.read() == ""
print(json.dumps({"rank": spec["rank"], "port": spec["master_port"], "world": spec["world_size"], "nice": os.nice(0)}))
sys.stdout.flush()
if spec["listen_fd"] is not None:
    server = socket.socket(fileno=spec["listen_fd"])
    for _ in range(spec["world_size"] - 1):
        server.accept()[0].sendall(b"hello")
elif spec["world_size"] > 1:
    with socket.create_connection(("127.0.0.1", spec["master_port"]), 10) as client:
        assert client.recv(5) == b"hello"
"""
SLEEP = "import sys, time; sys.stdin.readline(); time.sleep(600)"


@pytest.fixture
def token(tmp_path):
    name = f"gang/{os.getpid()}-{tmp_path.name}"
    yield name
    process.sweep(name, 0.0)


def spawn(size, token, tmp_path, program, **options):
    command = (sys.executable, "-I", "-S", "-c", program)
    return Gang.spawn(size, process.child_environment((), {}), token, tmp_path / "logs", command=command, **options)


def spec(tmp_path):
    return AttemptSpec(
        name="job", run="r001", attempt=1, rank=0, world_size=1, local_rank=0, program="p:build", search_path="", config={},
        data="", steps=1, seed=0, threads=1, run_dir=str(tmp_path), local_dir=str(tmp_path), parent_pid=os.getpid(),
    )  # fmt: skip


def go(gang, tmp_path):
    gang.go(spec(tmp_path), lambda rank: tmp_path / "logs" / f"rank-{rank}.log")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_are_told_who_they_are_and_meet_on_the_inherited_socket(tmp_path, token, size):
    gang = spawn(size, token, tmp_path, TELL)
    go(gang, tmp_path)
    assert gang.wait_all(20)
    assert gang.statuses() == dict.fromkeys(range(size), 0)
    told = [json.loads((tmp_path / "logs" / f"rank-{rank}.log").read_text()) for rank in range(size)]
    assert [one["rank"] for one in told] == list(range(size))
    assert {one["world"] for one in told} == {size}
    assert len({one["port"] for one in told}) == 1
    assert gang.kill() == []
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"rank-{rank}.log" for rank in range(size)]


def test_nobody_can_take_the_port_and_it_is_free_with_the_gang(tmp_path, token):
    gang = spawn(2, token, tmp_path, SLEEP)
    with socket.socket() as thief, pytest.raises(OSError, match="in use"):
        thief.bind(("127.0.0.1", gang._port))
    gang.kill()
    with socket.socket() as heir:
        heir.bind(("127.0.0.1", gang._port))


def test_a_gang_that_is_dismissed_leaves_nothing(tmp_path, token):
    gang = spawn(2, token, tmp_path, SLEEP)
    assert gang.whole
    gang.dismiss()
    assert not gang.whole
    assert process.marked(token) == []
    assert list((tmp_path / "logs").iterdir()) == []


def test_end_of_file_sends_a_standby_home(tmp_path, token):
    gang = spawn(1, token, tmp_path, TELL)
    process.hang_up(gang.ranks[0])
    assert gang.wait(10) == [0]
    assert gang.statuses() == {0: 0}
    gang.kill()


def test_a_death_is_noticed_in_well_under_a_tenth_of_a_second(tmp_path, token):
    gang = spawn(3, token, tmp_path, SLEEP)
    go(gang, tmp_path)
    assert gang.wait(0.0) == []
    os.kill(gang.ranks[1].pid, 9)
    started = time.monotonic()
    assert gang.wait(10) == [1]
    assert time.monotonic() - started < 0.1
    assert gang.wait(0.05) == []
    assert gang.statuses() == {0: None, 1: -9, 2: None}
    gang.kill()
    assert gang.statuses() == {0: -9, 1: -9, 2: -9}


def test_the_dead_hear_nothing_and_that_is_no_error(tmp_path, token):
    gang = spawn(2, token, tmp_path, SLEEP)
    os.kill(gang.ranks[0].pid, 9)
    gang.ranks[0].wait(10)
    go(gang, tmp_path)
    assert gang.wait(10) == [0]
    gang.kill()


def test_a_nice_standby_is_as_quick_as_any_once_it_goes(tmp_path, token):
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    gang = spawn(1, token, tmp_path, TELL, nice=10)
    assert gang.is_nice == gang_module._may_take_niceness_back()
    go(gang, tmp_path)
    assert gang.wait_all(20)
    assert json.loads((tmp_path / "logs" / "rank-0.log").read_text())["nice"] == mine
    gang.kill()
