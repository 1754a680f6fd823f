"""The gate on real files of every format, hostile ones among them, judged by the real library."""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from everstep.core.dataset import DatasetManifest, FileEntry
from everstep.core.errors import TrainingFailed
from everstep.core.gate import GateResult, GateTask
from everstep.core.job import DataGate, TrainJob
from everstep.host import expectations, gate, staging, table
from everstep.host.gate import Gatekeeper
from everstep.store import digest
from everstep.store.layout import RunPlaces

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Great Expectations imports sre_constants
]


def manifest(data: Path) -> DatasetManifest:
    paths = sorted(path for path in data.rglob("*") if path.is_file())
    files = [
        FileEntry(path=str(path.relative_to(data)), size=path.stat().st_size, blake3=digest.of_file(path))
        for path in paths
    ]
    return DatasetManifest(source=str(data), files=tuple(files))


def judge(data: Path, suite: dict | None = None, docs: Path | None = None, **bounds) -> GateResult:
    text = None if suite is None else json.dumps(suite)
    task = GateTask(
        key="key",
        manifest=manifest(data),
        data=str(data),
        gate=DataGate(suite="suite.json" if suite else None, **bounds),
        suite=text,
        docs=str(data.parent / "docs"),
        seconds=60,
    )
    result, build = expectations.judge(task)
    if docs:
        build(docs)
    return result


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def frame(rows: int = 4) -> pd.DataFrame:
    return pd.DataFrame(
        {"id": range(rows), "price": [0.5 * row for row in range(rows)], "word": [f"w{row}" for row in range(rows)]}
    )


def write_all_formats(data: Path) -> None:
    frame().to_csv(data / "a.csv", index=False)
    frame(9).to_csv(data / "b.csv", index=False)
    frame().to_parquet(data / "a.parquet")
    frame(7).to_parquet(data / "b.parquet")
    np.save(data / "images.npy", np.zeros((5, 2), np.float32))
    np.savez(data / "more.npz", labels=np.arange(5), mask=np.ones((5, 1), bool))
    (data / "words.txt").write_text("one\ntwo\n")
    (data / "unknown.bin").write_bytes(b"\0\1")
    write_safetensors(data / "w.safetensors", {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))


def write_safetensors(path: Path, header: dict, body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


# -- the defaults -----------------------------------------------------------------------------------------------------


def test_sound_files_of_every_format_pass(data):
    write_all_formats(data)
    (data / "_SUCCESS").touch()
    declared = {"id": "int64", "price": "float64", "labels": "int64", "images": "float32", "x": "float", "mask": "bool"}
    result = judge(data, columns=declared)
    assert result.ok, result.reason
    assert result.dataset == manifest(data).fingerprint, "the verdict says what it looked at"
    assert result.great_expectations.startswith("1.")
    assert {one.about for one in result.validations} >= {"manifest", "csv files", "parquet files", "tensors files"}


def empty(data):
    (data / "hollow.bin").touch()


def copies(data):
    shutil.copy(data / "words.txt", data / "again.txt")


def other_columns(data):
    (data / "c.csv").write_text("id,cost,word\n1,2,x\n")


def other_dtype(data):
    frame().astype({"id": "int32"}).to_parquet(data / "c.parquet")


def words_for_numbers(data):
    (data / "c.csv").write_text("id,price,word\n1,cheap,x\n")


def no_rows(data):
    frame(0).to_parquet(data / "c.parquet")


def header_only(data):
    (data / "c.csv").write_text("id,price,word\n")


def ragged(data):
    (data / "c.csv").write_text("id,price,word\n1,2,x\n1,2\n3,4,y\n")


def torn_parquet(data):
    whole = (data / "a.parquet").read_bytes()
    (data / "c.parquet").write_bytes(whole[: len(whole) - 9])


def torn_header(data):
    whole = (data / "w.safetensors").read_bytes()
    (data / "v.safetensors").write_bytes(whole[:20])


def giant_header(data):
    (data / "v.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def torn_npz(data):
    whole = (data / "more.npz").read_bytes()
    (data / "c.npz").write_bytes(whole[: len(whole) // 2])


def torn_npy(data):
    whole = (data / "images.npy").read_bytes()
    (data / "c.npy").write_bytes(whole[:-1])


def pickled(data):
    np.savez(data / "c.npz", safe=np.ones(2), danger=np.array([Trap()], dtype=object))


def lying_shape(data):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**15,)})
    (data / "c.npy").write_bytes(header.getvalue() + bytes(64))


def foreign_member(data):
    with zipfile.ZipFile(data / "c.npz", "w") as archive:
        archive.writestr("run.py", "raise SystemExit")


def endless_line(data):
    (data / "c.csv").write_bytes(b"x" * (table.PIECE + 10))


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


FAULTS = {
    empty: ["'hollow.bin'", "'size'", ": 0;", "fill or remove"],
    copies: ["'again.txt' and 1 more", "'blake3'", "data.gate.duplicates"],
    other_columns: ["'c.csv'", "the column 'price' is missing", "same columns"],
    other_dtype: ["'c.parquet'", "the column 'id' is int32, not int64"],
    words_for_numbers: ["'c.csv'", "the column 'price' is string, not float64"],
    no_rows: ["'c.parquet'", "'rows'", ": 0", "without rows"],
    header_only: ["'c.csv'", "'rows'", "without rows"],
    ragged: ["'c.csv'", "has a record of 2 cells where the first has 3", "write the file again"],
    torn_parquet: ["'c.parquet'", "is not readable as Parquet"],
    torn_header: ["'v.safetensors'", "header"],
    giant_header: ["'v.safetensors'", "header"],
    torn_npz: ["'c.npz'", "not a readable .npz"],
    torn_npy: ["'c.npy'", "'c' has", "bytes where its header says"],
    pickled: ["'c.npz'", "'danger' holds pickled Python objects"],
    lying_shape: ["'c.npy'", "has 192 bytes where its header says 8,000,000"],
    foreign_member: ["'c.npz'", "'run.py', which is no array"],
    endless_line: ["'c.csv'", "its first line is longer than 4 MiB"],
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_named_with_file_value_and_remedy(data, spoil, monkeypatch):
    monkeypatch.chdir(data.parent)
    write_all_formats(data)
    spoil(data)
    result = judge(data)
    assert not result.ok
    assert all(word in result.reason for word in FAULTS[spoil]), result.reason
    assert len(result.reason) < 600
    assert not Path("unpickled").exists()


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"min_files": 10}, ["expect_table_row_count_to_be_between", "min_value=10", "data.gate.min_files"]),
        ({"max_files": 3}, ["max_value=3", ": 9;"]),
        ({"min_bytes": 10**9}, ["'size'", "data.gate.min_bytes"]),
        ({"max_bytes": 100}, ["'size'", "max_value=100", "max_bytes"]),
        (
            {"columns": {"nothing": "int64"}},
            ["'name' (a column or tensor of the data)", ": nothing;", "data.gate.columns"],
        ),
        ({"columns": {"id": "float32"}}, ["'a.parquet'", "('id' as float32)", ": int64", "convert it"]),
        ({"columns": {"x": "int"}}, ["'w.safetensors'", "('x' as int)", "float32"]),
    ],
)
def test_the_bounds_of_a_job(data, bounds, words):
    write_all_formats(data)
    result = judge(data, **bounds)
    assert all(word in result.reason for word in words), result.reason


def test_no_file_is_no_pass(data):
    """BC-129: staging yields zero files."""
    assert "expect_table_row_count_to_be_between" in judge(data).reason
    (data / "_SUCCESS").touch()
    assert not judge(data).ok


def test_copies_are_allowed_where_the_job_says_so(data):
    write_all_formats(data)
    copies(data)
    assert judge(data, duplicates=True).ok


def test_hostile_files_that_are_none_of_the_gates_business(data):
    (data / "long.csv").write_text("a,b\n1," + "x" * 1_000_000 + "\n2,y\n")
    (data / "latin.txt").write_bytes("Grüße\n".encode("latin-1") * 3)
    (data / "names 'with' <b>odd signs ü;&.txt").write_text("fine\n")
    with zipfile.ZipFile(data / "swollen.npz", "w", zipfile.ZIP_DEFLATED) as archive:  # 1 GB of zeros in 1 MB
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**9,)})
        with archive.open("zeros.npy", "w", force_zip64=True) as member:
            member.write(header.getvalue())
            for _ in range(1000):
                member.write(bytes(10**6))
    began = time.monotonic()
    result = judge(data)
    assert result.ok, result.reason
    assert time.monotonic() - began < 20


def test_a_csv_without_a_header_and_one_with_a_torn_end(data):
    rows = "".join(f"{row},{row / 2}\n" for row in range(300_000))
    (data / "a.csv").write_text(rows)
    (data / "b.csv").write_text("5,7.5\n")
    assert (data / "a.csv").stat().st_size > table.PIECE
    sample = table.look(data, ["a.csv", "b.csv"], "csv", 10_000)
    assert [one.schema for one in sample.opened] == [(("0", "int64"), ("1", "float64"))] * 2
    assert [one.rows for one in sample.opened] == [5_000, 1]
    assert judge(data).ok


def test_only_a_part_of_many_files_is_read(data):
    for index in range(30):
        (data / f"{index:02d}.csv").write_text("a\n" + "1\n" * 50)
    sample = table.look(data, [f"{index:02d}.csv" for index in range(30)], "csv", 10)
    assert [one.path for one in sample.opened][:: len(sample.opened) - 1] == ["00.csv", "29.csv"]
    assert (len(sample.opened), len(sample.frame), sample.total) == (10, 10, 30)


def test_large_values_do_not_pile_up(data, monkeypatch):
    monkeypatch.setattr(table, "SAMPLE", 2_000_000)
    big = pd.DataFrame({"image": [os.urandom(500_000) for _ in range(6)]})
    for index in range(6):
        big.to_parquet(data / f"{index}.parquet")
    sample = table.look(data, [f"{index}.parquet" for index in range(6)], "parquet", 600)
    assert sample.frame.memory_usage(deep=True).sum() < 8_000_000
    assert [one.rows for one in sample.opened] == [6] * 6, "what the format tells of itself is read of all"


# -- a suite of the job -----------------------------------------------------------------------------------------------


def suite(*expected, **meta) -> dict:
    told = [{"type": kind, "kwargs": kwargs} for kind, kwargs in expected]
    return {"name": "mine", "expectations": told, "meta": {"everstep": meta}}


BETWEEN = "expect_column_values_to_be_between"


def test_a_suite_takes_the_place_of_the_defaults(data):
    write_all_formats(data)
    empty(data)
    result = judge(data, suite((BETWEEN, {"column": "price", "min_value": 0, "max_value": 9}), on="csv"))
    assert result.ok, result.reason
    assert (result.suite, result.validations[0].about, result.validations[0].rows) == ("mine", "csv sample", 13)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (suite((BETWEEN, {"column": "price", "max_value": 2}), on="csv"), ["'b.csv'", "2.5, 3.0, 3.5 (4 of 13 values)", "suite.json"]),
        (suite((BETWEEN, {"column": "size", "min_value": 100})), ["'a.csv' and", "'size'", "min_value=100"]),
        (suite((BETWEEN, {"column": "cost"} )), ["names the column 'cost', which no file"]),
        (suite((BETWEEN, {"column": "cost", "min_value": 1}), on="csv"), ["could not be evaluated", "cost"]),
        (suite((BETWEEN, {"column": "price", "min_value": "x"}), on="csv"), ["suite"]),
        (suite(("expect_the_moon", {})), ["cannot be evaluated", "moon"]),
        (suite((BETWEEN, {"colum": "price"})), ["cannot be evaluated"]),
        (suite((BETWEEN, {"column": "price", "min_value": 0}), files="train/*.csv"), ["files like 'train/*.csv'"]),
        (suite(("expect_column_to_exist", {"column": "x"}), on="parquet", files="*.csv"), ["has no such files"]),
        (suite(("unexpected_rows_expectation", {"unexpected_rows_query": "SELECT * FROM {batch}"})), ["suite"]),
    ],
)  # fmt: skip
def test_a_suite_that_is_not_met_or_cannot_be_evaluated_is_no_pass(data, mine, words):
    """BC-129: no file matches, the column is not there, the expectation raises."""
    write_all_formats(data)
    result = judge(data, mine)
    assert not result.ok
    assert all(word in result.reason for word in words), result.reason
    assert len(result.reason) < 600


def test_a_suite_that_sees_no_value_is_no_pass(data):
    (data / "a.csv").write_text("x,y\n1,\n2,\n")
    assert "every value is missing" in judge(data, suite((BETWEEN, {"column": "y", "min_value": 0}))).reason
    none = {"column": "x", "min_value": 0, "row_condition": "x > 100", "condition_parser": "pandas"}
    assert "could not be evaluated: no row was looked at" in judge(data, suite((BETWEEN, none))).reason


def test_a_suite_may_be_about_tensors_text_and_chosen_files(data):
    write_all_formats(data)
    assert judge(
        data,
        suite(
            ("expect_column_values_to_be_in_set", {"column": "name", "value_set": ["x", "labels", "mask", "images"]})
        ),
    ).ok
    assert judge(data, suite(("expect_column_values_to_be_in_set", {"column": "utf8", "value_set": [True]}))).ok
    one = judge(data, suite((BETWEEN, {"column": "price", "max_value": 2}), on="csv", files="a.*"))
    assert one.ok, one.reason
    assert one.validations[0].rows == 4


@pytest.mark.sampled
def test_two_validations_at_once_never_see_each_others_data(tmp_path):
    """BC-132."""
    folders = {"nulls": tmp_path / "nulls", "clean": tmp_path / "clean"}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "a.csv").write_text("x,y\n1,2\n" + (",5\n" if name == "nulls" else "3,4\n"))
    mine = suite(("expect_column_values_to_not_be_null", {"column": "x"}))
    found: dict[str, list[GateResult]] = {name: [] for name in folders}

    def work(name: str) -> None:
        for round_ in range(50):
            time.sleep(0.001 * (round_ % 3))
            found[name].append(judge(folders[name], mine))

    threads = [threading.Thread(target=work, args=(name,)) for name in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: {one.ok for one in results} for name, results in found.items()} == {"nulls": {False}, "clean": {True}}
    for name, results in found.items():
        assert {one.dataset for one in results} == {manifest(folders[name]).fingerprint}
        assert len(results) == 50


def test_many_expectations_that_fail_on_most_rows_cost_little(data):
    """BC-136: 13,000 rows, 25 expectations, three of which fail nearly everywhere: seconds, and a small result."""
    rows = pd.DataFrame({f"c{index}": np.arange(13_000) + index for index in range(5)})
    rows.to_parquet(data / "a.parquet")
    held = [(BETWEEN, {"column": f"c{index % 5}", "min_value": 0, "max_value": 10**6 + index}) for index in range(22)]
    broken = [(BETWEEN, {"column": f"c{index}", "min_value": 12_900 + index}) for index in range(3)]
    began = time.monotonic()
    result = judge(data, suite(*held, *broken), sample_rows=13_000)
    assert time.monotonic() - began < 30
    assert (result.validations[0].expectations, result.validations[0].passed) == (25, 22)
    assert len(result.to_json()) < 20_000


def test_data_docs_are_small_and_hostile_names_do_nothing_in_them(data, tmp_path):
    name = "<script>alert(1)</script>.csv"
    (data / name.replace("/", "")).write_text("<img src=x onerror=alert(2)>,b\n<script>alert(3)</script>,1\n")
    (data / "b.csv").write_text("a\n1\n")
    result = judge(data, docs=tmp_path / "docs")
    assert not result.ok
    pages = list((tmp_path / "docs").rglob("*.html"))
    assert tmp_path / "docs" / "index.html" in pages
    text = "".join(page.read_text() for page in pages)
    assert "<script>alert" not in text
    assert "&lt;img src=x" in text
    assert "<img src=x" not in text
    assert sum(path.stat().st_size for path in (tmp_path / "docs").rglob("*")) < 1_500_000


# -- the keeper -------------------------------------------------------------------------------------------------------


class Run:
    """A run whose data is to be judged; `events` are what its journal heard."""

    def __init__(self, folder: Path, data: Path, name: str = "r001", seconds: float = 120, **bounds) -> None:
        self.events: list[tuple[str, dict]] = []
        self.job = TrainJob(
            name="gated",
            program="mine.py:build",
            data={"source": str(data), "gate": bounds},
            steps=1,
            tiers={"local": str(folder / "nvme"), "persistent": str(folder / "persistent")},
            limits={"gate": seconds},
        )
        self.places = RunPlaces.of(str(folder / "nvme"), str(folder / "persistent"), None, "gated", name)
        (self.places.persistent / "logs").mkdir(parents=True, exist_ok=True)
        self.staged = staging.stage(data, folder / "nvme")

    def keeper(self, **changes) -> Gatekeeper:
        return Gatekeeper(
            self.job,
            self.places,
            self.staged,
            f"gate-{os.getpid()}/test",
            lambda kind, **d: self.events.append((kind, d)),
            **changes,
        )

    def ask(self, **changes) -> GateResult:
        keeper = self.keeper(**changes)
        try:
            keeper.ask()
            result = keeper.answer()
            keeper.settle()
        finally:
            keeper.close()
        return result


@pytest.mark.sampled
def test_a_verdict_is_paid_for_once(tmp_path, data):
    """A restart asks nobody, and neither does another run on the same data; other data or bounds are judged anew."""
    write_all_formats(data)
    first = Run(tmp_path, data)
    result = first.ask()
    assert result.ok
    assert GateResult.parse(gate.verdict(first.places).read_bytes(), "", "") == result
    assert (gate.docs(first.places) / "index.html").is_file()
    assert [kind for kind, _ in first.events] == ["gate.waiting", "gate.data"]
    assert first.events[1][1]["ok"]
    assert [path.name for path in (tmp_path / "nvme" / "gates").iterdir()] == [result.key], "no scratch is left"

    nobody = {"command": ("false",)}
    again = Run(tmp_path, data)
    assert again.ask(**nobody) == result
    assert again.events == []
    other = Run(tmp_path, data, "r002")
    assert other.ask(**nobody) == result
    assert [(kind, told["kept"]) for kind, told in other.events] == [("gate.data", True)]
    assert (gate.docs(other.places) / "index.html").is_file()
    with pytest.raises(TrainingFailed, match="its process ended with status 1"):
        Run(tmp_path, data, "r003", max_files=50).ask(**nobody)
    shutil.rmtree(tmp_path / "nvme")
    assert Run(tmp_path, data).ask(**nobody) == result, "on another machine the run itself knows"


def test_a_verdict_depends_on_data_bounds_and_suite():
    """BC-171: data that changed, or is asked for something else, is judged again."""
    keys = [
        gate.key("data", DataGate(), None),
        gate.key("other data", DataGate(), None),
        gate.key("data", DataGate(max_files=3), None),
        gate.key("data", DataGate(suite="a.json"), "{}"),
        gate.key("data", DataGate(suite="a.json"), "[]"),
    ]
    assert len(set(keys)) == len(keys)
    assert gate.key("data", DataGate(suite="elsewhere/a.json"), "{}") == keys[3], "where a suite lies does not count"


@pytest.mark.sampled
def test_a_closed_gate_says_so_and_is_not_remembered_as_open(tmp_path, data):
    frame().to_csv(data / "a.csv", index=False)
    empty(data)
    run = Run(tmp_path, data)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^data\.gate: 'hollow\.bin': .*: 0; fill or remove") as refused:
            run.ask()
    (_, told) = run.events[1]
    assert (told["ok"], told["text"], told["severity"].value) == (False, str(refused.value), "high")
    assert told["findings"][0]["files"] == ["hollow.bin"]
    assert (gate.docs(run.places) / "index.html").is_file(), "who must mend it can look"
    assert list((tmp_path / "nvme" / "gates").iterdir()) == []


def test_a_gate_that_takes_too_long_stays_closed(tmp_path, data):
    """BC-136: the verdict is 'timed out', and the helper is gone."""
    frame().to_csv(data / "a.csv", index=False)
    run = Run(tmp_path, data, seconds=1)
    keeper = run.keeper(command=(sys.executable, "-c", "import time; time.sleep(60)"))
    keeper.ask()
    began = time.monotonic()
    with pytest.raises(TrainingFailed, match=r"timed out after 1 s; raise limits\.gate"):
        keeper.answer()
    assert time.monotonic() - began < 10
    assert not run.events[1][1]["ok"]
    assert not GateResult.parse(gate.verdict(run.places).read_bytes(), "", "").ok


def test_a_helper_that_dies_once_is_started_again(tmp_path, data):
    frame().to_csv(data / "a.csv", index=False)
    once = tmp_path / "once"
    script = (
        f"import sys, pathlib; from everstep.host import expectations\n"
        f"once = pathlib.Path({str(once)!r})\n"
        "if not once.exists(): once.touch(); raise SystemExit(9)\n"
        "expectations.main(pathlib.Path(sys.argv[1]))"
    )
    assert Run(tmp_path, data).ask(command=(sys.executable, "-c", script)).ok


@pytest.mark.parametrize(
    ("text", "why"), [(None, "cannot be read"), ("{", "is not JSON"), ('{"expectations": []}', "has no expectations")]
)
def test_an_unreadable_suite_is_refused_before_anything_is_started(tmp_path, data, text, why):
    (data / "a.txt").write_text("x\n")
    if text is not None:
        (tmp_path / "suite.json").write_text(text)
    run = Run(tmp_path, data, suite=str(tmp_path / "suite.json"))
    with pytest.raises(ValueError, match=rf"data\.gate\.suite: '.*suite\.json' {why}"):
        run.ask(command=("false",))


@pytest.mark.sampled
def test_gates_at_once_from_many_processes_share_nothing_writable(tmp_path, data):
    """BC-133: eight gates at once, in one project folder; all finish, and nothing is written there."""
    write_all_formats(data)
    project = tmp_path / "project"
    project.mkdir()
    runs = [Run(tmp_path / f"machine-{index}", data) for index in range(8)]
    keepers = [run.keeper() for run in runs]
    before = Path.cwd()
    os.chdir(project)
    try:
        for keeper in keepers:
            keeper.ask()
        assert all(keeper.answer().ok for keeper in keepers)
        for keeper in keepers:
            keeper.settle()
    finally:
        os.chdir(before)
        for keeper in keepers:
            keeper.close()
    assert list(project.iterdir()) == []


def test_the_flow_never_imports_what_is_slow():
    code = "import sys, everstep.host.life, everstep.host.gate; print(*{'great_expectations', 'pandas', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


LOOK = """
import resource, sys
from pathlib import Path
from everstep.host import table
import pandas, pyarrow.parquet
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
limit = used + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
found = table.look(Path(sys.argv[1]), ["bomb.parquet"], "parquet", 10_000)
print(len(found.frame), found.opened[0].rows, found.opened[0].trouble)
"""


def looked_at(data: Path, megabytes: int) -> list[str]:
    """Rows of the sample, rows of the file, and its trouble, as a process with so much memory more sees it."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(data), str(megabytes << 20)], capture_output=True, text=True, check=False, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split(" ", 2)


def test_a_tiny_file_that_swells_is_looked_at_in_bounded_memory(tmp_path):
    """validation-cost: 64 GB of text behind a file of some kB, of which one row is enough to see."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * (32 << 20)]))
    file = tmp_path / "bomb.parquet"
    table_ = pa.table({"text": text, "id": list(range(2000))})
    parquet.write_table(table_, file, compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert file.stat().st_size < 100_000
    assert looked_at(tmp_path, 600) == ["1", "2000"]


def test_a_page_that_does_not_fit_into_memory_is_named(tmp_path):
    """240 MB of numbers in one page of some kB: no verdict is worth the machine's memory."""
    file, rows = tmp_path / "bomb.parquet", 30_000_000
    pages = {"data_page_size": 1 << 30, "row_group_size": rows, "write_batch_size": rows, "max_rows_per_page": rows}
    zeros = pa.table({"x": np.zeros(rows)})
    parquet.write_table(zeros, file, compression="zstd", use_dictionary=False, **pages)
    assert file.stat().st_size < 100_000
    rows_seen, _, trouble = looked_at(tmp_path, 150)
    assert rows_seen == "0"
    assert "is not readable as Parquet" in trouble or "too much memory" in trouble


def test_texts_that_rows_share_are_sampled_as_they_are(tmp_path):
    rows = pd.DataFrame(
        {"kind": ["a", None, "b" * 20_000, "a"], "n": [1.0, 2.0, None, 4.0], "raw": [b"x", b"y", b"x", None]}
    )
    rows["sort"] = pd.Categorical(["one", "two", "one", None])
    rows.to_parquet(tmp_path / "a.parquet")
    found = table.look(tmp_path, ["a.parquet"], "parquet", 100)
    assert found.opened[0].schema == (("kind", "string"), ("n", "float64"), ("raw", "binary"), ("sort", "string"))
    seen = {name: [None if pd.isna(one) else one for one in found.frame[name]] for name in found.frame}
    assert seen["kind"] == ["a", None, "b" * 20_000, "a"]
    assert seen["sort"] == ["one", "two", "one", None]
    assert seen["raw"] == [b"x", b"y", b"x", None]
    assert seen["n"] == [1.0, 2.0, None, 4.0]
