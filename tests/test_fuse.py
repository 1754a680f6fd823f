"""The rig that stands for a network mount does what the drills believe of it."""

import errno
import os
import threading

import pytest
from rigs import fuse

from everstep.store import atomic, digest

pytestmark = pytest.mark.skipif(bool(fuse.why_not()), reason=fuse.why_not())


@pytest.fixture
def tier(tmp_path):
    with fuse.mount(tmp_path) as mounted:
        yield mounted


def test_it_is_a_folder_like_any_other(tier):
    (tier.path / "a").mkdir()
    data = os.urandom(3 << 20)
    atomic.write(tier.path / "a" / "file", data)
    assert (tier.source / "a" / "file").read_bytes() == data
    assert digest.of_file(tier.path / "a" / "file", cold=True) == digest.of_bytes(data)
    assert atomic.create(tier.path / "a" / "claim", b"1")
    assert not atomic.create(tier.path / "a" / "claim", b"2")
    assert sorted(one.name for one in (tier.path / "a").iterdir()) == ["claim", "file"]
    assert (tier.path / "a" / "file").stat().st_size == len(data)
    (tier.path / "a" / "file").replace(tier.path / "other")
    (tier.path / "a" / "claim").unlink()
    (tier.path / "a").rmdir()
    assert [one.name for one in tier.source.iterdir()] == ["other"]


def test_an_operation_fails_as_planned(tier):
    tier.plan(fuse.Fault(f"errno:{errno.ENOSPC}", "write", r"/b$", skip=1, times=2))
    atomic.write(tier.path / "b", b"unharmed: it is written under another name")
    (tier.path / "b").write_bytes(b"x")
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            (tier.path / "b").write_bytes(b"x")
    (tier.path / "b").write_bytes(b"x")
    assert tier.met() == 2


def test_an_operation_hangs_until_it_is_let_go(tier):
    tier.plan(fuse.Fault("hang", "fsync"))
    waiting = threading.Thread(target=atomic.write, args=(tier.path / "c", b"late"))
    waiting.start()
    tier.await_hanging()
    assert waiting.is_alive()
    assert not (tier.source / "c").exists()
    assert list(tier.path.iterdir()), "the others do not hang"
    tier.clear()
    waiting.join(20)
    assert (tier.path / "c").read_bytes() == b"late"
