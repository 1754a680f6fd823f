"""Staging onto a file system that fills up in the middle: one plain sentence, nothing half done, and then it goes on."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from everstep.core.errors import StoreUnavailable
from everstep.core.place import S3Settings
from everstep.host import fetching
from everstep.host.staging import stage
from everstep.store import s3_access

SIZE = 3_000_000
FILES = {f"part-{number}.bin": SIZE for number in range(4)} | {f"small/{number}.txt": 100 for number in range(40)}


def contents() -> dict[str, bytes]:
    generator = np.random.Generator(np.random.PCG64(5))
    return {name: generator.bytes(size) for name, size in FILES.items()}


@pytest.fixture(params=["folder", "s3"])
def source(request, tmp_path):
    """The data set in a folder, or in a bucket: what `stage` is given, its files, and the way to it."""
    data = contents()
    if request.param == "folder":
        for name, body in data.items():
            (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / name).write_bytes(body)
        return tmp_path / "data", data, None
    server = request.getfixturevalue("s3_server")
    bucket = server.bucket()
    server.put(bucket, {f"set/{name}": body for name, body in data.items()})
    return f"s3://{bucket}/set", data, s3_access.access(S3Settings(), env=server.env(), keys=keys_of(server))


def keys_of(server):
    from pydantic import SecretStr

    return s3_access.Keys(server.access_key, SecretStr(server.secret_key))


def fill(folder: Path) -> Path:
    """Take all the room that is left."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            continue
    return ballast


def ready(local: Path) -> list[Path]:
    """What stands under the name of a data set."""
    return [path for path in (local / "datasets").glob("[!.]*") if path.name != "index"]


def check(staged, data) -> None:
    found = {str(path.relative_to(staged.data)): path.read_bytes() for path in staged.data.rglob("*") if path.is_file()}
    assert found == data


def test_a_disk_that_fills_up_in_the_middle(mount, source, tmp_path, monkeypatch):
    where, data, access = source
    local = tmp_path / "nvme"
    mount(local, "-t", "tmpfs", "-o", "size=24m", "tmpfs")
    filled: list[Path] = []

    def others_write(done: int, total: int) -> None:
        if 0 < done < total and not filled:
            filled.append(fill(local))

    if access is not None:  # the first large file arrives at once, then one piece of a file for each look
        monkeypatch.setattr(fetching, "workers", lambda: 1)
        monkeypatch.setattr(fetching, "LOOK_SECONDS", 0.001)

    with pytest.raises(StoreUnavailable) as refused:
        stage(where, local, progress=others_write, access=access)
    assert str(refused.value) == (
        f"tiers.local: no space is left in {local} for the data; free some or choose another place."
    )
    assert filled
    assert not ready(local)
    for path in local.rglob("*.bin"):  # a file under its own name is whole
        assert path.read_bytes() == data[path.name]

    with pytest.raises(StoreUnavailable, match=r"^tiers\.local: ") as again:  # as long as it is full, it says so
        stage(where, local, access=access)
    assert "\n" not in str(again.value)
    assert not ready(local)

    filled[0].unlink()
    staged = stage(where, local, access=access)
    check(staged, data)
    assert len(ready(local)) == 1
    assert not list(local.rglob("*.part"))


def test_a_disk_that_has_no_room_for_so_many_files(mount, source, tmp_path):
    """Free bytes were there, and no more names to give."""
    where, data, access = source
    local = tmp_path / "nvme"
    mount(local, "-t", "tmpfs", "-o", "size=64m,nr_inodes=30", "tmpfs")
    with pytest.raises(StoreUnavailable, match=r"^tiers\.local: no space is left in "):
        stage(where, local, access=access)
    assert not ready(local)
    mount(local, "-o", "remount,nr_inodes=1000")
    check(stage(where, local, access=access), data)


def test_too_little_room_is_seen_before_the_first_byte(mount, source, tmp_path):
    where, _, access = source
    local = tmp_path / "nvme"
    mount(local, "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    with pytest.raises(StoreUnavailable, match=r"^tiers\.local: ") as refused:
        stage(where, local, access=access)
    assert "free" in str(refused.value)
    held = sum(path.stat().st_size for path in local.rglob("*") if path.is_file())
    assert held < 100_000, "nothing was fetched"
    assert os.statvfs(local).f_bavail > 0
