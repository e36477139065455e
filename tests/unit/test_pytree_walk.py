"""What is kept of the last state is used for the next one only where that changes nothing: the table is the one that is made anew."""

import math
import struct
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.arena.staging import Stager
from mt_resilient.checkpoint.format import pytree
from mt_resilient.checkpoint.format.pytree_walk import MOST_LEVELS, flatten
from mt_resilient.checkpoint.format.tensor_table import Table
from mt_resilient.resilience.errors import SnapshotError

numbers = st.sampled_from(
    [0, 1, 2, True, False, None, 0.0, -0.0, 1.0, math.nan, "1", b"1", np.float32(1), np.float64(1)]
)
leaves = st.sampled_from(
    [
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.int32),
        np.zeros(2, np.float32),
        np.zeros(2, np.int8),
    ]
)
states = st.recursive(
    numbers | leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["1", 1, "a", "b"]), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["1", 1, "a", "b"]), inner, max_size=3).map(OrderedDict)
        | st.dictionaries(st.sampled_from(["1", 1, "a", "b"]), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=6,
)


def as_if_anew(stager: Stager, state: object) -> None:
    layout, encoded, found = stager.plan(state, torch.is_tensor)
    other, expected, others = Stager().plan(state, torch.is_tensor)
    assert layout == other
    assert encoded == expected
    assert len(found) == len(others)
    assert all(map(lambda one, two: one is two, found, others))
    assert Table.from_json(encoded).skeleton == flatten(state, torch.is_tensor)[0]


@settings(deadline=None, max_examples=300)
@given(st.lists(states, min_size=2, max_size=4))
def test_a_table_does_not_depend_on_the_states_before(several):
    stager = Stager()
    for state in several:
        as_if_anew(stager, state)


quiet, other = (struct.unpack(">d", bytes.fromhex(bits))[0] for bits in ("7ff8000000000000", "7ff8dead00000001"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": quiet}, {"a": other}),
        ({"a": np.float32(1)}, {"a": np.float64(1)}),
        ({"a": b"1"}, {"a": "1"}),
        ({"a": None}, {"a": {}}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"1": 1}, {1: 1}),
        ([1, [2]], [1, 2]),
        ([[1], 2], [[1, 2]]),
        ([1], (1,)),
        ({"a": 1}, OrderedDict({"a": 1})),
        ({"a": torch.zeros(2)}, {"a": np.zeros(2, np.float32)}),
        ({"a": torch.zeros(2)}, {"a": 0.0}),
        ({"a": torch.zeros(4)}, {"a": torch.zeros(2, 2)}),
        ({"a": torch.zeros(4)}, {"a": torch.zeros(4, dtype=torch.int32)}),
        ({"a": np.zeros(4, np.int32)}, {"a": np.zeros(4, np.uint32)}),
        ({"a": np.zeros(4)}, {"a": np.zeros((2, 2))}),
        ({"a": torch.zeros(2), "b": torch.ones(3)}, {"a": torch.ones(3), "b": torch.zeros(2)}),
    ],
)
def test_each_difference_between_two_states_changes_the_table(before, after):
    stager = Stager()
    as_if_anew(stager, before)
    as_if_anew(stager, after)
    as_if_anew(stager, before)
    assert flatten(before, torch.is_tensor)[0] != flatten(after, torch.is_tensor)[0] or (
        Stager().plan(before, torch.is_tensor)[1] != Stager().plan(after, torch.is_tensor)[1]
    )


def test_states_of_the_same_structure_are_laid_out_once():
    stager = Stager()
    first, encoded, _ = stager.plan({"a": torch.zeros(2), "lr": 0.1}, torch.is_tensor)
    again, changed, _ = stager.plan(
        {"a": torch.ones(2), "lr": 0.2}, torch.is_tensor, lambda: pytest.fail("asked again")
    )
    assert first is again
    assert encoded != changed


def test_a_tensor_that_has_moved_to_another_device_is_another_layout():
    stager, tensor = Stager(), torch.zeros(2)
    first, _, _ = stager.plan({"a": tensor}, torch.is_tensor)
    assert stager.plan({"a": tensor.to("meta")}, torch.is_tensor)[0] is not first


def test_a_changed_type_or_shape_of_the_same_tensor_is_detected():
    stager, tensor = Stager(), torch.zeros(4)
    for value in (torch.zeros(4), torch.zeros(2, 2), torch.zeros(4).bfloat16(), torch.zeros(9)[::2], torch.zeros(0)):
        tensor.data = value
        as_if_anew(stager, {"a": tensor})


def test_a_refused_state_leaves_no_trace_in_the_cache():
    stager = Stager()
    as_if_anew(stager, {"a": torch.zeros(3, 3)})
    as_if_anew(stager, {"a": torch.zeros(3, 3), "b": torch.zeros(2)})
    with pytest.raises(SnapshotError, match="not dense"):
        stager.plan({"a": torch.eye(1).to_sparse(), "b": torch.zeros(50)}, torch.is_tensor)
    as_if_anew(stager, {"a": torch.zeros(3, 3), "b": torch.zeros(2)})
    for bad in ({"a": torch.eye(3).to_sparse()}, {"a": {1, 2}}, {"a": np.array(["x"])}, {True: torch.zeros(3, 3)}):
        with pytest.raises(SnapshotError, match="can't be saved"):
            stager.plan(bad, torch.is_tensor)
        as_if_anew(stager, {"a": torch.zeros(3, 3)})


def test_a_state_nested_too_deep_to_be_read_is_refused_before_it_is_written():
    deep: object = 0
    for _ in range(MOST_LEVELS):
        deep = {"a": deep}
    assert pytree.unflatten(flatten(deep, torch.is_tensor)[0], {}) == deep
    with pytest.raises(SnapshotError, match="nested hundreds of levels deep"):
        Stager().plan([deep], torch.is_tensor)
    assert pytree.unflatten(flatten([[[[0]]]], torch.is_tensor)[0], {}) == [[[[0]]]]
