"""Paths stay inside, and a data set is known by its contents."""

import pytest
from pydantic import ValidationError

from everstep.core.dataset import DatasetManifest, FileEntry, inside

GOOD = ["a", "a.txt", "a/b/c.bin", ".hidden", "with space", "ümlaut", "a..b", "...", "a/..b"]
BAD = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../a",
    "a/../b",
    "a/..",
    "a//b",
    "a/",
    "./a",
    ".",
    "a/./b",
    "a\0b",
    "a\\..\\b",
    "..\\a",
]


@pytest.mark.parametrize("path", GOOD)
def test_a_path_that_stays_inside(path: str) -> None:
    assert inside(path) == path


@pytest.mark.parametrize("path", BAD)
def test_a_path_that_leaves_or_could_be_written_otherwise(path: str) -> None:
    with pytest.raises(ValueError, match="does not stay inside"):
        inside(path)
    with pytest.raises(ValidationError):
        FileEntry(path=path, size=1, blake3="0" * 64)


@pytest.mark.parametrize(
    ("size", "digest"), [(-1, "0" * 64), (1, "0" * 63), (1, "0" * 65), (1, "g" * 64), (1, "A" * 64), (1, "")]
)
def test_sizes_and_digests_are_checked(size: int, digest: str) -> None:
    with pytest.raises(ValidationError):
        FileEntry(path="a", size=size, blake3=digest)


def entry(path: str, size: int = 1, digit: str = "a") -> FileEntry:
    return FileEntry(path=path, size=size, blake3=digit * 64)


def test_the_fingerprint_is_of_the_contents_and_not_of_the_place_or_order() -> None:
    one = DatasetManifest(source="/here", files=(entry("a"), entry("b", 2, "b")))
    same = DatasetManifest(source="s3://there", files=(entry("b", 2, "b"), entry("a")))
    assert one.fingerprint == same.fingerprint == "b228a7aa41046c63d5d8d015450215a94ba261d82d89858089856f99fcba7018"
    assert one.bytes == 3


@pytest.mark.parametrize(
    "files",
    [
        (entry("a"),),
        (entry("a"), entry("c", 2, "b")),
        (entry("a"), entry("b", 3, "b")),
        (entry("a"), entry("b", 2, "c")),
        (),
    ],
)
def test_any_change_changes_the_fingerprint(files: tuple[FileEntry, ...]) -> None:
    one = DatasetManifest(source="/here", files=(entry("a"), entry("b", 2, "b")))
    assert DatasetManifest(source="/here", files=files).fingerprint != one.fingerprint
