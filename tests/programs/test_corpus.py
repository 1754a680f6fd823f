"""The corpus: the same for the same modules, whole or made again, and never in the place of something else."""

import pytest

from everstep.core.dataset import DatasetManifest
from everstep.programs import corpus
from everstep.store import digest


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """300 small modules, and what must be left out."""
    root = tmp_path_factory.mktemp("library")
    for number in range(300):
        (root / f"module{number}.py").write_text(f"NUMBER = {number}\n")
    for name in ("test/test_it.py", "site-packages/foreign.py", "config-3/x.py", "_sysconfigdata_here.py", "notes.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("FOREIGN = 1\n")
    return root


def test_it_is_the_library_s_own_source_and_some_of_it_is_held_out(library, tmp_path):
    corpus.write(str(tmp_path / "corpus"), library)
    train = (tmp_path / "corpus" / "train-000.bin").read_bytes()
    held = (tmp_path / "corpus" / "held-000.bin").read_bytes()
    assert b"FOREIGN" not in train + held
    texts = train.split(b"\0")[:-1], held.split(b"\0")[:-1]
    assert sorted(texts[0] + texts[1]) == sorted(f"NUMBER = {number}\n".encode() for number in range(300))
    assert 5 <= len(texts[1]) <= 30


def test_python_s_own_library_gives_a_few_megabytes_in_shards():
    from pathlib import Path
    from sysconfig import get_path

    shards = corpus.shards_of(Path(get_path("stdlib")))
    assert 4e6 < sum(map(len, shards.values())) < 20e6
    assert max(map(len, shards.values())) <= corpus.SHARD_BYTES
    assert len(shards) >= 5


def test_its_manifest_stands_beside_it_and_tells_its_files(library, tmp_path):
    made = corpus.write(str(tmp_path / "corpus"), library)
    told = DatasetManifest.parse((tmp_path / "corpus.manifest.json").read_bytes(), "", "")
    assert told == made
    for entry in told.files:
        assert digest.of_file(tmp_path / "corpus" / entry.path) == entry.blake3
    assert {entry.path for entry in told.files} == {path.name for path in (tmp_path / "corpus").iterdir()}


def test_what_stands_whole_is_left_as_it_is(library, tmp_path):
    made = corpus.write(str(tmp_path / "corpus"), library)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "new.py").write_text("of another Python")
    assert corpus.write(str(tmp_path / "corpus"), tmp_path / "other") == made


@pytest.mark.parametrize("harm", ["no manifest", "a shard is missing", "a short shard"])
def test_what_is_not_whole_is_made_again(library, tmp_path, harm):
    made = corpus.write(str(tmp_path / "corpus"), library)
    shard = tmp_path / "corpus" / "train-000.bin"
    if harm == "no manifest":
        (tmp_path / "corpus.manifest.json").unlink()
    elif harm == "a shard is missing":
        shard.unlink()
    else:
        shard.write_bytes(b"short")
    assert corpus.write(str(tmp_path / "corpus"), library) == made
    assert digest.of_file(shard) == next(entry.blake3 for entry in made.files if entry.path == shard.name)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_somebody_else_s_files_are_never_replaced(library, tmp_path):
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(ValueError, match=r"holds 'thesis.txt', which is no part of a corpus; choose another place"):
        corpus.write(str(tmp_path), library)
    assert (tmp_path / "thesis.txt").read_text() == "three years of work"


def test_the_command_says_what_stands_where(library, tmp_path, capsys):
    assert corpus.main([str(tmp_path / "corpus")]) == 0
    assert "MB of Python's standard library in" in capsys.readouterr().out
    assert corpus.main(["http://somewhere"]) == 2
    assert "give a directory or s3://bucket/prefix" in capsys.readouterr().err
    assert corpus.main([]) == 2


def test_it_goes_into_an_object_store_once(library, s3_server, monkeypatch):
    from everstep.core.place import S3Settings
    from everstep.store import s3

    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    bucket = s3_server.bucket()
    store = s3.open_store(bucket, s3.access(S3Settings()))
    store.put("mine/corpus/train-999.bin", b"of an older corpus")
    made = corpus.write(f"s3://{bucket}/mine/corpus", library)
    keys = {f"mine/corpus/{entry.path}" for entry in made.files}
    assert {one.key for one in store.list("")} == keys | {"mine/corpus.manifest.json"}
    assert corpus.write(f"s3://{bucket}/mine/corpus", library / "nowhere") == made
    store.put("mine/thesis.txt", b"three years of work")
    with pytest.raises(ValueError, match="which is no part of a corpus"):
        corpus.write(f"s3://{bucket}/mine", library)
    with pytest.raises(ValueError, match="names a whole bucket"):
        corpus.write(f"s3://{bucket}", library)
    store.close()
