"""One run's scrub: every stored checkpoint is read again, on each tier, and what is rotten is set aside and mended.

It runs beside a living training and needs nothing of it. The run directory keeps what it does: `scrub.json` (how far it
has come), `scrub.jsonl` (its events, on their way to the ledger) and `scrub.lock` (one scrub of a run at a time). May be
killed anywhere and run again: it goes on.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from everstep.core.checkpoint import MANIFEST, State, Structure, Verification, abandoned
from everstep.core.errors import Damaged, EverstepError, StoreUnavailable
from everstep.core.health import Severity
from everstep.core.job import CheckpointPolicy
from everstep.core.scrub import Copy, Line, Outcome, Progress, Scrubbed, due, sources
from everstep.host import runs, stored
from everstep.host.gentle import Pace
from everstep.host.mending import Mender
from everstep.store import atomic, checkpoint, faults, marks, mirror, object_rot
from everstep.store.layout import RunPlaces
from everstep.store.object_tier import ObjectTier, Seen

CONFIRM_SECONDS = 2.0
"""A removal takes an object store's files one by one: so long after a finding it is waited whether all of it goes."""

Record = Callable[..., None]


class Scrub:
    """One scrub of one run. `far` opens its place on the object tier, None where there is none."""

    def __init__(
        self,
        places: RunPlaces,
        far: Callable[[], ObjectTier] | None,
        pace: Pace,
        record: Record,
        policy: CheckpointPolicy | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run, self.job = places.persistent.name, places.persistent.parent.name
        self._places = places
        self._far = far
        self._tier: ObjectTier | None = None
        self._pace = pace
        self._record = record
        self._policy = policy or CheckpointPolicy()
        self._over = over
        self._seen: Seen | None = None
        self._progress = Progress()
        self._lines: list[Line] = []
        self._resumed: dict[int, int] = {}

    def do(self) -> Scrubbed:
        """Look at what is due, until all has been looked at or `over` says that time is up."""
        began, before = time.monotonic(), self._pace.moved
        with _alone(self._places) as alone:
            if not alone:
                return Scrubbed(job=self.job, run=self.run, finished=False, note="another scrub is at work here")
            finished = self._pass()
            found = Scrubbed(
                job=self.job,
                run=self.run,
                lines=tuple(self._lines),
                bytes=self._pace.moved - before,
                seconds=round(time.monotonic() - began, 3),
                finished=finished,
            )
            left = found.count(Outcome.rotten) or found.count(Outcome.unknown)
            severity = Severity.medium if left else Severity.low
            kind = "scrub.finished" if finished else "scrub.paused"
            self._record(kind, severity=severity, bytes=found.bytes, seconds=found.seconds, **found.counts)
            return found

    def _pass(self) -> bool:
        places = self._places
        self._progress = _read_progress(places)
        if not self._progress.began:
            self._progress = self._progress.model_copy(update={"began": time.time()})
        self._resumed = {number: claim.resumed_from for number, claim in runs.claims(places).items()}
        structure = checkpoint.read_structure(places.persistent)
        self._look_far()
        copies = self._copies()
        if copies and structure is None:
            raise Damaged(
                str(places.persistent), "structure.json", "is missing; restore it from the object tier or a copy"
            )
        self._keep_progress(copies)
        waiting = due(copies, self._progress)
        self._record("scrub.started", copies=len(waiting), of=len(copies))
        faults.point("scrub.begin")
        for copy in waiting:
            if self._over():
                return False
            line = self._look(copy, structure)
            if line is not None:
                self._lines.append(line)
            if line is None or line.outcome is not Outcome.unknown:
                checked = self._progress.checked | {copy.place: time.time()}
                self._progress = self._progress.model_copy(update={"checked": checked})
                self._keep_progress()
        self._progress = self._progress.model_copy(update={"began": 0.0})
        self._keep_progress()
        return True

    def _look_far(self) -> None:
        """List the object tier. One that shows nothing at all of the run is not there: no mount, or another bucket."""
        if self._far is None:
            return
        try:
            self._tier = self._far()
            self._seen = self._tier.look()
            if "run.json" not in self._seen.sizes and stored.mirrored(self._places):
                raise StoreUnavailable(f"{self._tier.uri} shows nothing of this run; is it mounted?")
        except (EverstepError, ValueError, OSError) as error:
            self._seen = None
            self._lines.append(self._unknown("", "object", error))

    def _copies(self) -> list[Copy]:
        return stored.copies(self._places, self._seen, self._progress.repairing, self._resumed, self._policy)

    # -- one copy -----------------------------------------------------------------------------------------------------

    def _look(self, copy: Copy, structure: Structure | None) -> Line | None:
        """Read one copy again and do what is to be done; None where there is nothing to say of it."""
        if copy.quarantined and copy.place not in self._progress.repairing and not self._may_mend(copy):
            return self._line(copy, Outcome.aside, why=marks.reason(self._places, copy.key.folder, copy.tier, State.quarantined))  # fmt: skip
        try:
            wrong = self._wrong(copy, structure)
            if wrong and copy.present and self._is_going(copy):
                return self._line(copy, Outcome.gone)
            if wrong and copy.present:
                wrong = self._wrong(copy, structure)  # a second time: a read that failed once is no rot
            if not wrong:
                return self._sound(copy)
            return self._rotten(copy, wrong)
        except (EverstepError, OSError, ValueError) as error:  # ValueError: the rights and keys of a store
            return self._unknown(copy.key.folder, copy.tier, error)

    def _wrong(self, copy: Copy, structure: Structure | None) -> dict[str, str]:
        """What is wrong with a copy, by file; empty if nothing is. Raises StoreUnavailable."""
        if not copy.present:
            return {MANIFEST: "is missing, with all of the checkpoint"}
        if copy.tier == "object":
            assert self._tier is not None
            there = self._tier.look(f"checkpoints/{copy.key.folder}").files(copy.key)
            return object_rot.find(self._tier, copy.key, there, self.run, self.job, self._pace.take)
        result = self._verify(copy, structure)
        return {} if result.ok else {result.file or MANIFEST: result.why}

    def _verify(self, copy: Copy, structure: Structure | None) -> Verification:
        def see(piece: memoryview) -> None:
            self._pace.see(piece)
            faults.point("scrub.reading")

        folder = self._places.checkpoint(copy.tier, copy.key)
        return checkpoint.verify(folder, structure, run=self.run, job=self.job, see=see)

    def _is_going(self, copy: Copy) -> bool:
        """Whether retention has removed it meanwhile, or is at it: then it is nobody's loss."""
        if copy.tier != "object":
            return not self._places.checkpoint(copy.tier, copy.key).exists()
        assert self._tier is not None
        until = time.monotonic() + CONFIRM_SECONDS
        while MANIFEST not in (left := self._tier.look(f"checkpoints/{copy.key.folder}").files(copy.key)):
            if not left and copy.key not in stored.mirrored(self._places):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(CONFIRM_SECONDS / 10)
        return False

    def _sound(self, copy: Copy) -> Line:
        if copy.place in self._progress.repairing:  # mended by a scrub that was killed before it could say so
            return self._mended(copy, "", "")
        if copy.quarantined:
            why = marks.reason(self._places, copy.key.folder, copy.tier, State.quarantined)
            return self._line(copy, Outcome.aside, why=why)
        self._mark_sound(copy)
        return self._line(copy, Outcome.sound)

    def _rotten(self, copy: Copy, wrong: Mapping[str, str]) -> Line:
        file, why = next(iter(sorted(wrong.items())))
        sentence = why if why.endswith(".") else f"{copy.key.folder}: {file} {why}."
        if not copy.quarantined:
            faults.point("scrub.found")
            self._tell("scrub.rot", copy, Severity.high, sentence, file=file)
            marks.quarantine(self._places, copy.key.folder, copy.tier, sentence)
            faults.point("scrub.quarantined")
        expected = self._progress.repairing.get(copy.place, copy.manifest)
        self._note_repair(copy, expected)
        trouble = ""
        for source in sources(copy, expected, self._copies()):
            mender = Mender(self._places, self._tier, self._pace)
            try:
                evidence = mender.mend(copy, source, expected, wrong)
                if self._wrong_now(copy):
                    raise Damaged(copy.key.folder, file, f"is not sound after its repair from the {source.tier} tier")
                return self._mended(copy, source.tier, evidence, file, sentence)
            except (EverstepError, OSError, ValueError) as error:
                trouble = f" It could not be repaired from the {source.tier} tier: {_plain(error)}"
        if not trouble:
            self._note_repair(copy, None)
        return self._line(copy, Outcome.rotten, file=file, why=sentence + trouble)

    def _wrong_now(self, copy: Copy) -> dict[str, str]:
        again = Copy(copy.key, copy.tier, copy.manifest)
        return self._wrong(again, checkpoint.read_structure(self._places.persistent))

    def _may_mend(self, copy: Copy) -> bool:
        return not abandoned(copy.key, self._resumed) and bool(sources(copy, copy.manifest, self._copies()))

    def _mended(self, copy: Copy, source: str, evidence: str, file: str = "", why: str = "") -> Line:
        """The copy is whole again: marked so, and only then no longer set aside."""
        self._mark_sound(copy)
        faults.point("scrub.marked")
        marks.lift(self._places, copy.key.folder, copy.tier)
        faults.point("scrub.lifted")
        more = {"source": source, "evidence": evidence} if source else {}
        self._tell("scrub.repaired", copy, Severity.medium, f"{copy.key.folder} is whole again on the {copy.tier} tier", **more)  # fmt: skip
        self._note_repair(copy, None)
        return self._line(copy, Outcome.repaired, file=file, why=why, repaired_from=source, evidence=evidence)

    def _mark_sound(self, copy: Copy) -> None:
        places, folder = self._places, copy.key.folder
        if copy.tier == "object":
            assert self._tier is not None
            mirror.note(places, copy.key, self._tier.manifest(copy.key), proven=True)
            return
        digest = checkpoint.manifest_digest(places.checkpoint(copy.tier, copy.key))
        if digest is None:  # retention has removed it since
            return
        marks.verified(places, folder, copy.tier, Verification(ok=True, manifest_digest=digest))
        if copy.tier == "persistent":
            marks.durable(places, folder, copy.tier, digest)
        if not places.checkpoint(copy.tier, copy.key).exists():
            marks.forget(places, folder, copy.tier)

    # -- what is written down -----------------------------------------------------------------------------------------

    def _note_repair(self, copy: Copy, expected: str | None) -> None:
        """Remember that a repair has begun, or, with None, that it has come to its end."""
        others = {place: digest for place, digest in self._progress.repairing.items() if place != copy.place}
        repairing = others if expected is None else others | {copy.place: expected}
        self._progress = self._progress.model_copy(update={"repairing": repairing})
        self._keep_progress()

    def _keep_progress(self, copies: list[Copy] | None = None) -> None:
        if copies is not None:
            held = {copy.place for copy in copies}
            checked = {place: at for place, at in self._progress.checked.items() if place in held}
            self._progress = self._progress.model_copy(update={"checked": checked})
        atomic.write(_file(self._places), self._progress.to_json().encode())

    def _tell(self, kind: str, copy: Copy, severity: Severity, text: str, **data: str) -> None:
        self._record(
            kind, step=copy.key.step, severity=severity, text=text, checkpoint=copy.key.folder, tier=copy.tier, **data
        )

    def _line(self, copy: Copy, outcome: Outcome, **more: str) -> Line:
        return Line(job=self.job, run=self.run, checkpoint=copy.key.folder, tier=copy.tier, outcome=outcome, **more)

    def _unknown(self, folder: str, tier: str, error: Exception) -> Line:
        why = _plain(error)
        return Line(job=self.job, run=self.run, checkpoint=folder, tier=tier, outcome=Outcome.unknown, why=why)


def _read_progress(places: RunPlaces) -> Progress:
    """How far the last pass came. A file that cannot be read costs only that."""
    path = _file(places)
    try:
        return Progress.parse(path.read_bytes(), str(path.parent), path.name)
    except (FileNotFoundError, Damaged):
        return Progress()


def _file(places: RunPlaces) -> Path:
    return places.persistent / "scrub.json"


def _plain(error: Exception) -> str:
    if isinstance(error, OSError):
        return ": ".join(part for part in (str(error.filename or ""), error.strerror or str(error)) if part)
    return " ".join(str(error).split())


@contextmanager
def _alone(places: RunPlaces) -> Iterator[bool]:
    """Whether no other scrub is at work on this run; if so, none begins for the length of the block."""
    handle = os.open(places.persistent / "scrub.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        yield False
        return
    try:
        yield True
    finally:
        os.close(handle)
