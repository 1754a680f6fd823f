"""Boxes: which part of a tensor somebody holds, and whether the parts make the whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and how long it is there. Parts of length 0 are empty."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def chunk(cls, shape: Sequence[int], dim: int, index: int, count: int) -> "Box":
        """The part `index` of `count` along `dim`, as `torch.chunk` cuts: all but the last ones equally long."""
        length = -(-shape[dim] // count)
        begin = min(index * length, shape[dim])
        offset, part = [0] * len(shape), list(shape)
        offset[dim], part[dim] = begin, min(length, shape[dim] - begin)
        return cls(tuple(offset), tuple(part))

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(begin + length for begin, length in zip(self.offset, self.shape, strict=True))

    def common(self, other: "Box") -> "Box | None":
        """What lies in both; None if that is nothing."""
        begin = tuple(map(max, self.offset, other.offset))
        shape = tuple(end - at for at, end in zip(begin, map(min, self.end, other.end), strict=True))
        return Box(begin, shape) if all(length > 0 for length in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        starts = (at - begin for at, begin in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))


@dataclass(frozen=True)
class Flaw:
    """Why boxes are no tiling; `index` is that of a box to which it can be laid, or None."""

    why: str
    index: int | None = None


def flaw(shape: Sequence[int], boxes: Sequence[Box]) -> Flaw | None:
    """What keeps `boxes` from holding each element of a tensor of `shape` exactly once; None if they do.

    Sorted by where they begin, a box is compared with those that have not ended yet: for parts along one dimension
    that is one comparison each.
    """
    full = Box.whole(shape)
    for index, box in enumerate(boxes):
        if len(box.offset) != len(shape) or len(box.shape) != len(shape) or not _inside(box, full):
            return Flaw("lies outside of it", index)
    filled = [index for index, box in enumerate(boxes) if box.size]
    clash = _overlap(boxes, filled)
    if clash is not None:
        return Flaw("holds elements that another part holds, too", clash)
    missing = full.size - sum(boxes[index].size for index in filled)
    return Flaw(f"{missing} of its {full.size} elements are in no part") if missing else None


def _inside(box: Box, full: Box) -> bool:
    limits = zip(box.offset, box.shape, full.shape, strict=True)
    return all(begin >= 0 and length >= 0 and begin + length <= limit for begin, length, limit in limits)


def _overlap(boxes: Sequence[Box], filled: Sequence[int]) -> int | None:
    if len(filled) < 2:
        return None
    if not boxes[filled[0]].shape:
        return filled[1]
    starts = zip(*(boxes[index].offset for index in filled), strict=True)
    dim = max(enumerate(starts), key=lambda one: len(set(one[1])))[0]
    living: list[int] = []
    for index in sorted(filled, key=lambda one: boxes[one].offset[dim]):
        living = [one for one in living if boxes[one].end[dim] > boxes[index].offset[dim]]
        if any(boxes[one].common(boxes[index]) for one in living):
            return index
        living.append(index)
    return None
