"""A flow that brings its own Prefect server when none is configured, and leaves nothing behind."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_ENABLED,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    get_current_settings,
    temporary_settings,
)

from everstep.host import server

P = ParamSpec("P")
R = TypeVar("R")

READY_SECONDS = 90.0


class LocalFlow(Flow[P, R]):
    """A flow that, called directly with no `PREFECT_API_URL`, runs against an embedded server that it starts and stops.

    Run by a worker it is a flow like any other.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with embedded_server():
            return super().__call__(*args, **kwargs)


class PartFlow(LocalFlow[P, R]):
    """A flow that is also a part of others. There its parent's heartbeats speak for it: the end of its own takes a second."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if FlowRunContext.get() is None:
            return super().__call__(*args, **kwargs)
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            return super().__call__(*args, **kwargs)


@contextmanager
def embedded_server() -> Iterator[None]:
    """Serve the API for the length of the block, unless settings name one already."""
    if get_current_settings().api.url:
        yield
        return
    own = server.take()
    try:
        own.wait_ready(READY_SECONDS)
        with temporary_settings(_alone(own.url)), _quiet():
            yield
    finally:
        own.stop()


@contextmanager
def _quiet() -> Iterator[None]:
    """Nobody can follow the links to this server, and the run says itself what happens: warnings only."""
    loggers = [logging.getLogger(f"prefect.{name}") for name in ("flow_runs", "task_runs")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _alone(url: str) -> dict[Any, Any]:
    """Nobody else sees this server: it needs no logs, and no heartbeats (waiting for their end costs a second)."""
    return {
        PREFECT_API_URL: url,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False,
        PREFECT_LOGGING_TO_API_ENABLED: False,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
    }
