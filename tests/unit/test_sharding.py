"""Every element of a part is where the part says, whatever is cut out of it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.lib.stride_tricks import as_strided

from mt_resilient.checkpoint.format.sharding import (
    Part,
    boxes,
    covers,
    cut,
    cutting,
    overlap,
    row_major,
    scalars,
    within,
)

SHAPES = [(), (1,), (7,), (1, 1), (3, 5), (2, 3, 4), (1, 4, 3), (4, 1, 3), (2, 3, 1), (2, 2, 2, 3)]


def view(data: np.ndarray, part: Part) -> np.ndarray:
    strides = [s * data.itemsize for s in part.strides or row_major(part.box)]
    return as_strided(data[part.start :], part.box, strides)


def region(part: Part) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(part.offset, part.box, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_flat_range_is_cut_into_few_boxes_in_order(shape):
    whole = np.arange(math.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations(range(whole.size + 1), 2):
        found = list(cut(shape, start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        got = [whole[tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))].ravel() for offset, box in found]
        assert np.concatenate(got).tolist() == list(range(start, stop))


def stacked_halves(experts=2, width=3, half=2):
    """A gated layer's stacked experts as they lie in memory (expert, in, 2·half), and as they are globally: halves apart, transposed."""
    live = np.arange(experts * width * 2 * half)
    turned = live.reshape(experts, width, 2 * half).transpose(0, 2, 1)
    parts = []
    for first in (0, half):
        piece = turned[:, first : first + half]
        strides = tuple(s // live.itemsize for s in piece.strides)
        shape, start = (experts, 2 * half, width), int(piece[0, 0, 0])
        parts.append(Part(name="w", shape=shape, offset=(0, first, 0), box=piece.shape, start=start, strides=strides))
    return live, turned, parts


def plain(shape=(3, 4, 2)):
    live = np.arange(math.prod(shape))
    return live, live.reshape(shape), [Part(name="w", shape=shape, offset=(0, 0, 0), box=shape)]


@pytest.mark.parametrize("made", [stacked_halves, plain])
def test_a_shard_of_the_live_tensor_has_exactly_its_elements_in_their_places(made):
    live, whole, parts = made()
    for begin, end in itertools.combinations(range(live.size + 1), 2):
        shard, seen = live[begin:end], []
        for box in (box for part in parts for shard_part in within(part, begin, end) for box in boxes(shard_part)):
            assert (view(shard, box) == whole[region(box)]).all()
            seen += view(shard, box).ravel().tolist()
        assert sorted(seen) == list(range(begin, end))


def test_shards_of_one_cut_are_copied_straight_into_shards_of_another():
    live, _, parts = stacked_halves()
    for cuts, others in itertools.product([(0, 5, 24), (0, 11, 13, 24)], [(0, 24), (0, 7, 8, 24), (0, 12, 24)]):
        saved = [
            (live[a:b], box)
            for a, b in itertools.pairwise(cuts)
            for p in parts
            for q in within(p, a, b)
            for box in boxes(q)
        ]
        for begin, end in itertools.pairwise(others):
            made = np.full(end - begin, -1)
            for target in (box for p in parts for q in within(p, begin, end) for box in boxes(q)):
                for data, source in saved:
                    if common := overlap(source, target):
                        from_ = replace(source, start=common.source, strides=common.source_strides, box=common.box)
                        to = replace(target, start=common.target, strides=common.target_strides, box=common.box)
                        view(made, to)[...] = view(data, from_)
            assert made.tolist() == list(range(begin, end))


def test_a_number_has_one_main_holder_and_one_place_for_each_stacked_layer():
    layers = [Part(name="w", shape=(4, 6, 2), offset=(n, 0, 0), box=(1, 6, 2), stacked=1) for n in (1, 3)]
    shards = [[s for part in layers for s in within(part, a, b)] for a, b in ((0, 5), (5, 12))]
    head, tail = ([(p.shape, p.offset, p.box, p.is_main) for p in scalars(held)] for held in shards)
    assert head == [((4,), (1,), (1,), True), ((4,), (3,), (1,), True)]
    assert tail == [((4,), (1,), (1,), False), ((4,), (3,), (1,), False)]


def test_tensors_sort_by_how_they_are_split():
    whole = Part(name="w", shape=(4, 2), offset=(0, 0), box=(4, 2))
    box = replace(whole, offset=(2, 0), box=(2, 2))
    head, tail = replace(whole, flat=(0, 3)), replace(whole, flat=(3, 8), start=3)
    listed = ([whole], [head, tail], [box], [whole, box], [head], [])
    assert [cutting(parts) for parts in listed] == [0, 0, 1, 1, 2, 3]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=3), st.data())
def test_boxes_cover_a_tensor_only_with_each_element_once(cuts, data):
    edges = [list(itertools.accumulate(sizes, initial=5)) for sizes in cuts]
    grid = itertools.product(*(itertools.pairwise(each) for each in edges))
    found = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in grid]
    offset, shape = (5,) * len(cuts), tuple(map(sum, cuts))
    assert covers(found, offset, shape)
    assert not covers(found[1:], offset, shape)
    assert not covers([*found, found[0]], offset, shape)
    other = data.draw(st.sampled_from(found))
    if other != found[0]:
        assert not covers([other, *found[1:]], offset, shape)


def test_half_a_tensor_twice_does_not_cover_it():
    assert not covers([((0, 0), (2, 6))] * 2, (0, 0), (4, 6))
    assert covers([((0,), (1 << 58,)), ((1 << 58,), (3,))], (0,), ((1 << 58) + 3,))
    assert covers([((0, 0), (3, 0))], (0, 0), (3, 0)), "nothing is covered by nothing"
