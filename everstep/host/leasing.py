"""The parent's side of the lease: written ahead of the child, so that a healthy boundary costs it nothing."""

from everstep.core.job import TrainJob
from everstep.core.segment import Lease, next_segment, should_extend
from everstep.store import atomic
from everstep.store.layout import RunPlaces

AHEAD_SECONDS = 5.0


class LeaseKeeper:
    """The lease of one attempt, on disk. A write that fails is tried again at the next call."""

    def __init__(self, job: TrainJob, places: RunPlaces, attempt: int, step: int, last_segment: int) -> None:
        self._job = job
        self._places = places
        self._written: Lease | None = None
        self.lease = Lease(attempt=attempt, ends=next_segment(job, step, last_segment, None))

    def extend(self, step: int, step_seconds: float | None, *, gates_pass: bool = True) -> dict[int, int]:
        """Lease the next segment if it is time and the gates pass; what was added, as {number: step at which it ends}."""
        begun = [end for end in self.lease.ends.values() if end > step]
        if step_seconds is None and len(begun) > 1:
            return {}  # nothing is measured yet, and one segment ahead is enough
        if not should_extend(self.lease, step, step_seconds, gates_pass=gates_pass, ahead_seconds=AHEAD_SECONDS):
            return {}
        last = max(self.lease.ends, default=0)
        more = next_segment(self._job, self.lease.until_step, last, step_seconds)
        if more:
            self.lease = self.lease.model_copy(update={"ends": self.lease.ends | more})
        return more

    def pace(self, seconds: float | None) -> None:
        """Save every so many seconds from now on, if anything is said."""
        if seconds is not None and seconds != self.lease.save_every_seconds:
            self.lease = self.lease.model_copy(update={"save_every_seconds": seconds})

    def stop(self) -> None:
        self.lease = self.lease.model_copy(update={"stop": True})

    def forget_before(self, segment: int) -> None:
        """Drop the ends of reported segments: a long run's lease stays short."""
        ends = {number: end for number, end in self.lease.ends.items() if number >= segment}
        if ends:
            self.lease = self.lease.model_copy(update={"ends": ends})

    def write(self) -> None:
        """Bring the lease on disk up to date, if it is not. Raises OSError."""
        if self.lease is not self._written:
            atomic.write(self._places.lease, self.lease.to_json().encode(), sync=False)
            self._written = self.lease
