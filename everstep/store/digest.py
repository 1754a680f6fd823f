"""BLAKE3 of files and bytes, and copies that are hashed on their way.

Files are read in chunks, not mapped: a mapped file that shrinks, or a mount that fails, ends the process with SIGBUS,
where a read gives an error that names the file. Reading costs a third of the speed of a mapping that is in memory.
"""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

CHUNK = 4 << 20
FLUSH = 64 << 20


def of_bytes(data: bytes) -> str:
    return str(blake3(data).hexdigest())


def of_file(
    path: Path, see: Callable[[memoryview], None] | None = None, *, cold: bool = False, limit: int | None = None
) -> str:
    """The digest of a regular file; `see` is shown the same bytes in the same pass.

    `cold` drops the file from the page cache first, so that the bytes come from the device where the kernel allows it,
    and again afterwards: what others have in the cache is not driven out by a file that was only proven.
    A symbolic link is refused (OSError ELOOP). Of a file longer than `limit` one byte more is read, and no end is waited
    for.
    """
    digest = blake3(max_threads=blake3.AUTO)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if cold:
            _cool(handle)
        for chunk in chunks(handle, limit):
            digest.update(chunk)
            if see:
                see(chunk)
        if cold:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return str(digest.hexdigest())


def copy(
    source: Path, target: Path, moved: Callable[[int], None], *, follow: bool = False, limit: int | None = None
) -> tuple[str, int]:
    """Copy a file's bytes to `target` (created or emptied), synced to the device; digest and size of what was read.

    `moved` is told the bytes so far after every chunk. Memory and dirty pages stay bounded. With `follow` the source
    may be a symbolic link. Of a file longer than `limit` (one that grows) one byte more is copied.
    """
    digest = blake3(max_threads=blake3.AUTO)
    done = unflushed = 0
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for chunk in chunks(reader, limit):
                digest.update(chunk)
                write_all(writer, chunk)
                done, unflushed = done + len(chunk), unflushed + len(chunk)
                if unflushed >= FLUSH:
                    os.fdatasync(writer)
                    unflushed = 0
                moved(done)
            forget(writer)
        finally:
            os.close(writer)
    finally:
        os.close(reader)
    return str(digest.hexdigest()), done


def chunks(handle: int, limit: int | None = None) -> Iterator[memoryview]:
    """The bytes of an open file from its position on, `limit` + 1 at most.

    Each view is valid until the next one is asked for.
    """
    left = CHUNK if limit is None else limit + 1
    buffer = memoryview(bytearray(min(left, CHUNK)))
    while count := os.readv(handle, [buffer[:left]]):
        yield buffer[:count]
        if limit is not None:
            left -= count


def forget(handle: int) -> None:
    """Sync a file and drop it from the page cache, as far as the kernel and the file system do that."""
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _cool(handle: int) -> None:
    try:
        forget(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):  # a read-only mount has nothing to sync
            raise


def write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]
