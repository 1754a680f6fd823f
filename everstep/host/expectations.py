"""Great Expectations at work, in a process of its own: `python -m everstep.host.expectations <folder>`.

Reads `task.json` in the folder, writes `result.json` as soon as there is a verdict, then builds the Data Docs. The
library takes seconds to import, keeps settings for the whole process, and tells its makers of its use unless it is
told not to before it is imported: so it never enters the flow's process.
"""

import html
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from everstep.core import gate
from everstep.core.gate import Finding, GateResult, GateTask, Suite, Validation
from everstep.host import suites
from everstep.host.gate import DOCS, RESULT, TASK, publish
from everstep.host.suites import Subject
from everstep.store import atomic, faults

MEMORY = 4 << 30
"""Memory that the process may take: a file made to swell ends in a sentence, not in a machine without memory."""
ADDRESSES = 8 << 30

Docs = Callable[[Path], None]
"""Builds the Data Docs into a folder."""

_PICTURES = ("glossary_scroller.gif", "validation_failed_unexpected_values.gif", "iterative-dev-loop.png")


def main(folder: Path) -> None:
    """Judge the task in a folder; see the module."""
    began = time.time()
    task = GateTask.parse((folder / TASK).read_bytes(), str(folder), TASK)
    signal.alarm(int(task.seconds) + 30)  # whoever waits for us has given up by then
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    faults.point("gate.judge")
    result, docs = judge(task)
    result = result.model_copy(update={"time": began, "seconds": round(time.time() - began, 3)})
    text = result.to_json().encode()
    atomic.write(folder / RESULT, text)
    docs(folder / DOCS)
    publish(folder / DOCS, Path(task.docs))
    if result.ok and task.keep:
        _keep(folder, text, Path(task.keep))


def judge(task: GateTask) -> tuple[GateResult, Docs]:
    """The verdict, and a function that builds the Data Docs of it into a folder. Great Expectations is imported here."""
    os.environ["GX_ANALYTICS_ENABLED"] = "False"
    import great_expectations as gx

    suite = Suite.read(task.suite, task.gate.suite or "") if task.suite is not None else None
    blank = GateResult(
        key=task.key,
        dataset=task.manifest.fingerprint,
        suite=suite.name if suite else "defaults",
        great_expectations=str(gx.__version__),
    )
    try:
        subjects = suites.own(task, suite) if suite else list(suites.defaults(task))
    except ValueError as error:
        return blank.model_copy(update={"trouble": str(error)}), _no_docs
    return validate(blank, subjects, task.gate.suite if suite else None)


def validate(blank: GateResult, subjects: Sequence[Subject], suite: str | None) -> tuple[GateResult, Docs]:
    """Hold each subject against its expectations, in a context that nobody else sees and that leaves no file.

    `suite` is the place of the job's own suite, for the remedy.
    """
    context = _context()
    validations, findings = [], []
    for number, one in enumerate(subjects):
        answers = _answers(context, f"{number + 1:02d}-{_slug(one.about)}", one)
        found = list(_findings(one, answers, suite))
        unseen = sum(not finding.evaluated for finding in found)
        evaluated = len(answers) - unseen
        passed = evaluated - (len(found) - unseen)
        rows = len(one.frame)
        validations.append(
            Validation(
                about=one.about, rows=rows, expectations=len(one.expectations), evaluated=evaluated, passed=passed
            )
        )
        findings += found
    result = blank.model_copy(update={"validations": tuple(validations), "findings": tuple(findings[:100])})
    return result, lambda site: _build_docs(context, site)


def _context() -> Any:
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    for site in list(context.variables.data_docs_sites or {}):
        context.delete_data_docs_site(site)
    return context


def _answers(context: Any, name: str, subject: Subject) -> list[dict[str, Any]]:
    """What the library says of each expectation, as JSON. Nothing is asked of a table without rows."""
    import great_expectations as gx

    if not len(subject.frame) and subject.about != gate.MANIFEST:
        return []
    asset = context.data_sources.add_pandas(name).add_dataframe_asset("data")
    batch = asset.add_batch_definition_whole_dataframe("all")
    suite = context.suites.add(gx.ExpectationSuite(name=name, expectations=subject.expectations))
    definition = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=batch, suite=suite))
    checkpoint = context.checkpoints.add(
        gx.Checkpoint(
            name=name,
            validation_definitions=[definition],
            result_format={"result_format": "BASIC", "partial_unexpected_count": 20},
        )
    )
    outcome = checkpoint.run(batch_parameters={"dataframe": subject.frame})
    (validated,) = outcome.run_results.values()
    return [answer.to_json_dict() for answer in validated.results]


def _findings(subject: Subject, answers: Sequence[Mapping[str, Any]], suite: str | None) -> Iterator[Finding]:
    if len(answers) != len(subject.expectations):
        skipped = len(subject.expectations) - len(answers)
        yield Finding(
            about=subject.about,
            expectation="the suite",
            value="there is no row to look at" if not answers else f"{skipped} of its expectations were skipped",
            remedy=f"mend the data or the suite {suite!r}" if suite else "mend the data",
            evaluated=False,
        )
    for answer in answers:
        unseen = gate.unevaluated(answer)
        if answer.get("success") is not True or unseen:
            yield _finding(subject, answer, unseen, suite)


def _finding(subject: Subject, answer: Mapping[str, Any], unseen: str, suite: str | None) -> Finding:
    config = answer["expectation_config"]
    kwargs = {name: value for name, value in config["kwargs"].items() if name != "batch_id" and value is not None}
    column = str(kwargs.pop("column", ""))
    says = (config.get("meta") or {}) if suite is None else {}
    wanted = ", ".join(f"{name}={_plain(value)}" for name, value in kwargs.items() if not isinstance(value, dict))
    return Finding(
        about=subject.about,
        expectation=str(config["type"]),
        column=column,
        files=tuple(_to_blame(subject, column, answer))[:20],
        value=unseen or _seen(answer),
        wanted=str(says.get("wanted", gate.clip(wanted))),
        remedy=str(says.get("remedy") or f"mend the data, or the suite {suite!r}"),
        evaluated=not unseen,
    )


def _plain(value: Any) -> str:
    """The library makes a float of every bound."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)


def _seen(answer: Mapping[str, Any]) -> str:
    missing = ((answer.get("result") or {}).get("details") or {}).get("missing_values")
    return gate.observed(answer) if not missing else f"there is no {', '.join(map(str, missing[:3]))}"


def _to_blame(subject: Subject, column: str, answer: Mapping[str, Any]) -> list[str]:
    """The files of the rows whose values were not expected, in order."""
    values = (answer.get("result") or {}).get("partial_unexpected_list")
    if not values or column not in subject.frame or len(subject.origins) != len(subject.frame):
        return []
    texts = {str(value) for value in values}
    rows = (str(value) in texts for value in subject.frame[column])
    return [str(path) for path in gate.distinct(o for o, bad in zip(subject.origins, rows, strict=True) if bad)]


def _slug(about: str) -> str:
    """The library makes file names and addresses of it."""
    return re.sub(r"[^a-z0-9]+", "-", about.lower()).strip("-")[:40]


def _build_docs(context: Any, site: Path) -> None:
    """Data Docs in a folder. Moving pictures that no page shows are left out: they are five sixths of it."""
    for store in (context.validation_results_store, context.expectations_store):
        held = store.store_backend._store  # noqa: SLF001 - its pages take what they are given for markup
        held.update({name: _harmless(text) for name, text in held.items() if text.startswith("{")})
    backend = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(site)}
    index = {"class_name": "DefaultSiteIndexBuilder"}
    config = {"class_name": "SiteBuilder", "show_how_to_buttons": False, "site_index_builder": index}
    context.add_data_docs_site("run", config | {"store_backend": backend})
    context.build_data_docs(site_names=["run"])
    for name in _PICTURES:
        (site / "static" / "images" / name).unlink(missing_ok=True)


def _harmless(text: str) -> str:
    """The JSON with every text in it escaped for HTML: names and values of the data are nobody's markup."""

    def escaped(value: Any) -> Any:
        if isinstance(value, str):
            return html.escape(value)
        if isinstance(value, dict):
            return {name: escaped(inner) for name, inner in value.items()}
        return [escaped(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(escaped(json.loads(text)))


def _no_docs(site: Path) -> None:
    """Nothing was validated: there is nothing to show."""


def _keep(folder: Path, text: bytes, place: Path) -> None:
    """Keep verdict and docs for other runs on the same data; whoever was faster has kept the same."""
    entry = folder / "entry"
    entry.mkdir(mode=0o700)
    atomic.write(entry / RESULT, text)
    (folder / DOCS).rename(entry / DOCS)
    with suppress(OSError):
        entry.rename(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
