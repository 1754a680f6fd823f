"""The warden: outlives a killed supervisor by less than half a minute and sees that nothing else does.

The kernel tells each rank of its parent's death, and it saves and leaves. What that misses is the warden's: a rank that
hangs or was killed just before, and what it had started. It waits for the ranks as long as the job's grace allows, then
ends all that bears the supervisor's mark. `python -m everstep.host.warden <mark> <grace seconds>`: each line on its
standard input is the pid of a rank, the end of the input is the supervisor's death.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from everstep.host import process, scratch
from everstep.host.process import Process

MARGIN = 1.0
LONGEST = 27.0
POLITE = 0.5


def start(token: str, grace: float, log: Path) -> Process:
    """Start a warden for all that is marked `token`. It is marked so itself: an orderly sweep ends it too."""
    argv = [sys.executable, "-m", "everstep.host.warden", token, str(grace)]
    env = process.child_environment((), {})
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return process.spawn(argv, env, f"{token}/warden", log, stdin=subprocess.PIPE, death_signal=0)


def look_after(warden: Process, pids: Iterable[int]) -> None:
    """Tell it of ranks that were started. If it has died, the kernel's promise still holds."""
    process.tell(warden, "".join(f"{pid}\n" for pid in pids).encode())


def main(token: str, grace: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks = []
    for line in sys.stdin:
        with contextlib.suppress(ProcessLookupError):
            ranks.append(os.pidfd_open(int(line)))
    _wait_for(ranks, min(grace + MARGIN, LONGEST))
    process.sweep(token, POLITE, certain_within=2.0)
    scratch.clear(token)


def _wait_for(handles: Iterable[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(max(0.0, until - time.monotonic()) * 1000)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
