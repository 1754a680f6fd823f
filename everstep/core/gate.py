"""The data gate: what a data set must be, what was found, and what is said of it.

Great Expectations evaluates (`host.expectations`); what its answers mean is judged here. Closed unless shown open: a
suite without expectations, one that could not be evaluated, and one that had nothing to look at are no pass.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from everstep.core.dataset import DatasetManifest
from everstep.core.job import DataGate
from everstep.core.record import Record, Versioned

CLIP = 160
"""Characters of a value that are repeated: a sentence stays one."""

MANIFEST = "manifest"
MANIFEST_COLUMNS = ("path", "size", "blake3")
TABLES = ("parquet", "csv", "tensors", "text")
"""What a suite may be about besides the manifest; the first one that has the columns it names is taken."""


class Finding(Record):
    """An expectation that the data did not meet. `files` are those that are to blame, as far as that is known."""

    about: str
    expectation: str
    column: str = ""
    files: tuple[str, ...] = ()
    value: str = ""
    wanted: str = ""
    remedy: str = ""
    evaluated: bool = True

    @property
    def sentence(self) -> str:
        """File, expectation, value and remedy."""
        name = self.expectation + (f" of {clip(self.column, 60)!r}" if self.column else "")
        wanted = f" ({self.wanted})" if self.wanted else ""
        if not self.evaluated:
            return f"{self._where}: {name}{wanted} could not be evaluated: {self.value}; {self.remedy}"
        return f"{self._where}: {name}{wanted} does not hold: {self.value}; {self.remedy}"

    @property
    def _where(self) -> str:
        if not self.files:
            return f"the {self.about}"
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{clip(self.files[0])!r}{more}"


class Validation(Record):
    """A suite that was held against a table of `rows` rows: how many expectations it has, were evaluated, and hold."""

    about: str
    rows: int
    expectations: int
    evaluated: int
    passed: int

    @property
    def ok(self) -> bool:
        return self.passed == self.evaluated == self.expectations > 0 and self.rows > 0


class GateResult(Versioned):
    """The verdict on a data set. `key` names all that it depends on, `dataset` is the fingerprint of what was looked at.

    `trouble` says why there is no verdict of the expectations (timed out, ended); it keeps the gate closed.
    """

    key: str
    dataset: str
    suite: str
    great_expectations: str = ""
    time: float = 0.0
    seconds: float = Field(0.0, ge=0)
    validations: tuple[Validation, ...] = ()
    findings: tuple[Finding, ...] = ()
    trouble: str = ""

    @property
    def ok(self) -> bool:
        """Whether training may begin."""
        return not self.trouble and not self.findings and bool(self.validations) and all(v.ok for v in self.validations)

    @property
    def checked(self) -> int:
        """Expectations that were evaluated."""
        return sum(one.evaluated for one in self.validations)

    @property
    def reason(self) -> str:
        """One plain sentence that says why the gate is closed; empty if it is open."""
        if self.ok:
            return ""
        if self.trouble:
            return f"data.gate: {self.trouble}"
        if not self.findings:
            idle = next((one.about for one in self.validations if not one.ok), "data")
            return f"data.gate: nothing was validated on the {idle}, which is no pass; give a suite with expectations."
        more = len(self.findings) - 1
        rest = f" ({more} more in gate.json of the run)" if more else ""
        return f"data.gate: {self.findings[0].sentence}{rest}."


class GateTask(Versioned):
    """What is to be judged. `suite` is the text of the job's own suite, None for the defaults.

    `docs` is where the Data Docs go, `keep` where a verdict that opens the gate is kept for other runs on this machine.
    """

    key: str
    manifest: DatasetManifest
    data: str
    gate: DataGate
    suite: str | None = None
    docs: str
    keep: str | None = None
    seconds: float = Field(gt=0)


class Suite(Record):
    """A Great Expectations suite as a job names it.

    `on` is the table it is about: `manifest`, `parquet`, `csv`, `tensors` or `text`; None if its columns decide.
    `files` is a pattern of the files that it is about. Both stand in the suite's own `meta`, under `everstep`.
    """

    name: str
    expectations: tuple[dict[str, JsonValue], ...]
    on: str | None = None
    files: str | None = None

    @property
    def columns(self) -> set[str]:
        """The columns that it names."""
        found: set[str] = set()
        for one in self.expectations:
            kwargs = one.get("kwargs")
            for key, value in kwargs.items() if isinstance(kwargs, dict) else ():
                if key.startswith("column") and isinstance(value, str):
                    found.add(value)
                elif key == "column_list" and isinstance(value, list):
                    found |= {name for name in value if isinstance(name, str)}
        return found

    @classmethod
    def read(cls, text: str | bytes, where: str) -> "Suite":
        """A suite from its JSON. Raises ValueError with one plain sentence for what is none."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _no_suite(where, f"is not JSON ({clip(str(error), 80)})") from None
        if not isinstance(content, dict) or not isinstance(content.get("expectations"), list):
            raise _no_suite(where, "has no list of expectations")
        if not content["expectations"]:
            raise _no_suite(where, "has no expectations, and what is not checked does not pass")
        meta = content.get("meta")
        ours = meta.get("everstep", {}) if isinstance(meta, dict) else {}
        if not isinstance(ours, dict) or set(ours) - {"on", "files"}:
            raise _no_suite(where, "has something else than `on` and `files` under meta.everstep")
        if ours.get("on") not in (None, MANIFEST, *TABLES):
            raise _no_suite(where, f"is about {clip(str(ours['on']), 40)!r}, not {', '.join((MANIFEST, *TABLES))}")
        for one in content["expectations"]:
            if not isinstance(one, dict) or not isinstance(one.get("type"), str):
                raise _no_suite(where, "has an expectation without a type")
        try:
            return cls(name=str(content.get("name") or "suite"), expectations=tuple(content["expectations"]), **ours)
        except ValidationError as error:
            raise _no_suite(where, error.errors(include_url=False)[0]["msg"]) from None

    def table(self, columns: Mapping[str, Collection[str]]) -> str:
        """Which of the tables it is about; `columns` has those that there are, with their columns.

        The one that it names; else the manifest if it names columns of the manifest only; else the first sample that
        has all columns that it names. Raises ValueError if there is none.
        """
        there = [name for name in TABLES if name in columns]
        if self.on:
            if self.on not in columns:
                raise ValueError(f"is about {self.on}, but the data has no such files ({', '.join(there) or 'none'})")
            return self.on
        named = self.columns
        if named and named <= set(MANIFEST_COLUMNS):
            return MANIFEST
        fitting = next((name for name in there if named <= set(columns[name])), None)
        if fitting or not there:
            return fitting or MANIFEST
        missing = min((sorted(named - set(columns[name])) for name in there), key=len)
        raise ValueError(f"names the column {clip(missing[0], 60)!r}, which no file that was read has")


def clip(text: str, most: int = CLIP) -> str:
    """The text on one line and not longer than `most` characters."""
    line = " ".join(text.split()) if len(text) <= 4 * most else " ".join(text[: 4 * most].split()) + " "
    return line if len(line) <= most else line[: most - 3] + "..."


def is_marker(path: str) -> bool:
    """Whether a file is none of the data's own: Hadoop, Spark and Unix hide what begins with an underscore or a dot."""
    return any(part.startswith((".", "_")) for part in path.split("/"))


def unevaluated(answer: Mapping[str, Any]) -> str:
    """Why an answer of Great Expectations says nothing; empty if it does.

    `answer` is an expectation's validation result as JSON. An expectation that raised, that lacks its column, or that
    saw no value succeeds or fails for reasons that are not in the data.
    """
    trouble = _raised(answer.get("exception_info"))
    if trouble:
        return trouble
    if not isinstance(answer.get("success"), bool):
        return "it was skipped"
    config = answer.get("expectation_config")
    kind = str(config.get("type", "")) if isinstance(config, Mapping) else ""
    result = answer.get("result")
    result = result if isinstance(result, Mapping) else {}
    seen, missing = result.get("element_count"), result.get("missing_count", 0)
    if seen == 0:
        return "no row was looked at"
    if seen is not None and seen == missing and answer["success"] and not kind.endswith("_null"):
        return "every value is missing"
    return ""


def _raised(info: Any) -> str:
    """The message of what was raised. One record for the expectation, or one for each of its metrics."""
    if not isinstance(info, Mapping):
        return ""
    for one in [info] if "raised_exception" in info else info.values():
        if isinstance(one, Mapping) and one.get("raised_exception"):
            return clip(str(one.get("exception_message") or "it raised an exception"))
    return ""


def observed(answer: Mapping[str, Any]) -> str:
    """What was seen, from a validation result: the unexpected values, else the observed one."""
    result = answer.get("result")
    if not isinstance(result, Mapping):
        return "nothing was seen"
    values = result.get("partial_unexpected_list")
    if values:
        shown = ", ".join(clip(str(value), 60) for value in distinct(values)[:3])
        count = int(result.get("unexpected_count") or len(values))
        return shown if count == 1 else f"{shown} ({count:,} of {int(result.get('element_count') or count):,} values)"
    seen = result.get("observed_value")
    return clip(str(seen)) if seen is not None else "it was not met"


def distinct(values: Iterable[Any]) -> list[Any]:
    """The values in order, each once by its text."""
    return list({str(value): value for value in values}.values())


def _no_suite(where: str, why: str) -> ValueError:
    return ValueError(f"data.gate.suite: {where!r} {why}; give a Great Expectations suite as JSON.")
