"""The blocks that a job names, resolved before anything else. Secrets stay in this process: no parameter, no log."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from prefect.blocks.core import Block
from prefect.settings import get_current_settings
from pydantic import ValidationError

from everstep.core import job as jobs
from everstep.core import place
from everstep.core.job import TrainJob
from everstep.core.place import S3Settings
from everstep.store import s3_access
from everstep.store.s3_access import Access, Keys

B = TypeVar("B", bound=Block)
CREDENTIALS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


class TiersBlock(Protocol):
    """What is asked of `blocks.tiers.StorageTiers`."""

    def tiers(self) -> jobs.Tiers: ...

    def s3(self, job: S3Settings) -> S3Settings: ...

    def keys(self) -> Keys | None: ...

    def hosts(self) -> tuple[str, ...]: ...


class TrackingBlock(Protocol):
    """What is asked of `blocks.tracking.Tracking`."""

    def tracking(self) -> jobs.Tracking: ...

    def environment(self) -> Mapping[str, str]: ...


@contextmanager
def placed(job: TrainJob, storage: type[Block], tracking: type[Block]) -> Iterator[tuple[TrainJob, Access | None]]:
    """The job with the places of the blocks that it names, and the way to its object store if a block has one.

    MLflow's credentials are in the environment of this process for the length of the block. Raises ValueError with one
    plain sentence for a block that is not there or not right.
    """
    access = None
    if job.tiers.block:
        job, access = _with_tiers(job, load(storage, "tiers", job.tiers.block))  # type: ignore[arg-type]
    if not job.tracking.block:
        yield job, access
        return
    block: TrackingBlock = load(tracking, "tracking", job.tracking.block)  # type: ignore[assignment]
    with _environment(block.environment()):
        yield job.model_copy(update={"tracking": block.tracking()}), access


def _with_tiers(job: TrainJob, block: TiersBlock) -> tuple[TrainJob, Access | None]:
    job = job.model_copy(update={"tiers": block.tiers(), "s3": block.s3(job.s3)})
    if not any(place.is_object(one) for one in (job.data.source, job.tiers.object or "")):
        return job, None
    return job, s3_access.access(job.s3, keys=block.keys(), allowed_hosts=block.hosts())


def way_of(block: TiersBlock, settings: S3Settings) -> Access | None:
    """The way to a block's object store; None where its object tier is a folder, or it has none."""
    if not place.is_object(block.tiers().object or ""):
        return None
    return s3_access.access(block.s3(settings), keys=block.keys(), allowed_hosts=block.hosts())


def load(kind: type[B], field: str, name: str) -> B:
    """A block that a job names. Raises ValueError with one plain sentence."""
    found = find(kind, field, name)
    if found is None:
        raise ValueError(
            f"{field}: Prefect at {get_current_settings().api.url} has no {kind.get_block_type_slug()} block named "
            f"{name!r}; make it there under Blocks, or set PREFECT_API_URL to the server that has it."
        )
    return found


def find(kind: type[B], field: str, name: str) -> B | None:
    """A block, None if the server has none of that name. Raises ValueError for one that is not right."""
    try:
        return kind.load(name, _sync=True)  # type: ignore[call-arg, return-value]
    except RuntimeError as error:
        if not isinstance(error.__cause__, ValidationError):
            raise
        why = _first(error.__cause__)
        raise ValueError(f"{field}: the block {name!r} is not right ({why}); mend it in Prefect's UI.") from None
    except ValueError:
        return None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong with a block, without what stands in it."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    why = first["msg"].removeprefix("Value error, ")
    return f"{where}: {why}" if where else why


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Exactly these of MLflow's credentials, and what was there before afterwards."""
    before = {name: os.environ.pop(name) for name in CREDENTIALS if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in CREDENTIALS:
            os.environ.pop(name, None)
        os.environ.update(before)
