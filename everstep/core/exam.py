"""The active test of devices: what each rank is asked, what it measured, and what that means. Pure.

A wrong value or an error of the device is a fail, a speed below its floor or far below the others' too. What did not answer
is not measured: how long that may go on before it is a fault is for the caller's policy to say.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from statistics import median

from pydantic import Field

from everstep.core.check import Check, Figure, failed, not_measured, passed
from everstep.core.floors import DEFAULT, Floors, Speed
from everstep.core.record import Record

CPU = "cpu"
PEERS = 2  # others of its model, at least, before one is compared with them


class Part(StrEnum):
    """The parts of the test, in the order in which a rank takes them."""

    matmul = "matmul"
    memory = "memory"
    host_copy = "host_copy"
    all_reduce = "all_reduce"

    @property
    def words(self) -> str:
        return self.value.replace("_", " ")


SPEEDS: dict[Part, tuple[Speed, ...]] = {
    Part.matmul: (Speed.bf16, Speed.fp16, Speed.fp32),
    Part.memory: (Speed.memory,),
    Part.host_copy: (Speed.h2d, Speed.d2h),
    Part.all_reduce: (Speed.all_reduce,),
}

_VALUES = {
    Part.matmul: "every element of products of integers equals the closed form, bit for bit",
    Part.memory: "a pattern written, copied and read back is the same",
    Part.host_copy: "a pattern copied to the device and back is the same on both sides",
    Part.all_reduce: "sums of integers over all ranks are exact",
}


class Task(Record):
    """What one rank is asked, as a line of JSON. `seconds` are for measuring; starting comes on top of them."""

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    listen_fd: int | None = Field(default=None, description="a listening socket for rank 0; without it, it makes one")
    turn_fd: int | None = Field(default=None, description="a file whose lock lets one rank at a time copy to its host")
    answer_fd: int | None = Field(default=None, description="where answers go; without it, standard output")
    waits: bool = Field(default=False, description="for a second line, once it is ready")
    device: str = Field(default=CPU, pattern=r"^(cpu|cuda(:\d+)?)$")
    seconds: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    patience: float = Field(default=15.0, gt=0, allow_inf_nan=False, description="seconds to wait for other ranks")
    memory_bytes: int | None = Field(default=None, gt=0, description="at most; 256 MiB of a CPU's, 2 GiB of a GPU's")
    threads: int | None = Field(default=None, ge=1)


class Measured(Record):
    """What one part of the test found on one device.

    `why` says why nothing was measured, or why a speed was not; `error` is what the device itself complained of.
    """

    part: Part
    speeds: dict[Speed, float] = {}
    compared: int = Field(default=0, description="elements")
    wrong: int = Field(default=0, description="elements")
    greatest_error: float | None = Field(default=None, description="None, where one is wrong: it is no number")
    why: str = ""
    error: str = ""


class Examination(Record):
    """What one rank has said. `device` is `cpu` or the GPU's UUID; `why` says why parts of the test are missing."""

    rank: int
    device: str = CPU
    model: str = ""
    measured: tuple[Measured, ...] = ()
    why: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank} (CPU)" if self.device == CPU else self.device

    def of(self, part: Part) -> Measured:
        """What it found in one part; where it said nothing, a record that says why."""
        return next(
            (one for one in self.measured if one.part is part), Measured(part=part, why=self.why or "no answer")
        )


def judge(exams: Iterable[Examination], floors: Floors = DEFAULT) -> tuple[Check, ...]:
    """The checks of an active test, rank by rank: the values of each part, then its speed.

    A GPU's checks carry its UUID in `uuid`; those on values that were wrong carry how many in `wrong`. The speed of an
    all-reduce is one check for all ranks.
    """
    ranks = sorted(exams, key=lambda one: (one.rank, one.device))
    found: list[Check] = []
    for one in ranks:
        for part in Part:
            measured = one.of(part)
            found.append(_values(one, measured))
            if part is not Part.all_reduce and (measured.compared or measured.speeds):
                found.append(_speed(one, measured, ranks, floors))
    return (*found, *_together(ranks, floors))


def _values(one: Examination, measured: Measured) -> Check:
    name, rule = f"{measured.part.words} values, {one.name}", _VALUES[measured.part]
    figures = _named(one)
    if measured.wrong:
        greatest = "no number" if measured.greatest_error is None else f"{measured.greatest_error:g}"
        why = f"{measured.wrong} of {measured.compared} elements are wrong, the greatest error is {greatest}"
        wrong = {"wrong": measured.wrong, "compared": measured.compared, "greatest_error": measured.greatest_error}
        return failed(name, rule, why, **figures, **wrong)
    if measured.error:
        return failed(name, "the device raises no error", measured.error, **figures)
    if not measured.compared:
        return not_measured(name, rule, measured.why or "no answer", **figures)
    return passed(name, rule, f"{measured.compared} elements are right", **figures, compared=measured.compared)


def _speed(one: Examination, measured: Measured, ranks: Sequence[Examination], floors: Floors) -> Check:
    name = f"{measured.part.words} speed, {one.name}"
    figures: dict[str, Figure] = {**_named(one), **{speed.value: value for speed, value in measured.speeds.items()}}
    limits = {speed: value for speed, value in floors.of(one.model).items() if speed in SPEEDS[measured.part]}
    asked = [f"{speed.value} at least {value:g}" for speed, value in limits.items()]
    typical = {speed: _typical(one, speed, ranks) for speed in measured.speeds} if floors.peer_fraction else {}
    if any(value is not None for value in typical.values()):
        asked.append(f"at least {floors.peer_fraction:g} of the median of its peers")
    rule = "; ".join(asked) or "a floor for its model"
    if slow := [*_below(measured, limits), *_behind(measured, typical, floors.peer_fraction)]:
        return failed(name, rule, "; ".join(slow), **figures)
    if not measured.speeds:
        return not_measured(name, rule, measured.why or "no answer", **figures)
    if not any(speed in limits for speed in measured.speeds):
        return not_measured(name, rule, f"{_told(measured)}; {measured.why or _no_floor(one)}", **figures)
    return passed(name, rule, _told(measured), **figures)


def _together(ranks: Sequence[Examination], floors: Floors) -> Iterator[Check]:
    """The speed of the all-reduce: the slowest rank's view, as all take part in it."""
    found = [one.of(Part.all_reduce) for one in ranks]
    seen = [one.speeds[Speed.all_reduce] for one in found if Speed.all_reduce in one.speeds]
    name, count = f"all reduce speed, {len(ranks)} ranks", len(ranks)
    if count < 2:
        return
    limits = [floors.of(one.model, count).get(Speed.all_reduce) for one in ranks]
    known = [one for one in limits if one is not None]
    rule = f"{Speed.all_reduce.value} at least {min(known):g}" if known else "a floor for its model"
    if not seen:
        yield not_measured(name, rule, next((one.why for one in found if one.why), "no answer"))
    elif known and min(seen) < min(known):
        why = f"{min(seen):.4g} GB/s is below the floor of {min(known):g}"
        yield failed(name, rule, why, **{Speed.all_reduce.value: min(seen)})
    elif len(known) < count or len(seen) < count:
        why = "not all ranks have told" if known else _no_floor(ranks[0], count)
        yield not_measured(name, rule, f"{min(seen):.4g} GB/s; {why}", **{Speed.all_reduce.value: min(seen)})
    else:
        yield passed(name, rule, f"{min(seen):.4g} GB/s", **{Speed.all_reduce.value: min(seen)})


def _typical(one: Examination, speed: Speed, ranks: Sequence[Examination]) -> float | None:
    """The median of the other GPUs of its model; CPUs share their cores, and are compared with nobody."""
    if one.device == CPU:
        return None
    others = [
        measured.speeds[speed]
        for other in ranks
        if other.rank != one.rank and other.device != CPU and other.model == one.model
        for measured in other.measured
        if speed in measured.speeds
    ]
    return median(others) if len(others) >= PEERS else None


def _below(measured: Measured, limits: dict[Speed, float]) -> Iterator[str]:
    for speed, value in measured.speeds.items():
        if value < limits.get(speed, 0.0):
            yield f"{speed.value}: {value:.4g} {speed.unit} is below the floor of {limits[speed]:g}"


def _behind(measured: Measured, typical: dict[Speed, float | None], fraction: float) -> Iterator[str]:
    for speed, value in measured.speeds.items():
        peers = typical.get(speed)
        if peers is not None and value < fraction * peers:
            yield f"{speed.value}: {value:.4g} {speed.unit} is far below its peers' {peers:.4g}"


def _told(measured: Measured) -> str:
    return ", ".join(f"{speed.value} {value:.3g}" for speed, value in measured.speeds.items())


def _no_floor(one: Examination, ranks: int = 1) -> str:
    if one.device == CPU:
        return "there is no floor for CPUs"
    return f"no floor for this model ({one.model or 'its name is unknown'}){f' and {ranks} ranks' if ranks > 1 else ''}"


def _named(one: Examination) -> dict[str, Figure]:
    figures: dict[str, Figure] = {"rank": one.rank}
    if one.device != CPU:
        figures["uuid"] = one.device
    if one.model:
        figures["model"] = one.model
    return figures
