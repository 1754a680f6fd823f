"""Which of the long tests `make test` runs: a seeded sample, another one for each commit, so that in a few of them all have run.

Long are all drills, and what is marked `sampled`: whole flows, and kills at each of many moments.

`EVERSTEP_ALL` runs all of them; `EVERSTEP_SAMPLE` names the seed of an earlier sample, which a run prints.
"""

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

SHARE = 0.25

HERE = Path(__file__).parent


def seed() -> str:
    """The commit; the same in every process of one test run."""
    if given := os.environ.get("EVERSTEP_SAMPLE"):
        return given
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return "0"  # no repository: an unpacked archive
    return done.stdout.strip()


def sample(names: Iterable[str], chosen_by: str, share: float = SHARE, folder: Callable[[str], str] = str) -> set[str]:
    """That share of the names, at least one of each group; `folder` gives the group of a name."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(folder(name), []).append(name)
    kept: set[str] = set()
    for group in groups.values():
        drawn = sorted(group, key=lambda name: hashlib.sha256(f"{chosen_by} {name}".encode()).digest())
        kept |= set(drawn[: max(1, round(share * len(drawn)))])
    return kept


def is_whole(environ: Mapping[str, str], arguments: Iterable[str]) -> bool:
    """Whether all of them run: they were asked for, or some tests were asked for by name."""
    return "EVERSTEP_ALL" in environ or any("::" in one or one.endswith(".py") or "drills" in one for one in arguments)
