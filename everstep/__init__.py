"""Everstep keeps long GPU training alive. Importing it loads neither torch nor Prefect."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.core.job import TrainJob as TrainJob
    from everstep.core.logs import classify_log as classify_log
    from everstep.host.browse import open_run as open_run
    from everstep.host.registry import rollback as rollback
    from everstep.store.checkpoint import verify_checkpoint as verify_checkpoint
    from everstep.store.tensors import weights_digest as weights_digest
    from everstep.trainer.reading import load_checkpoint as load_checkpoint

_HOMES = {
    "TrainJob": "everstep.core.job",
    "classify_log": "everstep.core.logs",
    "open_run": "everstep.host.browse",
    "rollback": "everstep.host.registry",
    "load_checkpoint": "everstep.trainer.reading",
    "verify_checkpoint": "everstep.store.checkpoint",
    "weights_digest": "everstep.store.tensors",
}

__all__ = ["TrainJob", "classify_log", "load_checkpoint", "open_run", "rollback", "verify_checkpoint", "weights_digest"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
