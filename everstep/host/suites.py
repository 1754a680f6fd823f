"""What is expected of which table: the defaults, or the job's own suite. Great Expectations is imported late."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.core import columns, gate
from everstep.core.dataset import DatasetManifest
from everstep.core.gate import GateTask, Suite
from everstep.core.job import DataGate
from everstep.host import table
from everstep.host.table import Sample

OWN_SUITE = "or name a suite of your own in data.gate.suite"


@dataclass
class Subject:
    """A table and what is expected of it. `origins` has the file of each row, for the columns that name none."""

    about: str
    frame: Any
    expectations: list[Any]
    origins: Sequence[str] = ()


def defaults(task: GateTask) -> Iterator[Subject]:
    yield _manifest(task.manifest, task.gate)
    samples = [look(task, kind) for kind in gate.TABLES if _paths(task, kind)]
    for sample in samples:
        if sample.kind != "text":
            yield _files(sample)
    if task.gate.columns:
        yield from _declared(samples, task.gate.columns)


def _manifest(manifest: DatasetManifest, bounds: DataGate) -> Subject:
    import great_expectations.expectations as gxe
    import pandas as pd

    own = [entry for entry in manifest.files if not gate.is_marker(entry.path)]
    frame = pd.DataFrame([(one.path, one.size, one.blake3) for one in own], columns=list(gate.MANIFEST_COLUMNS))
    expected = [
        gxe.ExpectTableRowCountToBeBetween(
            min_value=bounds.min_files,
            max_value=bounds.max_files,
            meta=_says("give as many files as data.gate.min_files and max_files ask for, or change those"),
        ),
        gxe.ExpectColumnSumToBeBetween(
            column="size",
            min_value=bounds.min_bytes,
            max_value=bounds.max_bytes,
            meta=_says("bring the data to the size of data.gate.min_bytes and max_bytes, or change those"),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="size", min_value=1, meta=_says(f"fill or remove the empty file, {OWN_SUITE}")
        ),
    ]
    if not bounds.duplicates:
        says = _says("remove the copy, or set data.gate.duplicates: true")
        expected.append(gxe.ExpectColumnValuesToBeUnique(column="blake3", meta=says))
    return Subject(gate.MANIFEST, frame, expected, list(frame["path"]))


def _files(sample: Sample) -> Subject:
    """One row a file: whether it can be read, whether it has rows, and whether its columns are those of the others."""
    import great_expectations.expectations as gxe
    import pandas as pd

    typed = sample.kind != "csv"
    usual = columns.reference([one.schema for one in sample.opened if not one.trouble])
    rows = [
        (
            one.path,
            one.trouble or None,
            one.rows,
            "" if one.trouble else columns.difference(one.schema, usual, typed=typed),
        )
        for one in sample.opened
    ]
    frame = pd.DataFrame(rows, columns=["path", "trouble", "rows", "difference"])
    expected = [
        gxe.ExpectColumnValuesToBeNull(
            column="trouble", meta=_says(f"write the file again or remove it, {OWN_SUITE}", "a file that can be read")
        )
    ]
    if sample.kind in ("csv", "parquet"):
        expected += [
            gxe.ExpectColumnValuesToBeBetween(
                column="rows", min_value=1, meta=_says(f"fill or remove the file without rows, {OWN_SUITE}")
            ),
            gxe.ExpectColumnValuesToBeInSet(
                column="difference",
                value_set=[""],
                meta=_says(f"give all {sample.kind} files the same columns, {OWN_SUITE}", "none to the other files"),
            ),
        ]
    return Subject(f"{sample.kind} files", frame, expected, list(frame["path"]))


def _declared(samples: Sequence[Sample], wanted: Mapping[str, str]) -> Iterator[Subject]:
    """The columns and tensors that the job names: each is somewhere, and has its dtype wherever it is."""
    import great_expectations.expectations as gxe
    import pandas as pd

    opened = [(one, sample.kind != "csv") for sample in samples for one in sample.opened]
    there = sorted({name for one, _ in opened for name, _ in one.schema})
    says = _says("put it into the data, or correct data.gate.columns", "a column or tensor of the data")
    expected = gxe.ExpectColumnValuesToBeInSet(column="name", value_set=there, meta=says)
    yield Subject("columns that the job names", pd.DataFrame({"name": sorted(wanted)}), [expected])
    for name, dtype in wanted.items():
        rows = [
            (one.path, "" if columns.fits(dtype, found, typed=typed) else found)
            for one, typed in opened
            for column, found in one.schema
            if column == name
        ]
        if rows:
            says = _says(
                f"convert it to {gate.clip(dtype, 40)}, or correct data.gate.columns",
                f"{gate.clip(name, 60)!r} as {gate.clip(dtype, 40)}",
            )
            expected = gxe.ExpectColumnValuesToBeInSet(column="other dtype", value_set=[""], meta=says)
            frame = pd.DataFrame(rows, columns=["path", "other dtype"])
            yield Subject(f"dtype of {gate.clip(name, 60)!r}", frame, [expected], list(frame["path"]))


def _says(remedy: str, wanted: str | None = None) -> dict[str, str]:
    """What a finding says besides what the library tells of the expectation."""
    return {"remedy": remedy} | ({} if wanted is None else {"wanted": wanted})


# -- a suite of the job -----------------------------------------------------------------------------------------------


def own(task: GateTask, suite: Suite) -> list[Subject]:
    """The job's suite on the table that it is about; see `core.gate.Suite`. Raises ValueError if there is none."""
    where = f"the suite {task.gate.suite!r}"
    if suite.files and not any(fnmatch.fnmatchcase(entry.path, suite.files) for entry in task.manifest.files):
        raise ValueError(f"{where} is about files like {suite.files!r}, but no file of the data is named so.")
    kinds = [suite.on] if suite.on in gate.TABLES else [] if suite.on else list(gate.TABLES)
    samples = {kind: look(task, kind, suite.files) for kind in kinds if _paths(task, kind, suite.files)}
    try:
        about = suite.table({gate.MANIFEST: gate.MANIFEST_COLUMNS} | {k: list(s.frame) for k, s in samples.items()})
    except ValueError as error:
        raise ValueError(f"{where} {error}; correct one of them.") from None
    expected = [_expectation(one, where) for one in suite.expectations]
    if about == gate.MANIFEST:
        whole = _manifest(_only(task.manifest, suite.files), task.gate)
        return [Subject(about, whole.frame, expected, whole.origins)]
    sample = samples[about]
    unread = [one for one in sample.opened if one.trouble]
    if unread:
        first = unread[0]
        raise ValueError(f"{gate.clip(first.path)!r} {first.trouble}; write the file again or remove it.")
    return [Subject(f"{about} sample", sample.frame, expected, sample.origins)]


def _expectation(one: Mapping[str, Any], where: str) -> Any:
    """An expectation of the job's suite. The library's own reader of suites leaves out in silence what it cannot take."""
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    kwargs = one.get("kwargs") or {}
    try:
        return ExpectationConfiguration(type=one["type"], kwargs=kwargs, meta=one.get("meta")).to_domain_obj()
    except Exception as error:  # noqa: BLE001 - whatever the library raises of what it cannot take is the suite's fault
        raise ValueError(f"{where} cannot be evaluated: {one['type']}: {_library_words(error)}.") from None


def _only(manifest: DatasetManifest, files: str | None) -> DatasetManifest:
    kept = [entry for entry in manifest.files if files is None or fnmatch.fnmatchcase(entry.path, files)]
    return manifest.model_copy(update={"files": tuple(kept)})


def _library_words(error: Exception) -> str:
    text = gate.clip(str(error).replace("\n", " ")).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _paths(task: GateTask, kind: str, files: str | None = None) -> list[str]:
    return [
        entry.path for entry in _only(task.manifest, files).files if entry.size and table.kind_of(entry.path) == kind
    ]


def look(task: GateTask, kind: str, files: str | None = None) -> Sample:
    """The sample of one kind of the task's files."""
    return table.look(Path(task.data), _paths(task, kind, files), kind, task.gate.sample_rows)
