"""The copier: a process of its own that brings a run's checkpoints to a tier that survives the machine.

`python -m everstep.host.copier`, one line of JSON (`CopierSpec`) on standard input. Without an object tier in it the
process copies to the persistent tier, else to the object tier (`everstep.host.uploader`): a store that is slow or away
holds up no copy to the persistent one. Every further line wakes it; the end of input means "finish what is pending, then leave". SIGTERM means "leave now": whatever is half done is taken up by
the next copier. A far end that is full, read-only, away or slow is never a reason to leave: it backs off and tries again.
What it did and could not do stands in `copier.jsonl` of the run directory, and on its standard error when even that
cannot be written.
"""

import ctypes
import fcntl
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from everstep.core.checkpoint import Key, Verification
from everstep.core.errors import Damaged, EverstepError
from everstep.host import runs
from everstep.host.backlog import pending, unmarked
from everstep.host.courier import CopierSpec, Courier
from everstep.store import checkpoint, marks, transfer

__all__ = ["Copier", "CopierSpec"]

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 20.0  # how long the object tier is asked one thing before that counts as a failure
BACKOFF_SECONDS = (0.2, 5.0)  # first and longest pause after a failure, before jitter
NICENESS = 10


class Leave(BaseException):
    """SIGTERM: leave from wherever the process is. Everything it does may be cut off anywhere."""


class Copier(Courier):
    """One run's copier to the persistent tier; `turn` does one piece of work."""

    def _glance(self) -> object:
        return checkpoint.find(self.places.checkpoints("local"))[0]

    def _work(self) -> bool:
        resumed = {number: claim.resumed_from for number, claim in runs.claims(self.places).items()}
        if keys := pending(self.places, resumed, self.spec.policy):
            self._advertise(keys)
            self._bring(self._choose(keys))
        elif keys := unmarked(self.places, resumed, self.spec.policy):
            self._adopt(self._choose(keys))
        else:
            self._advertise([])
            return False
        return True

    def _bring(self, key: Key) -> None:
        started = time.monotonic()
        if not self._is_verified(key, "local"):
            return
        far = self.places.checkpoint("persistent", key)
        try:
            moved = transfer.copy(self.places.checkpoint("local", key), far)
        except (Damaged, FileNotFoundError):
            if self._has_gone(key, "local") or not self._verify(key, "local"):
                return
            raise
        self._mark_sound(key, checkpoint.manifest_digest(far) or "")
        seconds = time.monotonic() - started
        self.report("checkpoint.durable", "", key, "persistent", bytes=moved, seconds=round(seconds, 3))

    def _adopt(self, key: Key) -> None:
        if self._verify(key, "persistent"):
            digest = checkpoint.manifest_digest(self.places.checkpoint("persistent", key)) or ""
            marks.durable(self.places, key.folder, "persistent", digest)

    def _mark_sound(self, key: Key, digest: str) -> None:
        """Its manifest equals one that was verified, and every file has been read back against it."""
        sound = Verification(ok=True, manifest_digest=digest)
        marks.verified(self.places, key.folder, "persistent", sound)
        marks.durable(self.places, key.folder, "persistent", digest)


class Input:
    """Standard input after the first line: wakes and its end."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""

    def line(self) -> bytes:
        """The first line; empty if the input ended without one."""
        while b"\n" not in self._rest:
            data = os.read(0, 1 << 16)
            if not data:
                self.ended = True
                break
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def wait(self, seconds: float, *, wake: bool = True) -> None:
        """Sleep; less if the input says something and `wake` is set."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self.ended:
                time.sleep(left)
            elif select.select([0], [], [], left)[0]:
                self.ended = not os.read(0, 1 << 16)
                if wake:
                    return


def main() -> int:
    """The process's life; returns its exit code."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    words = Input()
    line = words.line()
    if not line:
        return 0
    try:
        spec = CopierSpec.parse(line, "standard input", "line 1")
    except Damaged as error:
        sys.stderr.write(f"{error}\n")
        return 2
    os.nice(NICENESS)
    if spec.object_uri is not None:  # Python hears no signal while the client of the store waits for an answer
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _die_with(spec.parent_pid)
        lock = _lock(spec, words)
        try:
            return _run(_courier(spec), words)
        finally:
            os.close(lock)
    except Leave:
        return 0


def _courier(spec: CopierSpec) -> Courier:
    if spec.object_uri is None:
        return Copier(spec)
    from everstep.host import uploader
    from everstep.store import object_tier
    from everstep.store.s3_access import Access

    access = Access.from_dict(spec.access) if spec.access else None
    return uploader.Uploader(spec, object_tier.open_run(spec.object_uri, access, seconds=PATIENCE_SECONDS))


def _run(copier: Courier, words: Input) -> int:
    parent = copier.spec.parent_pid
    while not parent or os.getppid() == parent:
        try:
            busy = copier.turn(thorough=words.ended)
        except (OSError, EverstepError, ValueError) as error:  # ValueError: rights and keys, which somebody may mend
            number = getattr(error, "errno", None) or 0
            if copier.failures & (copier.failures - 1) == 0:  # a long outage is told of ever more rarely
                tier = "object" if copier.spec.object_uri else ""
                copier.report("copier.error", _sentence(error), tier=tier, failures=copier.failures, errno=number)
            words.wait(_pause(copier.failures), wake=False)
            continue
        if not busy and words.ended:
            return 0
        if not busy:
            words.wait(POLL_SECONDS)
    return 0


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}; trying again."
    return str(error)


def _pause(failures: int) -> float:
    first, longest = BACKOFF_SECONDS
    return min(longest, first * 2.0 ** min(failures - 1, 20)) * random.uniform(0.5, 1)  # noqa: S311 - jitter


def _lock(spec: CopierSpec, words: Input) -> int:
    """One copier a run, tier and machine: an old one that is still leaving is waited for."""
    local = Path(spec.local_dir)
    local.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(
        local / ("uploader.lock" if spec.object_uri else "copier.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            words.wait(POLL_SECONDS, wake=False)


def _die_with(parent: int) -> None:
    """SIGTERM when the parent ends; leave if it has ended before that could be asked for."""
    if not parent:
        return
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise Leave


def _leave(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Leave


if __name__ == "__main__":
    raise SystemExit(main())
