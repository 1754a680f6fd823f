"""Forks beside a writer that is being started: nobody's end of a stream may go with them."""

import contextlib
import os
import subprocess
import threading
from pathlib import Path

from everstep.trainer import forks
from everstep.trainer.scribe import Scribe


def sockets():
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this look itself
            found.add(str(one.readlink()))
    return {target for target in found if target.startswith("socket:")}


def test_a_fork_waits_for_a_writer_that_is_being_started(monkeypatch):
    """A loader worker that is forked in that moment would keep the writer's streams open, and a save would never end."""
    inside, go, forked = threading.Event(), threading.Event(), threading.Event()
    real, found, scribe = subprocess.Popen, [], Scribe()

    def slow(*args, **how):
        inside.set()
        assert go.wait(30)
        return real(*args, **how)

    def fork():
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.write(writing, "\n".join(sockets()).encode())
            os._exit(0)
        forked.set()
        os.waitpid(child, 0)
        found.extend(os.read(reading, 1 << 16).decode().splitlines())
        os.close(reading)
        os.close(writing)

    before = sockets()
    monkeypatch.setattr(subprocess, "Popen", slow)
    starter, forker = threading.Thread(target=scribe.start), threading.Thread(target=fork)
    starter.start()
    assert inside.wait(30)
    assert len(sockets() - before) == 2, "both ends are open"
    forker.start()
    assert not forked.wait(0.2)
    go.set()
    starter.join(30)
    forker.join(30)
    assert len(set(found) - before) == 1, "only the rank's own end was copied"
    scribe.close()


def test_a_process_that_holds_forks_back_may_fork_itself():
    with forks.starting:
        child = os.fork()
        if not child:
            os._exit(0 if forks.starting.acquire(blocking=False) else 1)
        assert os.waitpid(child, 0)[1] == 0
