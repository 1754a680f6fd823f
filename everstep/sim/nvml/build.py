"""Compiles the stand-in library, once for each version of it, the header and the compiler."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from everstep.core.errors import EverstepError
from everstep.sim.nvml import layout

SONAME = "libnvidia-ml.so.1"
COMPILE_SECONDS = 120.0

_SOURCE = Path(__file__).with_name("nvml.c")
_FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Wno-deprecated-declarations", f"-Wl,-soname,{SONAME}")
_DECLARED = re.compile(
    r"^(?:DEPRECATED\([\d.]+\)\s+)?(?:nvmlReturn_t|const\s+DECLDIR\s+char\s*\*)\s*(?:DECLDIR\s+)?(nvml\w+)\s*\(",
    re.MULTILINE,
)
_DEFINED = re.compile(r"^(?:N|nvmlReturn_t|const char \*)\s*(nvml\w+)\s*\(|^(?:NUMBER|TEXT)\((nvml\w+)", re.MULTILINE)


class CannotBuild(EverstepError):
    """The compiler or the header is missing, or the compiler refused."""


@cache
def library() -> Path:
    """The compiled library, in a folder of its own that is fit for LD_LIBRARY_PATH.

    It is kept in `$XDG_CACHE_HOME/everstep` by a digest of all that it is made of. Raises `CannotBuild`, which says
    what to install.
    """
    compiler = _compiler()
    header = _header()
    made_of = [_SOURCE.read_bytes(), layout.header_text().encode(), header.read_bytes(), _version(compiler)]
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    folder = _cache() / f"nvml-{name}"
    if not (folder / SONAME).exists():
        _build(compiler, header, folder)
    return folder / SONAME


def why_not() -> str:
    """What keeps the library from being built here, as a sentence; empty where it can be built."""
    try:
        library()
    except CannotBuild as error:
        return str(error)
    return ""


def _build(compiler: str, header: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".nvml-") as at:
        work = Path(at)
        (work / "layout.h").write_text(layout.header_text())
        (work / "rest.c").write_text(_rest(header.read_text(), _SOURCE.read_text()))
        out = work / "made"
        out.mkdir()
        command = [compiler, *_FLAGS, f"-I{header.parent}", f"-I{work}", str(_SOURCE), str(work / "rest.c")]
        try:
            subprocess.run(
                [*command, "-o", str(out / SONAME), "-lpthread"],
                check=True,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
            )
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            raise CannotBuild(f"the stand-in for NVML does not compile with {compiler}: {said[:2000]}") from None
        try:
            out.rename(folder)
        except OSError:
            if not (folder / SONAME).exists():  # else another process was faster, with the same bytes
                raise


def _rest(header: str, source: str) -> str:
    """Every function that the header declares and the source lacks, as one that is not supported.

    Programs that bind all symbols at their start (nvidia-smi, nvitop) need every one of them.
    """
    ours = {one or other for one, other in _DEFINED.findall(source)}
    missing = sorted(set(_DECLARED.findall(header)) - ours)
    return "".join(f"int {name}(void) {{ return 3; }}\n" for name in missing)


def _compiler() -> str:
    wanted = os.environ.get("CC", "cc")
    found = shutil.which(wanted)
    if not found:
        raise CannotBuild(
            f"there is no C compiler ({wanted}), which the stand-in for NVML needs; make test-setup installs one"
        )
    return found


@cache
def _version(compiler: str) -> bytes:
    done = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=COMPILE_SECONDS)
    return done.stdout


def _header() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(Path(place).glob("*/include/nvml.h"), reverse=True):
            return found
    raise CannotBuild("nvml.h is missing; pip install nvidia-nvml-dev, or everstep[test], brings it")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everstep"
