"""Start a program that cannot outlive its parent: `python -I -S launcher.py <parent pid> <signal> -- <program> ...`.

Asks the kernel for `signal` on the parent's death, leaves with 113 if the parent is already gone, puts back the signal
settings that the parent may have inherited or made, and becomes the program. It is a script of its own because a
`preexec_fn` is not safe in a process with threads. The kernel's promise hangs on the parent's *thread*: start children
from a thread that lives as long as they should. Imports nothing of ours; takes about 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
ORPHANED = 113
NOT_STARTED = 127


def main(arguments: list[str]) -> int:
    parent, number, _, *program = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        sys.stderr.write(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}\n")
        return NOT_STARTED
    if os.getppid() != int(parent):
        return ORPHANED
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(one, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(program[0], program)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{program[0]} cannot be started: {error.strerror}\n")
        return NOT_STARTED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
