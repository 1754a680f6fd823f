"""Named points at which a drill can hurt the process. Without a plan a point costs one comparison.

`EVERSTEP_FAULTS` names a JSON file: a list of `{"point": name, "hit": n, "rank": r, "do": what}`. The n-th time (from 1)
that a process of this rank passes the point, `do` happens: `kill` (SIGKILL to itself), `stop` (SIGSTOP), `term` (SIGTERM
to itself), `sleep:<seconds>`, or `errno:<number>` (raises OSError). `rank` may be left out. Each entry fires once over all
restarts: whoever fires it first creates `<plan>.<index>.fired`.

A process that stands for another (a rank's writer) has that one hurt by signals, except at points of its own name.
"""

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

_PLAN = os.environ.get("EVERSTEP_FAULTS")
_hits: Counter[str] = Counter()
_rank: int | None = None
_stands_for: int | None = None
OWN = "writer."


def identify(rank: int, *, stands_for: int | None = None) -> None:
    """Say which rank this process is, for plans that aim at one, and for which process's pid it stands."""
    global _rank, _stands_for
    _rank, _stands_for = rank, stands_for


def plan() -> str | None:
    """The plan's file, for a child that is to follow it too."""
    return _PLAN


def point(name: str) -> None:
    """A named moment; see the module."""
    if _PLAN is None:
        return
    _hits[name] += 1
    for index, entry in enumerate(json.loads(Path(_PLAN).read_text())):
        if entry["point"] != name or entry.get("hit", 1) != _hits[name] or entry.get("rank", _rank) != _rank:
            continue
        try:
            Path(f"{_PLAN}.{index}.fired").touch(exist_ok=False)
        except FileExistsError:
            continue
        _hurt(entry.get("do", "kill"), os.getpid() if name.startswith(OWN) or not _stands_for else _stands_for)


def _hurt(what: str, pid: int) -> None:
    verb, _, argument = what.partition(":")
    if verb == "stop" and pid == os.getpid():  # by another thread's hands this one would go on for a moment
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif verb in ("kill", "stop", "term"):
        os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[verb])
        if verb == "kill" and pid != os.getpid():
            time.sleep(60)  # it takes this process with it: nothing more may happen here
    elif verb == "sleep":
        time.sleep(float(argument))
    elif verb == "errno":
        raise OSError(int(argument), os.strerror(int(argument)))
    else:
        raise ValueError(f"{_PLAN}: do: {what!r} is not one of kill, stop, term, sleep:<seconds>, errno:<number>")
