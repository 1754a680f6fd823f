import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from everstep.host import launcher

LAUNCHER = [sys.executable, "-I", "-S", launcher.__file__]


def launch(parent, *argv, **options):
    command = [*LAUNCHER, str(parent), str(int(signal.SIGTERM)), "--", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, **options)


def test_becomes_the_program_with_its_streams_and_code():
    ended = launch(os.getpid(), "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("out\n", "err\n", 7)


def test_a_child_whose_parent_is_gone_never_starts():
    ended = launch(os.getpid() + 1, "sh", "-c", "echo started")
    assert (ended.stdout, ended.returncode) == ("", launcher.ORPHANED)


def test_a_missing_program_is_said_in_one_line():
    ended = launch(os.getpid(), "/no/such/program")
    assert ended.returncode == launcher.NOT_STARTED
    assert ended.stderr == "/no/such/program cannot be started: No such file or directory\n"


def test_ignored_and_blocked_signals_are_not_handed_on():
    show = "import signal; print(signal.getsignal(2) is signal.default_int_handler, signal.getsignal(15) is signal.SIG_DFL, signal.pthread_sigmask(0, []))"
    program = f"import signal; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); signal.pthread_sigmask(0, [10]); import subprocess, os, sys; subprocess.run({LAUNCHER!r} + [str(os.getpid()), '15', '--', {sys.executable!r}, '-c', {show!r}], check=True)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert ended.stdout == "True True set()\n"


def test_the_kernel_ends_it_with_its_parent(tmp_path: Path):
    note = tmp_path / "pid"
    inner = f"import os, subprocess, time; p = subprocess.Popen({LAUNCHER!r} + [str(os.getpid()), '15', '--', 'sleep', '600']); open({str(note)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", inner])
    try:
        while not (note.exists() and note.read_text() and comm(int(note.read_text())) == "sleep"):
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
    child = int(note.read_text())
    until = time.monotonic() + 5
    while comm(child) == "sleep" and time.monotonic() < until:
        time.sleep(0.01)
    assert comm(child) != "sleep"


def comm(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = state.partition("(")[2].rpartition(")")
    return None if rest.split()[0] == "Z" else name
