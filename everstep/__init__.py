"""Everstep keeps long GPU training alive. Importing it loads neither torch nor Prefect."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.core.job import TrainJob as TrainJob

_HOMES = {
    "TrainJob": "everstep.core.job",
    "open_run": "everstep.host.browse",
    "load_checkpoint": "everstep.trainer.checkpoint",
    "verify_checkpoint": "everstep.store.checkpoint",
    "weights_digest": "everstep.store.tensors",
}

__all__ = ["TrainJob"]  # the full list follows as the rooms are built


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
