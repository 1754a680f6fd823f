"""Two flow runs for one run, a take-over, and two runs side by side on one machine."""

import contextlib
import os
import signal
import socket
import tempfile
import time
from pathlib import Path

import tiny
from plans import Shape

from everstep.host import process


def ranks(drill):
    return [pid for pid in process.marked(drill.token()) if "everstep.trainer" in drill.command(pid)]


def test_two_flow_runs_for_one_run_train_once(make_drill, untouched):
    """BC-099: the second is told who owns the run, and harms nothing."""
    drill = make_drill(config={"pause": 0.05})
    first = drill.start()
    time.sleep(0.2)
    second = drill.start()
    ended = sorted((drill.wait(first), drill.wait(second)), key=lambda one: one.code)
    assert [one.code for one in ended] == [0, 1], [one.err for one in ended]
    assert "already owned by process" in ended[1].err
    assert ended[0].final["attempts"] == 1
    assert ended[0].final["weights"] == untouched(Shape()).final["weights"]


def test_after_a_take_over_only_the_new_owner_restarts_ranks(make_drill, untouched):
    """BC-181."""
    drill = make_drill(config={"pause": 0.4})
    old = drill.start()
    drill.await_step(5, old)
    new = drill.start(arguments=("--take-over",))
    left = drill.wait(old)
    assert left.code == 75, left.err
    assert left.final["status"] == "stopped"
    drill.await_step(left.final["step"] + 1, new)
    for pid in ranks(drill):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ended = drill.wait(new)
    assert ended.code == 0, ended.err
    assert ended.final["restarts"] == 1
    assert ended.final["attempts"] == 3
    assert ended.final["weights"] == untouched(Shape()).final["weights"]


def test_two_runs_of_two_ranks_start_at_once_whatever_ports_are_taken(make_drill, untouched):
    """BC-074."""
    shape = Shape(ranks=2)
    with contextlib.ExitStack() as taken:
        for port in (29400, 29500):
            with contextlib.suppress(OSError):  # somebody else has it: just as good
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
        drills = [make_drill(f"twin-{index}", **shape.job()) for index in range(2)]
        ended = [drill.wait(flow) for drill, flow in [(drill, drill.start()) for drill in drills]]
    for one in ended:
        assert one.code == 0, one.err
        assert one.final["restarts"] == 0
        assert one.final["weights"] == untouched(shape).final["weights"]


def test_a_signal_to_any_rank_saves_the_same_step_on_all(make_drill, untouched):
    """BC-064: SIGTERM to rank 1 alone; a stop that nobody asked the flow for goes on by itself or stops in order."""
    shape = Shape(ranks=2)
    drill = make_drill(**shape.job(pause=0.05))
    flow = drill.start()
    drill.await_step(7, flow)
    os.kill(max(ranks(drill)), signal.SIGTERM)
    ended = drill.wait(flow)
    if ended.code == 75:
        assert ended.final["step"] >= 7
        ended = drill.run()
    assert ended.code == 0, ended.err
    assert ended.final["weights"] == untouched(shape).final["weights"]


def test_a_users_own_package_of_tasks_stands_in_nobodys_way(make_drill, tmp_path):
    """The command is given in a repository that has a package `tasks`, and the program is in it."""
    drill = make_drill(steps=20, program="tasks.train:build")
    package = tmp_path / "repository" / "tasks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(Path(tiny.__file__).read_text())
    ended = drill.run(cwd=package.parent)
    assert ended.code == 0, ended.err
    assert ended.final["step"] == 20


def test_what_killed_ranks_and_workers_leave_in_temporary_folders_does_not_grow(make_drill, untouched):
    """Case BC-126: sockets, locks and shared memory of dead owners go; the next start never meets them."""
    shape = Shape(2, 2, 1)
    drill = make_drill(**shape.job(pause=0.02))
    with tempfile.TemporaryDirectory(prefix="es-", dir="/tmp") as short:
        for step in (5, 15, 25):
            flow = drill.start(environment={"TMPDIR": short})
            drill.await_step(step, flow)
            killed = process.marked(drill.token())
            for pid in (flow.pid, *killed):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            drill.wait(flow)
            drill.await_gone()
            left = [path for path in Path(short).iterdir() if path.name.startswith(("everstep-", "pymp-"))]
            assert len(left) <= 2, "the ranks and their spares of one flow run; the next one clears them"
        ended = drill.run(environment={"TMPDIR": short})
        assert (ended.code, ended.final["weights"]) == (0, untouched(shape).final["weights"]), ended.err
        assert not [path for path in Path(short).iterdir() if path.name.startswith(("everstep-", "pymp-"))]
        assert not [pid for pid in killed for _ in Path("/dev/shm").glob(f"torch_{pid}_*")]
