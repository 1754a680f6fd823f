"""The contract with the user's code: what `build(config, data)` returns. Importing this loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn


class ProgramError(ValueError):
    """The program breaks its contract; the text is one plain sentence for the user."""


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken and put back: numbers, strings, lists, dicts, tensors and arrays in it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(kw_only=True)
class Program:
    """A training program. Any object with these attributes will do; those with a default may be absent.

    `batch_size` is samples per optimizer step over all ranks; `grad_accumulation` splits it. `loss(batch)` returns the
    mean over the samples of a batch. `dataset` is map-style; in its place a program may bring its own `loader`, an
    iterable of this rank's batches with `state_dict` and `load_state_dict`. `evaluate` is called in eval mode without
    gradients, on every rank; `done` after it, and ends the run early when it says True. `show` is called at
    each segment's end, after it, and gives a text for people. `state` holds whatever else must survive a restart, by name.
    """

    model: "nn.Module"
    optimizer: Any
    loss: "Callable[[Any], Tensor]"
    batch_size: int
    dataset: Any = None
    loader: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    grad_accumulation: int = 1
    drop_last: bool = False
    scheduler: Any = None
    scaler: Any = None
    clip_norm: float | None = None
    evaluate: Callable[[], Mapping[str, float]] | None = None
    done: Callable[[], bool] | None = None
    show: Callable[[], str] | None = None
    state: Mapping[str, Stateful] = field(default_factory=dict)


def as_program(found: Any) -> Program:
    """The same program with every optional attribute in place. Raises ProgramError, naming attribute and remedy."""
    values: dict[str, Any] = {}
    for one in fields(Program):
        value = getattr(found, one.name, None)
        if value is not None:
            values[one.name] = value
        elif one.name in ("model", "optimizer", "loss", "batch_size"):
            raise ProgramError(f"{one.name}: the program that build() returned ({_kind(found)}) lacks this attribute.")
    program = Program(**values)
    for check in (_check_model, _check_data, _check_numbers, _check_helpers):
        check(program)
    return program


def _check_model(program: Program) -> None:
    from torch import nn

    from everstep.trainer import sharding

    if not isinstance(program.model, nn.Module):
        raise ProgramError(f"model: {_kind(program.model)} is not a torch.nn.Module.")
    if not any(parameter.requires_grad for parameter in program.model.parameters()):
        raise ProgramError("model: has no parameter that requires a gradient, so there is nothing to train.")
    if any(parameter.is_meta for parameter in program.model.parameters()):
        raise ProgramError("model: has parameters on the meta device; build() must give them values.")
    sharding.check(program.model, scaled=program.scaler is not None)
    _must_have("optimizer", program.optimizer, "step", "param_groups", "state_dict", "load_state_dict")


def _check_data(program: Program) -> None:
    if (program.dataset is None) == (program.loader is None):
        both = "both" if program.dataset is not None else "neither"
        raise ProgramError(f"dataset: the program has {both} of dataset and loader; give one of them.")
    if program.loader is not None:
        _must_have("loader", program.loader, "__iter__", "state_dict", "load_state_dict")
        return
    _must_have("dataset", program.dataset, "__len__", "__getitem__")
    size = len(program.dataset)
    if size == 0:
        raise ProgramError("dataset: is empty; check the folder that the job names under data.source.")
    if program.drop_last and _is_int(program.batch_size) and size < program.batch_size:
        raise ProgramError(
            f"batch_size: {program.batch_size} is more than the {size} samples of the dataset, and drop_last is set; "
            "take a smaller batch or keep the tail."
        )


def _check_numbers(program: Program) -> None:
    for name, least in (("batch_size", 1), ("grad_accumulation", 1), ("workers", 0)):
        value = getattr(program, name)
        if not _is_int(value) or value < least:
            raise ProgramError(f"{name}: {value!r} is not a whole number of at least {least}.")
    if not isinstance(program.drop_last, bool):
        raise ProgramError(f"drop_last: {program.drop_last!r} is neither True nor False.")
    clip = program.clip_norm
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
        raise ProgramError(f"clip_norm: {clip!r} is not a positive number.")


def _check_helpers(program: Program) -> None:
    for name in ("loss", "collate", "evaluate", "done", "show"):
        value = getattr(program, name)
        if value is not None and not callable(value):
            raise ProgramError(f"{name}: {_kind(value)} cannot be called.")
    if program.scheduler is not None:
        _must_have("scheduler", program.scheduler, "step", "state_dict", "load_state_dict")
    if program.scaler is not None:
        _must_have("scaler", program.scaler, "scale", "unscale_", "step", "update", "state_dict", "load_state_dict")
    if not isinstance(program.state, Mapping):
        raise ProgramError(f"state: {_kind(program.state)} is not a dict of names to objects.")
    for name, value in program.state.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ProgramError(f"state: {name!r} is no name for an object; use a string without a slash.")
        _must_have(f"state[{name!r}]", value, "state_dict", "load_state_dict")


def _must_have(name: str, value: Any, *attributes: str) -> None:
    for attribute in attributes:
        if not hasattr(value, attribute):
            raise ProgramError(f"{name}: {_kind(value)} has no {attribute}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an object of type {name}"
