"""A file that arrives from an object store: hashed and written in order, proven, and only then given its name.

What proves it is the best there is: a BLAKE3 that is known, the store's CRC32 of the whole object, or the MD5 that the
ETag of an object written in one piece is. An object in several parts without any of these has its size and ETag.
"""

import base64
import hashlib
import os
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from everstep.core.errors import EverstepError
from everstep.host.fetch_journal import Journal, Proven, prove
from everstep.store import digest, faults, s3_listing
from everstep.store.s3 import Bucket

STRETCH = 64 << 20
"""So many bytes of a large file are synced and written into the journal at once."""


@dataclass(frozen=True)
class Wanted:
    """An object to be fetched as `path`. `blake3` is what its digest must be, where that is known."""

    path: str
    key: str
    size: int
    etag: str
    blake3: str = ""

    @property
    def has_md5(self) -> bool:
        """Whether the ETag looks like the MD5 of the bytes: that of an object that was not written in parts."""
        return len(self.etag) == 32 and all(letter in "0123456789abcdef" for letter in self.etag)


class Holed(EverstepError):
    """The bytes are not those of the object."""


class Arriving:
    """One file on its way. `turn` guards all of it; the part that begins at `done` is the next to be taken."""

    def __init__(self, wanted: Wanted, home: Path, store: Bucket, journal: Journal, *, again: bool = False) -> None:
        self.wanted = wanted
        self.again = again
        self.turn = threading.Condition()
        self.done = self._synced = 0
        self.over = False
        self.part = f"{home}/parts/{digest.of_bytes(wanted.path.encode())[:16]}"
        self.target = f"{home}/data/{wanted.path}"
        self._store = store
        self._journal = journal
        self._handle = -1
        self._seen: Any = blake3()
        self._md5: Any = None
        self._crc32 = ""
        self._crc = 0

    def resume(self) -> Proven | None:
        """See what an earlier run left: the whole file, or its beginning. What was recorded is read and compared."""
        wanted = self.wanted
        believed = self._journal.believed(wanted.path, wanted.etag, wanted.size)
        whole = [one for one in believed if one.done == wanted.size]
        if whole and _has_size(self.target, wanted.size):
            done, seen = prove(self.target, whole[-1:])
            if done == wanted.size and wanted.blake3 in ("", seen.hexdigest()):
                self.over = True
                return whole[-1]
        self.done, self._seen = prove(self.part, [one for one in believed if one.done < wanted.size])
        self._synced = self.done
        return None

    def open(self) -> None:
        """Begin to write, or go on, and choose what will prove the bytes. Large objects are asked for their CRC32."""
        wanted = self.wanted
        if self._handle >= 0:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if self.done else os.O_TRUNC)
        self._handle = os.open(self.part, flags, 0o600)
        if self.done:
            os.lseek(self._handle, self.done, os.SEEK_SET)
        if wanted.blake3:
            return
        if wanted.size > STRETCH:
            self._crc32 = s3_listing.crc32(self._store.describe(wanted.key) or {})
        if not self._crc32 and wanted.has_md5:
            self._md5 = hashlib.md5(usedforsecurity=False)
        if self.done and not self.is_bare:
            os.lseek(self._handle, 0, os.SEEK_SET)
            for chunk in digest.chunks(self._handle, self.done - 1):
                self._check(chunk)

    @property
    def is_bare(self) -> bool:
        """Whether nothing but size and ETag will tell that the bytes are right."""
        return not (self.wanted.blake3 or self._crc32 or self._md5)

    def take(self, view: memoryview, crc32: str) -> None:
        """Hash and write the next part. `crc32` is the store's of the whole object, if this part is the whole."""
        if crc32 and not self.wanted.blake3:
            self._crc32, self._md5 = crc32, None
        self._seen.update(view)
        self._check(view)
        digest.write_all(self._handle, view)
        self.done += len(view)
        faults.point("stage.part")
        if self.done - self._synced >= STRETCH and self.done < self.wanted.size:
            os.fdatasync(self._handle)
            self._synced = self.done
            self._record()

    def complete(self) -> Proven:
        """Prove the file and give it its name. Raises Holed."""
        self.close()
        if not self._is_proven() and not self._has_other_etag():
            raise Holed(f"{self.wanted.path!r} has not the bytes that its source promises")
        faults.point("stage.whole")
        part = Path(self.part)
        try:
            part.replace(self.target)
        except FileNotFoundError:
            Path(self.target).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.replace(self.target)
        faults.point("stage.renamed")
        self.over = True
        return self._record()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _check(self, view: memoryview) -> None:
        if self._md5 is not None:
            self._md5.update(view)
        if self._crc32:
            self._crc = zlib.crc32(view, self._crc)

    def _is_proven(self) -> bool:
        if self.wanted.blake3:
            return bool(self._seen.hexdigest() == self.wanted.blake3)
        if self._crc32:
            return base64.b64encode(self._crc.to_bytes(4, "big")).decode() == self._crc32
        return self._md5 is None or bool(self._md5.hexdigest() == self.wanted.etag)

    def _has_other_etag(self) -> bool:
        """Whether the ETag is no MD5 although it looks like one: that of an object encrypted with a key of its own."""
        return self._md5 is not None and s3_listing.is_encrypted_apart(self._store.describe(self.wanted.key) or {})

    def _record(self) -> Proven:
        wanted = self.wanted
        one = Proven(wanted.path, wanted.etag, wanted.size, self.done, self._seen.hexdigest())
        self._journal.record(one)
        faults.point("stage.recorded")
        return one


def _has_size(path: str, size: int) -> bool:
    try:
        return os.lstat(path).st_size == size
    except (FileNotFoundError, NotADirectoryError):
        return False
