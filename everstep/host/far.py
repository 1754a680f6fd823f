"""What a flow run asks of the object tier when it begins: is the run there, what is there of it, is the attempt ours.

All of it is asked before anything trains, and with a limit of time. Later only the uploader speaks with the store.
"""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from everstep.core.checkpoint import AttemptClaim, Key, RunRecord
from everstep.core.errors import EverstepError, Fenced, StoreUnavailable
from everstep.core.health import Severity
from everstep.core.job import TrainJob
from everstep.core.place import is_object
from everstep.host.uploader import HISTORY
from everstep.store import atomic, mirror, object_tier
from everstep.store.layout import RunPlaces
from everstep.store.objects import NotThere
from everstep.store.s3_access import Access

CLAIM_SECONDS = 10.0
"""How long an attempt waits for its claim there. A store that is away holds up no run that this machine has whole."""
LOOK_SECONDS = 20.0
END_SECONDS = 5.0
FETCH_TRIES = 3

_Answer = TypeVar("_Answer")


class Elsewhere:
    """The runs of a job on the object tier, for `runs.own`."""

    def __init__(self, job: TrainJob, access: Access | None) -> None:
        self._uri = f"{str(job.tiers.object).rstrip('/')}/{job.name}"
        self._access = access

    def records(self) -> list[RunRecord]:
        """Every run that is known there, in no order. Raises StoreUnavailable: then nobody can tell what is there."""
        try:
            found = _aside(lambda: object_tier.runs(self._uri, self._access, seconds=LOOK_SECONDS))
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"tiers.object: whether this run is there cannot be told, so it does not start anew: {error}"
            ) from error
        return [RunRecord.parse(data, f"{self._uri}/{run}", "run.json") for run, data in sorted(found.items())]

    def restore(self, record: RunRecord, places: RunPlaces) -> None:
        """Make the run directory of a run that is only there. Its record comes last: without it, it is none."""
        for folder in ("attempts", "segments", "marks", "logs", "checkpoints"):
            (places.persistent / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        _aside(lambda: _take_all(object_tier.open_run(f"{self._uri}/{record.run}", self._access), places))
        atomic.write(places.run_record, record.to_json().encode())


class Far:
    """One run on the object tier, as a flow run uses it. Nothing is asked where the job has no object tier."""

    def __init__(self, places: RunPlaces, access: Access | None, record: Callable[..., None]) -> None:
        self._places = places
        self._access = access
        self._record = record

    def look(self) -> bool:
        """Bring the mirror up to date; False if the store does not answer, which is said."""
        if self._places.object is None:
            return True
        try:
            _aside(lambda: mirror.refresh(self._places, self._tier(LOOK_SECONDS)))
        except StoreUnavailable as error:
            text = f"the object tier was not asked, what is known of it may be old: {error}"
            self._record("object.away", severity=Severity.medium, text=text)
            return False
        return True

    def bring(self, uri: str, key: Key, until: float | None = None) -> Path:
        """Bring a checkpoint (`uri` ends with its folder) to the local tier, every byte proven; where it is then.

        It is given up `until` then (`time.monotonic`); what has come is used by the next try. Raises NotThere, Damaged, StoreUnavailable, and ValueError for what the user must mend.
        """
        run = uri.removesuffix(f"/checkpoints/{key.folder}")
        near = self._places.checkpoint("local", key)
        if near.exists():  # another copy of it, which is set aside as evidence
            near = self._places.local / "restored" / key.folder
            shutil.rmtree(near, ignore_errors=True)
        near.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in near.parent.glob(".fetching-*"):
            if left.name != f".fetching-{key.folder}":
                shutil.rmtree(left)
        for turn in range(FETCH_TRIES):
            try:
                seconds = None if until is None else until - time.monotonic()
                _aside(lambda: self._tier_at(run, LOOK_SECONDS).fetch(key, near), seconds)
            except StoreUnavailable as error:
                if turn + 1 == FETCH_TRIES or (until is not None and time.monotonic() >= until):
                    raise
                self._record("object.slow", severity=Severity.medium, text=str(error), checkpoint=key.folder)
            except OSError as error:
                raise StoreUnavailable(f"tiers.local: {near}: {error.strerror or error}.") from error
            else:
                break
        return near

    def claim(self, claim: AttemptClaim) -> None:
        """Claim the attempt there too, so that no machine with another persistent tier has the run. Raises Fenced.

        Where the store does not answer in time the uploader claims it later, and the run ends if that fails.
        """
        if self._places.object is None:
            return
        try:
            ours = _aside(lambda: self._ask(claim), CLAIM_SECONDS)
        except (EverstepError, ValueError) as error:
            text = f"attempt {claim.attempt} is not claimed on the object tier yet: {error}"
            self._record("object.unclaimed", severity=Severity.medium, text=text)
            return
        if not ours:
            raise Fenced(f"Attempt {claim.attempt} of this run was claimed on the object tier by another machine.")

    def tell_end(self) -> None:
        """Put the run's last line there, so that a machine that knows nothing of the run knows how it ended."""
        if self._places.object is None:
            return
        data = self._places.final.read_bytes()
        try:
            _aside(lambda: self._tier(END_SECONDS).write("result.json", data), END_SECONDS)
        except (EverstepError, ValueError) as error:
            self._record("object.away", severity=Severity.low, text=f"the end is not told to the object tier: {error}")

    def _ask(self, claim: AttemptClaim) -> bool:
        tier = self._tier(CLAIM_SECONDS)
        ours = tier.claim(claim)
        if ours and not tier.is_guarded(claim):
            text = "the object store has no conditional PUT: it cannot keep two machines from owning this run"
            self._record("object.unguarded", severity=Severity.medium, text=text)
        return ours

    def _tier(self, seconds: float) -> object_tier.ObjectTier:
        return self._tier_at(str(self._places.object), seconds)

    def _tier_at(self, uri: str, seconds: float) -> object_tier.ObjectTier:
        if not is_object(uri):
            return object_tier.open_run(unquote(urlsplit(uri).path) if uri.startswith("file://") else uri)
        return object_tier.open_run(uri, self._access, seconds=seconds)


def elsewhere(job: TrainJob, access: Access | None) -> Elsewhere | None:
    """The object tier as a place to look for a run that this machine does not know; None where the job has none."""
    return Elsewhere(job, access) if job.tiers.object else None


def _take_all(tier: object_tier.ObjectTier, places: RunPlaces) -> None:
    """What a run directory needs of the object tier, but for the run's record."""
    seen = mirror.refresh(places, tier)
    _take(tier, "structure.json", places.structure)
    _take(tier, "result.json", places.final)
    for name in HISTORY:
        if f"history/{name}" in seen.sizes:
            _take(tier, f"history/{name}", places.persistent / name)


def _take(tier: object_tier.ObjectTier, path: str, target: Path) -> None:
    try:
        atomic.write(target, tier.read(path))
    except NotThere:
        return


def _aside(call: Callable[[], _Answer], seconds: float | None = None) -> _Answer:
    """Call it in a thread and wait: the main thread hears signals meanwhile, which the client of a store holds up.

    Raises StoreUnavailable if it takes longer than `seconds`; it is then left to itself.
    """
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: it is raised where the answer is awaited
            answer.set_exception(error)

    threading.Thread(target=run, name="everstep-object-tier", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():
            raise
        raise StoreUnavailable(f"The object tier does not answer within {seconds:.0f} s.") from None
