"""What the world does to a run, as exceptions. A user's own mistake is a ValueError instead."""


class EverstepError(Exception):
    """Base of all that Everstep raises about the world; its text is one plain sentence with the remedy."""


class AlreadyOwned(EverstepError):
    """Another living flow run owns this run."""


class Fenced(EverstepError):
    """A newer attempt has been claimed: this supervisor or child no longer owns the run."""


class Damaged(EverstepError):
    """Stored bytes are not what was committed. `path` is the file, relative to its folder; `why` says how."""

    def __init__(self, where: str, path: str, why: str) -> None:
        super().__init__(f"{where}: {path} {why}.")
        self.where = where
        self.path = path
        self.why = why


class NoValidCheckpoint(EverstepError):
    """Checkpoints were committed, but none verifies any more: a person must look before anything starts at step 0."""


class TrainingFailed(EverstepError):
    """The run cannot go on by itself; the text says what ended it and what to do."""


class StoreUnavailable(EverstepError):
    """A tier did not answer, is full, or is read-only. Unknown is not failed: callers look again."""
