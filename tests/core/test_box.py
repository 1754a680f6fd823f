"""Parts of tensors: tilings are told from all else, and parts of one cut make the parts of another."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.box import Box, flaw

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
cut_shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def tilings(draw):
    """A shape, and boxes that come from cutting it again and again."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for begin, length in ((0, at), (at, box.shape[dim] - at)):
            offset, part = list(box.offset), list(box.shape)
            offset[dim], part[dim] = offset[dim] + begin, length
            boxes.append(Box(tuple(offset), tuple(part)))
    return tuple(shape), draw(st.permutations(boxes))


def covered(shape, boxes):
    """How often each element is held."""
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.within(Box.whole(shape))] += 1
    return count


@given(tilings())
def test_what_was_cut_tiles(cut):
    shape, boxes = cut
    assert flaw(shape, boxes) is None
    assert (covered(shape, boxes) == 1).all()


@given(tilings(), st.data())
def test_a_part_less_or_twice_or_moved_is_no_tiling(cut, data):
    shape, boxes = cut
    index = data.draw(st.integers(0, len(boxes) - 1))
    box = boxes[index]
    others = [one for at, one in enumerate(boxes) if at != index]
    found = flaw(shape, others)
    assert (found is None) == (box.size == 0)
    if box.size:
        assert f"{box.size} of its" in found.why
        assert "too" in flaw(shape, [*boxes, box]).why
    dim = data.draw(st.integers(0, len(shape) - 1))
    by = data.draw(st.integers(-3, 3).filter(bool))
    offset = list(box.offset)
    offset[dim] += by
    moved = [*others, Box(tuple(offset), box.shape)]
    if box.size:
        assert flaw(shape, moved) is not None


@given(shapes, st.lists(st.tuples(st.lists(st.integers(-1, 7), max_size=3), st.lists(st.integers(-1, 7), max_size=3))))
def test_the_verdict_is_that_of_counting(shape, pairs):
    boxes = [Box(tuple(offset), tuple(part)) for offset, part in pairs]
    fits = all(
        len(box.offset) == len(box.shape) == len(shape)
        and all(a >= 0 and b >= 0 and a + b <= c for a, b, c in zip(box.offset, box.shape, shape, strict=True))
        for box in boxes
    )
    assert (flaw(shape, boxes) is None) == (fits and bool((covered(shape, boxes) == 1).all()))


@given(cut_shapes, st.integers(1, 5), st.integers(1, 5), st.data())
def test_parts_for_some_make_the_parts_for_others(shape, some, others, data):
    """Any count of parts along any dimension, put together from those of another count along another dimension."""
    dims = st.integers(0, len(shape) - 1)
    was, now = data.draw(dims), data.draw(dims)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = [Box.chunk(shape, was, index, some) for index in range(some)]
    assert flaw(shape, parts) is None
    held = [values[part.within(Box.whole(shape))] for part in parts]
    for index in range(others):
        mine = Box.chunk(shape, now, index, others)
        target = np.full(mine.shape, -1)
        for part, piece in zip(parts, held, strict=True):
            if shared := mine.common(part):
                target[shared.within(mine)] = piece[shared.within(part)]
        assert (target == values[mine.within(Box.whole(shape))]).all()


def test_chunks_are_those_of_torch():
    import torch

    for size in range(12):
        for count in range(1, 6):
            parts = [Box.chunk((size, 2), 0, index, count).shape[0] for index in range(count)]
            filled = [len(one) for one in torch.zeros(size, 2).chunk(count)] if size else []
            assert parts == filled + [0] * (count - len(filled))


def test_many_parts_are_judged_quickly():
    """Ten thousand parts: comparing each with each would take minutes."""
    shape = (10_000, 3)
    assert flaw(shape, [Box.chunk(shape, 0, index, 10_000) for index in reversed(range(10_000))]) is None
