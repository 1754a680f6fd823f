"""The seam to an object store: what staging and the object tier ask of it. `everstep.store.s3` is the one for S3."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from everstep.core.errors import EverstepError
from everstep.core.record import Record

Moved = Callable[[int], None]
"""Told the number of bytes that have just moved, not the sum; may be called from several threads."""


class ObjectStat(Record):
    """An object as the store describes it: size in bytes, time of its last change, ETag and version without quotes."""

    key: str
    size: int
    modified: float
    etag: str
    version: str | None = None


class NotThere(EverstepError):
    """No such object, or no such bucket: the store answered."""


class Changed(EverstepError):
    """The object is no longer the one that was asked for."""


class Exists(EverstepError):
    """Somebody else has created the object first."""


class ObjectStore(Protocol):
    """One bucket. Keys are whole keys in it.

    All methods have deadlines and bounded retries with jitter. They raise StoreUnavailable where the store does not
    answer or asks to slow down for too long (unknown is not failed), and ValueError with a plain sentence for what the
    user must mend: credentials that are wrong or have run out, no right to do it, a bucket that is not there.
    No message holds a secret.
    """

    bucket: str

    def list(self, prefix: str) -> Iterator[ObjectStat]:
        """The objects whose key begins with `prefix` followed by a slash (or all, for an empty one), sorted by key."""
        ...

    def head(self, key: str) -> ObjectStat | None:
        """The object as it is now, None if it is not there."""
        ...

    def read(self, key: str, start: int = 0, end: int | None = None, *, etag: str | None = None) -> bytes:
        """Bytes from `start` up to, not with, `end`. Raises NotThere; Changed if it no longer has this ETag.

        A body that is shorter or longer than asked for is fetched again and never returned.
        """
        ...

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Write an object whole. With `create` only if it is not there: raises Exists."""
        ...

    def put_file(self, key: str, path: Path, *, moved: Moved | None = None) -> None:
        """Write a file as one object, in several parts if it is large. It appears whole or not at all."""
        ...

    def delete(self, key: str) -> None:
        """Remove it; no error if it is not there."""
        ...

    def abort_uploads(self, prefix: str) -> int:
        """Give up the unfinished uploads of large files below `prefix`; how many there were.

        They are in no listing, and cost their space. Only for a place that nobody else is writing to.
        """
        ...
