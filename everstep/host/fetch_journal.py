"""What of a data set is on the local disk already: a line for each proven stretch, proven again before it is believed."""

import json
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from everstep.store import digest, jsonl

FILE = "fetched.jsonl"


@dataclass(frozen=True)
class Proven:
    """The first `done` bytes of a file with this ETag have this BLAKE3; all `size` of them if it is whole."""

    path: str
    etag: str
    size: int
    done: int
    blake3: str


class Journal:
    """The journal of one half-done data set. Lines come from several threads."""

    def __init__(self, home: Path) -> None:
        path = home / FILE
        self._known: dict[str, list[Proven]] = {}
        for row in jsonl.read(path):
            one = _parse(row)
            if one:
                self._known.setdefault(one.path, []).append(one)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._handle)
        os.write(self._handle, b"\n" if self._known else b"")  # closes a line that a dead stager has torn

    def record(self, one: Proven) -> None:
        """The bytes are where it says, and on the disk too if the file is not whole. One write, so lines never mix."""
        os.write(self._handle, f"{json.dumps(vars(one))}\n".encode())

    def believed(self, path: str, etag: str, size: int) -> list[Proven]:
        """What was recorded of this file as it is at the source now, shortest stretch first."""
        mine = [one for one in self._known.get(path, ()) if (one.etag, one.size) == (etag, size)]
        return sorted(mine, key=lambda one: one.done)


def prove(file: str, stretches: list[Proven]) -> tuple[int, Any]:
    """How many bytes from the start of a file are as they were recorded, and the BLAKE3 object that has seen them.

    Reads them. A stretch that does not match ends it: what comes after is not believed.
    """
    good, seen = 0, blake3()
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return good, seen
    try:
        for one in stretches:
            state, left = seen.copy(), one.done - good
            for chunk in digest.chunks(handle, left - 1) if left else ():
                state.update(chunk)
                left -= len(chunk)
            if left or state.hexdigest() != one.blake3:
                break
            good, seen = one.done, state
    finally:
        os.close(handle)
    return good, seen


def _parse(row: Any) -> Proven | None:
    try:
        return Proven(str(row["path"]), str(row["etag"]), int(row["size"]), int(row["done"]), str(row["blake3"]))
    except (KeyError, TypeError, ValueError, IndexError):
        return None  # a torn or foreign line: those bytes are fetched again
