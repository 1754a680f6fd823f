"""`python -m everstep.trainer`: warm up, read one line from standard input (an AttemptSpec), and be that rank.

Started ahead of time it is a warm standby: it blocks on the line with everything imported. End of file without a line
means that it is not needed: it leaves quietly with 0.
"""

import ctypes
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
STOPS = (signal.SIGTERM, signal.SIGUSR1)
_early = 0


def main() -> int:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _on_stop(_note)
    from everstep.core.segment import AttemptSpec
    from everstep.trainer import pulse  # noqa: F401 - what the last word needs

    _on_stop(_leave)
    if _early:
        _leave(_early, None)
    from everstep.trainer.scribe import Scribe

    scribe = Scribe()
    scribe.start()
    from everstep.trainer import warm

    warm.up()
    _on_stop(_note)
    line = _read_line()
    if not line:
        return 0
    spec = AttemptSpec.model_validate_json(line)
    if os.getppid() != spec.parent_pid:
        return 0
    from everstep.trainer import rank

    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    return rank.live(spec, _early, scribe)


def _read_line() -> bytes:
    """The spec; nothing at end of file, or when a signal to stop has come and no line with it. Sleeps until then."""
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth)
    ready, _, _ = select.select([sys.stdin.buffer, ear], [], [], 0 if _early else None)
    line = sys.stdin.buffer.readline() if _has_line(ready) else b""
    signal.set_wakeup_fd(-1)
    os.close(ear)
    os.close(mouth)
    return line


def _has_line(ready: list[Any]) -> bool:
    return sys.stdin.buffer in ready or bool(select.select([sys.stdin.buffer], [], [], 0)[0])


def _on_stop(handler: Any) -> None:
    for number in STOPS:
        signal.signal(number, handler)


def _note(number: int, _: object) -> None:
    global _early  # noqa: PLW0603 - a signal handler has nowhere else to put it
    _early = number


def _leave(number: int, _: object) -> None:
    """A stop while PyTorch is imported, which takes seconds: leave at once; with a last word if there is a spec."""
    from everstep.core.segment import AttemptSpec
    from everstep.store.layout import RunPlaces
    from everstep.trainer.pulse import stopped, write_end
    from everstep.trainer.vitals import Vitals

    ready, _, _ = select.select([sys.stdin.buffer], [], [], 0)
    line = sys.stdin.buffer.readline() if ready else b""
    if line:
        spec = AttemptSpec.model_validate_json(line)
        places = RunPlaces(persistent=Path(spec.run_dir), local=Path(spec.local_dir))
        write_end(places, stopped(Vitals(spec, os.getpid()), signal.Signals(number).name))
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
