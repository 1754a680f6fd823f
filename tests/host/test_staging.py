import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from everstep.core.errors import StoreUnavailable
from everstep.host import staging

OLD = time.time() - 3600

CODE = """
import sys
from pathlib import Path
from everstep.host import staging
found = staging.stage(Path(sys.argv[1]), Path(sys.argv[2]))
print(found.fetched, found.bytes)
"""


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "sub" / "deep").mkdir(parents=True)
    for name, text in {"b.txt": "bbb", "a.txt": "aaaa", "sub/deep/c.bin": "c" * 5000, "sub/empty": ""}.items():
        (folder / name).write_text(text)
        os.utime(folder / name, (OLD, OLD))
    return folder


@pytest.fixture
def local(tmp_path):
    return tmp_path / "nvme"


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(source, local, plan_file=None, plan=()):
    environment = dict(os.environ)
    if plan_file:
        plan_file.write_text(json.dumps(list(plan)))
        environment["EVERSTEP_FAULTS"] = str(plan_file)
    command = [sys.executable, "-c", CODE, str(source), str(local)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_data_set_is_brought_once(source, local):
    told = []
    first = staging.stage(source, local, progress=lambda done, total: told.append((done, total)))
    assert [entry.path for entry in first.manifest.files] == ["a.txt", "b.txt", "sub/deep/c.bin", "sub/empty"]
    assert (first.fetched, first.bytes) == (4, 5007)
    assert content(first.data) == content(source)
    assert told[-1] == (5007, 5007)
    second = staging.stage(source, local)
    assert (second.fetched, second.bytes, second.data) == (0, 0, first.data)
    assert second.manifest == first.manifest
    assert first.data.parent.name == first.manifest.fingerprint[:16]


def test_the_place_of_the_source_does_not_count(source, local, tmp_path):
    first = staging.stage(source, local)
    shutil.copytree(source, tmp_path / "again")
    assert staging.stage(tmp_path / "again", local).fetched == 0
    assert staging.stage(tmp_path / "again", local).manifest.fingerprint == first.manifest.fingerprint


def test_any_change_makes_another_data_set_and_the_two_never_mix(source, local):
    first = staging.stage(source, local)
    (source / "b.txt").write_text("bbB")
    (source / "a.txt").unlink()
    second = staging.stage(source, local)
    assert second.data != first.data
    assert content(second.data) == content(source)
    assert set(content(first.data)) == {"a.txt", "b.txt", "sub/deep/c.bin", "sub/empty"}


def test_an_edit_with_the_old_time_and_size_is_noticed(source, local):
    first = staging.stage(source, local)
    (source / "b.txt").write_text("xyz")
    os.utime(source / "b.txt", (OLD, OLD))
    second = staging.stage(source, local)
    assert (second.data / "b.txt").read_text() == "xyz"
    assert (first.data / "b.txt").read_text() == "bbb"


def test_damage_of_the_local_copy_is_mended(source, local):
    first = staging.stage(source, local)
    (first.data / "a.txt").write_text("AAAA")
    (first.data / "b.txt").unlink()
    second = staging.stage(source, local)
    assert (second.fetched, second.bytes) == (2, 7)
    assert content(second.data) == content(source)
    os.utime(first.data / "a.txt", (OLD, OLD))
    assert staging.stage(source, local).fetched == 0


def test_a_folder_without_its_manifest_is_staged_again(source, local):
    first = staging.stage(source, local)
    (first.data.parent / "manifest.json").unlink()
    (first.data / "stray").write_text("left by somebody")
    second = staging.stage(source, local)
    assert (second.fetched, content(second.data)) == (4, content(source))


@pytest.mark.parametrize("hit", [1, 2, 3])
def test_a_stager_killed_in_the_middle_is_taken_up(source, local, tmp_path, hit):
    assert run(source, local, tmp_path / "plan.json", [{"point": "stage.mid_file", "hit": hit}]).returncode == -9
    assert not list((local / "datasets").glob("[0-9a-f]*/manifest.json"))
    done = run(source, local)
    assert done.stdout.split()[0] == str(4 - (hit - 1))
    (folder,) = (local / "datasets").glob("[0-9a-f]*")
    assert content(folder / "data") == content(source)
    assert not list((local / "datasets").glob(".partial-*"))


def test_leftovers_in_a_partial_folder_do_not_come_along(source, local):
    found = staging.stage(source, local)
    partial = found.data.parent.with_name(f".partial-{found.data.parent.name}")
    found.data.parent.rename(partial)
    (partial / "manifest.json").unlink()
    (partial / "data" / "old.txt").write_text("another set's")
    (partial / "data" / "a.txt").write_text("torn")
    again = staging.stage(source, local)
    assert (again.fetched, content(again.data)) == (1, content(source))


def test_two_stagers_at_once_fetch_once(source, local):
    found = []
    threads = [threading.Thread(target=lambda: found.append(staging.stage(source, local))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.fetched for one in found) == [0, 0, 0, 4]


def test_links_within_the_data_are_their_files(source, local):
    (source / "again").symlink_to("a.txt")
    (source / "dir").symlink_to("sub")
    found = staging.stage(source, local)
    assert (found.data / "again").read_text() == "aaaa"
    assert (found.data / "dir" / "deep" / "c.bin").stat().st_size == 5000
    assert not (found.data / "again").is_symlink()


def _empty(source):
    shutil.rmtree(source)
    (source / "sub").mkdir(parents=True)


def _file(source):
    shutil.rmtree(source)
    source.write_text("x")


BAD = {
    "missing": (shutil.rmtree, "is not a directory; name the folder"),
    "a file": (_file, "is not a directory; name the folder"),
    "empty": (_empty, "holds no files; put the data there"),
    "link that leaves": (lambda s: (s / "out").symlink_to("/etc/passwd"), "'out' is a link that leaves the folder"),
    "link to a folder outside": (lambda s: (s / "out").symlink_to("/etc"), "'out' is a link that leaves the folder"),
    "link to a sibling": (lambda s: (s / "sub/out").symlink_to("../../nvme"), "'sub/out' is a link that leaves"),
    "link to nothing": (lambda s: (s / "sub/l").symlink_to("nothing"), "'sub/l' is a link to nothing"),
    "loop": (lambda s: (s / "sub/l").symlink_to("../sub"), "'sub/l' is a link to a folder around it"),
    "link to itself": (lambda s: (s / "l").symlink_to("l"), "'l' is a link"),
    "fifo": (lambda s: os.mkfifo(s / "pipe"), "'pipe' is neither a file nor a folder"),
    "backslash": (lambda s: (s / "a\\b").write_text("x"), "rename the file"),
    "not utf-8": (lambda s: Path(os.fsdecode(os.fsencode(s) + b"/\xff")).write_text("x"), "rename the file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_source_that_the_user_must_mend_is_refused_in_a_sentence(source, local, kind):
    change, words = BAD[kind]
    change(source)
    with pytest.raises(ValueError, match=r"data\.source: ") as error:
        staging.stage(source, local)
    assert words in str(error.value)


def test_a_local_tier_inside_the_data_is_refused(source):
    with pytest.raises(ValueError, match="lies inside the data"):
        staging.stage(source, source / ".everstep")


def test_a_file_that_keeps_changing_is_refused_by_name(source, local):
    big = source / "sub" / "growing"
    big.write_bytes(b"x" * 100)

    def grow(done, total):
        with big.open("ab") as file:
            file.write(b"y")

    with pytest.raises(ValueError, match=r"'sub/growing' .* changed while it was being copied"):
        staging.stage(source, local, progress=grow)
    assert not list((local / "datasets").glob("[0-9a-f]*/manifest.json"))
    assert content(staging.stage(source, local).data) == content(source)


def test_a_file_that_vanishes_is_refused_by_name(source, local):
    with pytest.raises(ValueError, match=r"'b\.txt' .* changed while"):
        staging.stage(source, local, progress=lambda done, total: (source / "b.txt").unlink(missing_ok=True))


def test_a_remembered_digest_that_lies_heals_at_the_next_start(source, local, monkeypatch):
    monkeypatch.setattr(staging, "SETTLED_SECONDS", -1.0)
    staging.stage(source, local)
    shutil.rmtree(next((local / "datasets").glob("[0-9a-f]*")))
    (index,) = (local / "datasets" / "index").iterdir()
    value = json.loads(index.read_text())
    value["files"]["a.txt"]["blake3"] = "0" * 64
    index.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"'a\.txt' .* changed while"):
        staging.stage(source, local)
    assert staging.stage(source, local).fetched == 4


def test_digests_are_remembered_for_settled_files_only(source, local, monkeypatch):
    staging.stage(source, local)
    assert list((local / "datasets" / "index").iterdir()) == []
    monkeypatch.setattr(staging, "SETTLED_SECONDS", -1.0)
    staging.stage(source, local)
    (index,) = (local / "datasets" / "index").iterdir()
    assert len(json.loads(index.read_text())["files"]) == 4
    index.write_text("{")
    assert staging.stage(source, local).fetched == 0


def test_too_little_space_is_said_before_anything_is_copied(source, local, monkeypatch):
    full = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(StoreUnavailable, match=r"has 1\.\d kB free and the data needs [45]\.\d kB; free some space"):
        staging.stage(source, local)
    assert not [path for path in (local / "datasets").rglob("*") if path.is_file() and path.name == "a.txt"]


def test_a_disk_that_fills_meanwhile_is_a_sentence(source, local, tmp_path):
    done = run(source, local, tmp_path / "plan.json", [{"point": "stage.mid_file", "hit": 2, "do": "errno:28"}])
    assert "StoreUnavailable: tiers.local: no space is left" in done.stderr
    assert run(source, local).stdout.split()[0] == "3"
