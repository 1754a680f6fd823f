"""Files of one JSON value a line, which survive a writer that was killed in the middle of a line."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def append(path: Path, rows: Iterable[str], *, sync: bool = False) -> None:
    """Append lines in one write. A torn last line of a dead writer is closed first, so it spoils no other."""
    data = "".join(f"{row}\n" for row in rows).encode()
    if not data:
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            data = b"\n" + data
        os.write(handle, data)
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path, newest_bytes: int | None = None) -> Iterator[Any]:
    """The values in `path`, without torn or foreign lines; nothing if there is no such file.

    With `newest_bytes` only those that begin in the file's last so many bytes.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        if newest_bytes is not None and (size := file.seek(0, 2)) > newest_bytes:
            file.seek(size - newest_bytes)
            file.readline()
        else:
            file.seek(0)
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue
