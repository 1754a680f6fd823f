"""Job files: read one, and say in one sentence what is wrong with it before anything is started."""

import ast
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import yaml
from pydantic import ValidationError

from everstep.core import place
from everstep.core.job import TrainJob, explain
from everstep.host import gate


def read(path: Path) -> TrainJob:
    """The job in a YAML file, with its relative paths taken from the file's folder.

    Raises ValueError with one plain sentence for what a person wrote wrong.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such job file; give the path of a YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the job file cannot be read ({error}); give the path of a YAML file.") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise ValueError(
            f"{path}: the job file is not valid YAML{line}; compare it with the README's example."
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: the job file holds no fields; compare it with the README's example.")
    try:
        return TrainJob.model_validate(content).resolve(path.resolve().parent)
    except ValidationError as error:
        raise ValueError(explain(error, str(path))) from None


def check(job: TrainJob, search_path: Path) -> None:
    """Refuse what can be seen without running anything: a missing program, callable or data folder."""
    check_program(job.program, search_path)
    gate.read_suite(job.data.gate)
    if job.health.policy:
        from everstep.host import health_policy  # few jobs name one, and a wrong job is answered at once

        health_policy.load_policy(Path(job.health.policy))
    if place.is_object(job.data.source):
        return
    source = Path(job.data.source)
    if not source.exists():
        raise ValueError(f"data.source: {str(source)!r} does not exist; give the folder with the data set.")
    if not source.is_dir():
        raise ValueError(f"data.source: {str(source)!r} is not a folder; give the folder with the data set.")
    if not any(source.iterdir()):
        raise ValueError(f"data.source: {str(source)!r} is empty; put the data set there, or name another folder.")


def check_program(program: str, search_path: Path) -> None:
    """Find the program's file and callable without importing them. `search_path` is the folder of the user's modules."""
    module, _, attribute = program.rpartition(":")
    file = program_file(program, search_path)
    if file is None:
        raise ValueError(f"program: {module!r} is not a module that can be found from {search_path}; check the name.")
    if not file.is_file():
        raise ValueError(f"program: {str(file)!r} does not exist; give module:build or path/to/file.py:build.")
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        raise ValueError(
            f"program: {file}, line {error.lineno}: {error.msg}; the program is not valid Python."
        ) from None
    names = _top_level_names(tree)
    if attribute not in names and "*" not in names and "__getattr__" not in names:
        raise ValueError(
            f"program: {file.name} has no {attribute!r} at top level; write def {attribute}(config, data)."
        )


def program_file(program: str, search_path: Path) -> Path | None:
    """The file that holds a program, found without importing it; None if there is no such module."""
    file = program.rpartition(":")[0]
    return Path(file) if file.endswith(".py") else _module_file(file, search_path)


def _module_file(module: str, search_path: Path) -> Path | None:
    """The file of a module, found one package at a time, so that no package is imported for it."""
    places: list[str] | None = [str(search_path), *sys.path]
    parts = module.split(".")
    for depth, part in enumerate(parts, start=1):
        spec = PathFinder.find_spec(part, places)
        if spec is None and depth == 1:  # editable installs are found by finders of their own
            spec = find_spec(part)
        if spec is None:
            return None
        if depth == len(parts):
            return Path(spec.origin) if spec.origin else None
        if spec.submodule_search_locations is None:
            return None
        places = list(spec.submodule_search_locations)
    return None


def _top_level_names(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top level, also inside if and try."""
    names: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                waiting += getattr(node, field, [])
            waiting += [inner for handler in getattr(node, "handlers", []) for inner in handler.body]
    return names


def main(arguments: list[str]) -> int:
    """`python -m everstep.host.jobs job.yaml` prints the job as JSON with absolute paths, as a deployment takes it."""
    try:
        job = read(Path(arguments[0] if arguments else ""))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(job.model_dump_json(exclude_defaults=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
