"""Find the user's `build` and call it. What the user can mend comes out as a ProgramError of one sentence."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from everstep.trainer import failure
from everstep.trainer.program import Program, ProgramError, as_program

USER_ERRORS = (
    ImportError,
    SyntaxError,
    NameError,
    TypeError,
    AttributeError,
    LookupError,
    ValueError,
    AssertionError,
    NotImplementedError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    SystemExit,
)
"""What code raises that is wrong, or finds its input wrong: no restart mends it. Others (no memory, no device) may pass."""


def build(reference: str, search_path: str, config: Mapping[str, Any], data: Path) -> Program:
    """The program that `reference` (`package.module:build` or `/path/to/file.py:build`) makes of `config` and `data`."""
    make = find(reference, search_path)
    with _users_fault(f"program {reference!r}: build()"):
        found = make(dict(config), data)
    try:
        return as_program(found)
    except ProgramError as error:
        raise ProgramError(f"program {reference!r}: {error}") from error


def find(reference: str, search_path: str) -> Callable[[dict[str, Any], Path], Any]:
    """The callable, with `search_path` (and a file's own folder) first on `sys.path`."""
    place, _, attribute = reference.rpartition(":")
    _search(search_path)
    module = _from_file(reference, Path(place)) if place.endswith(".py") else _from_package(reference, place)
    make = getattr(module, attribute, None)
    if make is None:
        names = ", ".join(name for name, value in vars(module).items() if callable(value) and name[0] != "_")
        raise ProgramError(f"program {reference!r}: {place} has no {attribute}; it has {names or 'no callables'}.")
    if not callable(make):
        raise ProgramError(f"program {reference!r}: {attribute} in {place} cannot be called.")
    return make  # type: ignore[no-any-return]


def _from_package(reference: str, name: str) -> ModuleType:
    with _users_fault(f"program {reference!r}: importing it"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            why = f"there is no module {error.name} in {sys.path[0]} or among the installed packages"
            raise ProgramError(f"program {reference!r}: {why}.") from error


def _from_file(reference: str, path: Path) -> ModuleType:
    """A private module name: the file may be called like anything, also like one of our own packages."""
    if not path.is_file():
        raise ProgramError(f"program {reference!r}: there is no file {path}.")
    _search(str(path.parent))
    name = f"_everstep_program_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ProgramError(f"program {reference!r}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _users_fault(f"program {reference!r}: importing it"):
        spec.loader.exec_module(module)
    return module


def _search(folder: str) -> None:
    if folder:
        sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
        importlib.invalidate_caches()


@contextmanager
def _users_fault(what: str) -> Iterator[None]:
    try:
        yield
    except ProgramError:
        raise
    except USER_ERRORS as error:
        raise ProgramError(f"{what} raised {failure.describe(error)}.") from error
