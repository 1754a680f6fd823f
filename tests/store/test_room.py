"""Room on a tier: what is free for this user, and the words for what is missing."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from everstep.store import room


@pytest.fixture
def small(tmp_path):
    """A file system of 1 MB with 20 entries; skips where mounting is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs"]
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", *options, str(folder)], check=False, capture_output=True).returncode
    ):
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_what_is_free_is_told_also_of_a_folder_that_is_yet_to_be_made(small):
    assert room.free(small) == 2**20
    assert room.free(small / "job" / "run" / "checkpoints") == 2**20
    (small / "file").write_bytes(b"x" * 2**19)
    assert room.free(small) == 2**19


def test_a_full_disk_is_told_with_path_needed_and_available(small):
    """BC-025: the text of a failed save."""
    with pytest.raises(OSError) as caught:
        (small / "file").write_bytes(b"x" * 2**21)
    assert room.lacks(caught.value)
    said = room.explain(small, 2**21, caught.value)
    assert said == f"No space left on device: {small} has 0 bytes free, 2,097,152 are needed"


def test_a_file_system_without_entries_left_says_so(small):
    files = (small / str(number) for number in range(40))
    with pytest.raises(OSError) as caught:
        any(file.touch() for file in files)
    said = room.explain(small, 10, caught.value)
    assert "takes no more files (no inodes are free)" in said
    assert "1,048,576 bytes free, 10 are needed" in said


def test_a_quota_is_told_from_a_full_disk(tmp_path):
    error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert room.lacks(error)
    assert f"this user's quota on {tmp_path} is used up; {tmp_path} has " in room.explain(tmp_path, 10, error)


def test_other_failures_are_no_lack_of_room(tmp_path):
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    assert not room.lacks(error)
    assert room.explain(tmp_path, 10, error).startswith(f"Read-only file system: {tmp_path} has ")
    assert not room.lacks(ValueError())


def test_where_nothing_can_be_told_that_is_said(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    said = room.explain(blocked / "under", 10, OSError(errno.EIO, os.strerror(errno.EIO)))
    assert (
        said
        == f"{os.strerror(errno.EIO)}: {blocked / 'under'} needs 10 bytes; what is free there cannot be told (Not a directory)"
    )
    assert isinstance(room.free(Path("/")), int)
