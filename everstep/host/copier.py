"""The copier: a process of its own that brings a run's checkpoints to the tiers that survive the machine.

`python -m everstep.host.copier`, one line of JSON (`CopierSpec`) on standard input. Every further line wakes it; the
end of input means "finish what is pending, then leave". SIGTERM means "leave now": whatever is half done is taken up by
the next copier. A far end that is full, read-only, away or slow is never a reason to leave: it backs off and tries again.
What it did and could not do stands in `copier.jsonl` of the run directory, and on its standard error when even that
cannot be written.
"""

import ctypes
import fcntl
import json
import os
import random
import select
import signal
import sys
import time
from collections import deque
from pathlib import Path

from everstep.core.checkpoint import Key, State, Verification
from everstep.core.errors import Damaged, EverstepError
from everstep.core.record import Versioned
from everstep.host import runs
from everstep.host.backlog import pending, unmarked, unpromoted
from everstep.store import checkpoint, jsonl, marks, transfer
from everstep.store.layout import RunPlaces

POLL_SECONDS = 0.05
RESCAN_SECONDS = 2.0
BACKOFF_SECONDS = (0.2, 5.0)  # first and longest pause after a failure, before jitter
UNTOLD = 200  # reports kept while the run directory cannot be written
NICENESS = 10


class CopierSpec(Versioned):
    """What a copier is told. Folders are the run's own on each tier; `keep` is the job's."""

    name: str
    run: str
    run_dir: str
    local_dir: str
    object_dir: str | None = None
    keep: int = 3
    parent_pid: int

    @property
    def places(self) -> RunPlaces:
        return RunPlaces(Path(self.run_dir), Path(self.local_dir), Path(self.object_dir) if self.object_dir else None)


class Leave(BaseException):
    """SIGTERM: leave from wherever the process is. Everything it does may be cut off anywhere."""


class Copier:
    """One run's copier; `turn` does one piece of work."""

    def __init__(self, spec: CopierSpec) -> None:
        self.spec = spec
        self.places = spec.places
        self._untold: deque[str] = deque(maxlen=UNTOLD)
        self.failures = 0
        self._idle_at: object = None
        self._idle_since = 0.0
        self._advertised: list[Key] | None = None

    def turn(self, *, thorough: bool = False) -> bool:
        """Do the most urgent piece of work; False if there is none. Raises OSError or EverstepError for the far end.

        While nothing changes only the local folder is looked at, unless `thorough`.
        """
        self._tell_late()
        now = self._glance()
        if now == self._idle_at and not thorough and time.monotonic() - self._idle_since < RESCAN_SECONDS:
            return False
        try:
            busy = self._work()
        except (OSError, EverstepError):
            self.failures += 1
            raise
        self.failures = 0
        if not busy:
            self._idle_at, self._idle_since = now, time.monotonic()
        return busy

    def _work(self) -> bool:
        resumed = {number: claim.resumed_from for number, claim in runs.claims(self.places).items()}
        if keys := pending(self.places, resumed, self.spec.keep):
            self._advertise(keys)
            self._bring(self._choose(keys), "local", "persistent")
        elif keys := unmarked(self.places, resumed, self.spec.keep):
            self._adopt(self._choose(keys))
        elif keys := [key for key in unpromoted(self.places) if self._source(key)]:
            self._advertise(keys)
            key = self._choose(keys)
            self._bring(key, self._source(key), "object")
        else:
            self._advertise([])
            return False
        return True

    def _choose(self, keys: list[Key]) -> Key:
        """The oldest; after a failure the next one, so that one that cannot be copied holds up no other."""
        return keys[self.failures % len(keys)]

    def report(self, kind: str, text: str, key: Key | None = None, tier: str = "", **data: float) -> None:
        """A row of `copier.jsonl`; kept for later if the run directory cannot be written now."""
        row = {"time": time.time(), "kind": kind, "checkpoint": key.folder if key else "", "tier": tier, "text": text}
        self._untold.append(json.dumps(row | data))
        try:
            self._tell_late()
        except OSError:
            sys.stderr.write(f"{kind}: {text}\n")

    def _glance(self) -> object:
        promote = self.places.persistent / "promote.json"
        local, _ = checkpoint.find(self.places.checkpoints("local"))
        return tuple(local), promote.stat().st_mtime_ns if promote.exists() else 0

    def _source(self, key: Key) -> str:
        """The nearest tier that holds it whole, as far as is known; empty if none does."""
        known = marks.states(self.places)
        for tier in ("local", "persistent"):
            committed, _ = checkpoint.find(self.places.checkpoints(tier))
            if key in committed and State.quarantined not in known.get((key.folder, tier), set()):
                return tier
        return ""

    def _bring(self, key: Key, source: str, target: str) -> None:
        started = time.monotonic()
        if not self._is_verified(key, source):
            return
        try:
            moved = transfer.copy(self.places.checkpoint(source, key), self.places.checkpoint(target, key))
        except (Damaged, FileNotFoundError):
            if self._has_gone(key, source):
                return
            if not self._verify(key, source):
                return
            raise
        digest = checkpoint.manifest_digest(self.places.checkpoint(target, key)) or ""
        self._mark_sound(key, target, digest)
        seconds = time.monotonic() - started
        self.report("checkpoint.durable", "", key, target, bytes=moved, seconds=round(seconds, 3))

    def _adopt(self, key: Key) -> None:
        if self._verify(key, "persistent"):
            digest = checkpoint.manifest_digest(self.places.checkpoint("persistent", key)) or ""
            marks.durable(self.places, key.folder, "persistent", digest)

    def _mark_sound(self, key: Key, tier: str, digest: str) -> None:
        """Its manifest equals one that was verified, and every file has been read back against it."""
        sound = Verification(ok=True, manifest_digest=digest)
        marks.verified(self.places, key.folder, tier, sound)
        marks.durable(self.places, key.folder, tier, digest)

    def _is_verified(self, key: Key, tier: str) -> bool:
        known = marks.states(self.places).get((key.folder, tier), set())
        return State.verified in known or self._verify(key, tier)

    def _verify(self, key: Key, tier: str) -> bool:
        folder = self.places.checkpoint(tier, key)
        structure = checkpoint.read_structure(self.places.persistent)
        result = checkpoint.verify(folder, structure, run=self.spec.run, job=self.spec.name)
        if not result.ok and self._has_gone(key, tier):
            return False
        marks.verified(self.places, key.folder, tier, result)
        if not result.ok:
            self.report("checkpoint.quarantined", result.why, key, tier)
        return result.ok

    def _has_gone(self, key: Key, tier: str) -> bool:
        """Retention may have removed it meanwhile: no damage."""
        return not self.places.checkpoint(tier, key).exists()

    def _advertise(self, keys: list[Key]) -> None:
        if keys != self._advertised:
            self._advertised = None
            marks.advertise(self.places, keys)
            self._advertised = keys

    def _tell_late(self) -> None:
        while self._untold:
            jsonl.append(self.places.persistent / "copier.jsonl", [self._untold[0]])
            self._untold.popleft()


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
    try:
        _die_with(spec.parent_pid)
        lock = _lock(spec.places.local, words)
        try:
            return _run(Copier(spec), words)
        finally:
            os.close(lock)
    except Leave:
        return 0


def _run(copier: Copier, words: Input) -> int:
    parent = copier.spec.parent_pid
    while not parent or os.getppid() == parent:
        try:
            busy = copier.turn(thorough=words.ended)
        except (OSError, EverstepError) as error:
            number = getattr(error, "errno", None) or 0
            copier.report("copier.error", _sentence(error), failures=copier.failures, errno=number)
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


def _lock(local: Path, words: Input) -> int:
    """One copier a run and machine: an old one that is still leaving is waited for."""
    local.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(local / "copier.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
