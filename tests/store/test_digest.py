import os

import pytest
from blake3 import blake3

from everstep.store import digest


@pytest.mark.parametrize("size", [0, 1, digest.CHUNK - 1, digest.CHUNK, 2 * digest.CHUNK + 3])
def test_a_file_has_the_digest_of_its_bytes_and_shows_them_once(tmp_path, size):
    data = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    seen = []
    assert digest.of_file(path, lambda chunk: seen.append(bytes(chunk)), cold=True) == blake3(data).hexdigest()
    assert b"".join(seen) == data
    assert digest.of_bytes(data) == blake3(data).hexdigest()


def test_a_copy_is_hashed_on_its_way_and_replaces_what_was_there(tmp_path):
    data = os.urandom(2 * digest.CHUNK + 5)
    (tmp_path / "from").write_bytes(data)
    (tmp_path / "to").write_bytes(b"x" * (len(data) + 7))
    moved = []
    assert digest.copy(tmp_path / "from", tmp_path / "to", moved.append) == (blake3(data).hexdigest(), len(data))
    assert (tmp_path / "to").read_bytes() == data
    assert moved == [digest.CHUNK, 2 * digest.CHUNK, len(data)]


def test_links_are_refused_unless_asked_for(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic"):
        digest.of_file(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic"):
        digest.copy(tmp_path / "link", tmp_path / "to", lambda done: None)
    with pytest.raises(OSError, match="symbolic"):
        digest.copy(tmp_path / "file", tmp_path / "link", lambda done: None)
    assert digest.copy(tmp_path / "link", tmp_path / "to", lambda done: None, follow=True)[1] == 3
