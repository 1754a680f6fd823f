"""Judgement of a scrub: what is due next, what may mend a rotten copy, and how long to wait between two reads.

A scrub reads stored checkpoints again, on every tier, because disks and stores lose bits while nobody looks. A pass looks
at every copy once, the one that was proven longest ago first; a pass that was cut off is gone on with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from everstep.core.checkpoint import Key
from everstep.core.place import S3Settings
from everstep.core.record import Record, Versioned

MB_PER_SECOND = 64.0
"""So much is read by default: 5.5 TB a day, and yet 5 % of a link of 10 Gbit/s and 2 % of an NVMe drive."""

TIERS = ("local", "persistent", "object")
"""Nearest first."""


class ScrubJob(Record):
    """What is to be scrubbed, and how fast. Without `where` it is the persistent tier of the block `tiers`."""

    where: str | None = Field(None, description="A run directory, the folder of a job, or a persistent tier.")
    mb_per_second: float = Field(MB_PER_SECOND, gt=0, allow_inf_nan=False, description="MB read a second, all in all.")
    minutes: float | None = Field(None, gt=0, description="Leave off after so long; the next scrub goes on from there.")
    tiers: str | None = Field(None, description="A StorageTiers block, for the keys of the object store.")
    s3: S3Settings = S3Settings()
    ledger: str | None = Field(None, description="SQLAlchemy URL of the ledger; that of each run's job if not given.")

    @property
    def name(self) -> str:
        return f"scrub of {self.where or self.tiers}"


class Outcome(StrEnum):
    """What became of a copy that was looked at."""

    sound = "sound"
    repaired = "repaired"
    rotten = "rotten"  # and no other tier could mend it
    aside = "aside"  # whole, but quarantined for another reason than its bytes
    gone = "gone"  # retention took it away meanwhile
    unknown = "unknown"  # its tier did not answer


@dataclass(frozen=True)
class Copy:
    """A checkpoint on a tier as it is known before it is read.

    `manifest` is the digest of the manifest that was last proven there, empty if nobody knows. `proven` is when that was
    (Unix seconds, 0 for never). `present` is False where marks or the mirror know of one that is not there any more.
    """

    key: Key
    tier: str
    manifest: str = ""
    proven: float = 0.0
    quarantined: bool = False
    present: bool = True

    @property
    def place(self) -> str:
        return f"{self.key.folder}.{self.tier}"


class Progress(Versioned):
    """`scrub.json` of a run: how far a pass has come, so that one that was killed goes on.

    `began` is when the pass began, 0 between passes. `checked` has the time at which a place was last looked at.
    `repairing` has the places whose repair has begun, with the digest of the manifest that belongs there ("" if unknown).
    """

    began: float = 0.0
    checked: dict[str, float] = {}
    repairing: dict[str, str] = {}


class Line(Record):
    """What was found of one copy. `file` and `why` say what is wrong with it."""

    job: str
    run: str
    checkpoint: str
    tier: str
    outcome: Outcome
    file: str = ""
    why: str = ""
    repaired_from: str = ""
    evidence: str = Field("", description="Where the rotten bytes are kept.")


class Scrubbed(Record):
    """What a scrub of one run came to. `finished` is False where time was over or another scrub is at work there."""

    job: str
    run: str
    lines: tuple[Line, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    finished: bool = True
    note: str = ""

    def count(self, outcome: Outcome) -> int:
        return sum(1 for one in self.lines if one.outcome is outcome)

    @property
    def counts(self) -> dict[str, int]:
        """How many copies came to each outcome."""
        return {outcome.value: self.count(outcome) for outcome in Outcome}


def due(copies: Iterable[Copy], progress: Progress) -> list[Copy]:
    """The copies that this pass has still to look at: the one that was proven longest ago first, then the older one.

    One that somebody else has proven since the pass began is not due.
    """

    def seen(copy: Copy) -> float:
        return max(copy.proven, progress.checked.get(copy.place, 0.0))

    waiting = [copy for copy in copies if seen(copy) < progress.began or copy.place in progress.repairing]
    return sorted(waiting, key=lambda copy: (seen(copy), copy.key, TIERS.index(copy.tier)))


def sources(rotten: Copy, expected: str, copies: Sequence[Copy]) -> list[Copy]:
    """The copies on other tiers from which a rotten one may be mended, nearest first.

    `expected` is the digest of the manifest that belongs there, empty if nobody knows it: a checkpoint of the same name
    with other contents never takes its place.
    """
    return sorted(
        (
            copy
            for copy in copies
            if copy.key == rotten.key
            and copy.tier != rotten.tier
            and copy.present
            and not copy.quarantined
            and (not expected or not copy.manifest or copy.manifest == expected)
        ),
        key=lambda copy: TIERS.index(copy.tier),
    )


def pause(moved: int, bytes_per_second: float, elapsed: float) -> float:
    """Seconds to wait after `moved` bytes in `elapsed` seconds, so that the rate is kept."""
    return max(0.0, moved / bytes_per_second - elapsed)


def sentence(found: Sequence[Scrubbed]) -> str:
    """What a person must know when something is left to do; empty if all is well."""
    lines = [line for one in found for line in one.lines]
    bad = [line for line in lines if line.outcome is Outcome.rotten]
    silent = sorted({line.tier for line in lines if line.outcome is Outcome.unknown})
    if bad:
        first = bad[0]
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return (
            f"{first.checkpoint} of {first.job}/{first.run} is rotten on the {first.tier} tier ({first.why}) and was not "
            f"repaired{more}; it is quarantined and kept. Put a sound copy on another tier and scrub again."
        )
    if silent:
        why = next(line.why for line in lines if line.outcome is Outcome.unknown)
        return (
            f"The {' and the '.join(silent)} tier could not be read ({why.rstrip('.')}); scrub again when it answers."
        )
    return ""
