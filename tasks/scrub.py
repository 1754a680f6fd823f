"""How Prefect treats a scrub. Nothing is tried again: what did not answer is looked at by the next one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.blocks.core import Block
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import PrefectException

from everstep.core import words
from everstep.core.scrub import ScrubJob
from everstep.host import scrubbing
from everstep.store.s3_access import Access
from tasks.places import TiersBlock, load, way_of

SHOWN = 200

begin = task(name="find-runs", cache_policy=NO_CACHE, persist_result=False)(scrubbing.begin)
scrub_run = task(name="scrub-run", cache_policy=NO_CACHE, persist_result=False)(scrubbing.scrub_run)
finish = task(name="finish-scrub", cache_policy=NO_CACHE)(scrubbing.finish)


@contextmanager
def reached(job: ScrubJob, storage: type[Block]) -> Iterator[tuple[ScrubJob, Access | None]]:
    """The scrub with the place of the block that it names, and the way to that block's object store."""
    if job.tiers is None:
        yield job, None
        return
    block: TiersBlock = load(storage, "tiers", job.tiers)  # type: ignore[assignment]
    where = job.where or str(Path(block.tiers().persistent).expanduser())
    yield job.model_copy(update={"where": where}), way_of(block, job.s3)


def end(scrubber: scrubbing.Scrubber, final: dict[str, Any]) -> dict[str, Any]:
    """Show the result as a table, and fail where something is left that no scrub can mend."""
    with suppress(httpx.HTTPError, PrefectException, OSError):  # the files in the run directories say the same
        create_table_artifact(_rows(final), key="scrub", description=_summary(final))
    scrubbing.refuse(scrubber)
    return final


def _rows(final: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was found, or one row that says that all was well."""
    names = ("job", "run", "checkpoint", "tier", "outcome", "file", "why", "repaired_from", "evidence")
    rows = [{name: line[name] for name in names} for line in final["found"][:SHOWN]]
    return rows or [dict.fromkeys(names, "") | {"outcome": f"{final['sound']} copies are sound"}]


def _summary(final: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{final[name]} {name}" for name in ("sound", "repaired", "rotten", "aside", "gone", "unknown"))
    read = f"{words.size(final['bytes']) or '0 B'} read in {words.duration(final['seconds'])}"
    return f"{words.count(final['runs'], 'run')}, {words.count(final['copies'], 'copy', 'copies')}: {counts}; {read}"
