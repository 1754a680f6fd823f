"""The data set manifest: which files a run trains on, and their digests."""

import hashlib
from pathlib import PurePosixPath

from pydantic import Field, field_validator

from everstep.core.record import Record, Versioned


def inside(path: str) -> str:
    """The path itself, if it is relative, normal and stays inside its folder; ValueError otherwise."""
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\0" in path or "\\" in path:
        raise ValueError(f"path {path!r} does not stay inside its folder")
    return path


class FileEntry(Record):
    """One file: its path inside the folder, size in bytes, BLAKE3 as 64 hex digits."""

    path: str
    size: int = Field(ge=0)
    blake3: str = Field(pattern=r"^[0-9a-f]{64}$")

    _inside = field_validator("path")(inside)


class DatasetManifest(Versioned):
    """The files of a data set, sorted by path."""

    source: str
    files: tuple[FileEntry, ...]

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.files)

    @property
    def fingerprint(self) -> str:
        """Digest over paths, sizes and contents; the place of the source does not count."""
        digest = hashlib.sha256()
        for entry in sorted(self.files, key=lambda entry: entry.path):
            digest.update(f"{entry.path}\0{entry.size}\0{entry.blake3}\n".encode())
        return digest.hexdigest()
