"""Whatever goes into a skeleton and leaves comes out again, exact to type and bit; hostile skeletons are refused in
words."""

import json
import math
import random
import struct
from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mt_resilient.checkpoint.format import pytree
from mt_resilient.checkpoint.format.pytree_walk import flatten
from mt_resilient.resilience.errors import SnapshotError


class Leaf:
    def __init__(self, number: int) -> None:
        self.number = number


def is_leaf(value: object) -> bool:
    return isinstance(value, Leaf)


any_bits = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | any_bits
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.integers(0, 2**32 - 1).map(np.uint32)
    | st.floats(width=32).map(np.float32)
    | st.booleans().map(np.bool_)
    | st.builds(Leaf, st.integers())
    | st.lists(st.integers(-128, 127)).map(lambda items: np.array(items, np.int8))
)
keys = st.text(max_size=5) | st.integers() | st.sampled_from(["1", "a/b", "a", "b", ""])
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.dictionaries(keys, st.integers()).map(Counter)
    ),
)


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return (
            list(one) == list(other)
            and all(type(a) is type(b) for a, b in zip(one, other, strict=True))
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, float) and not isinstance(one, np.generic):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, (np.generic, np.ndarray)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return one is other or one == other


@settings(deadline=None)
@given(states)
@example([struct.unpack(">d", bytes.fromhex("7ff8dead00000001"))[0], -0.0, math.inf])  # a NaN with a payload
def test_a_state_is_rebuilt_exact_to_type_and_bit(state):
    skeleton, leaves = flatten(state, is_leaf)
    assert len(dict(leaves)) == len(leaves), "names are unique"
    assert same(pytree.unflatten(json.loads(json.dumps(skeleton)), dict(leaves)), state)


@settings(deadline=None)
@given(states)
def test_everything_in_a_state_is_a_leaf_or_a_value(state):
    skeleton, leaves = flatten(state, is_leaf)
    places = list(pytree.values(json.loads(json.dumps(skeleton))))

    def count(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return 1 + sum(map(count, inner))

    assert len(places) + len(leaves) == count(state)


def test_names_are_readable_and_unique():
    state = {
        "model": {"decoder.layers.0.weight": Leaf(0)},
        "opt": [{1: Leaf(1), "1": Leaf(2)}],
        "a": {"b": Leaf(3)},
        "a/b": Leaf(4),
    }
    names = [name for name, _ in flatten(state, is_leaf)[1]]
    assert names == ["model/decoder.layers.0.weight", "opt/0/1", "opt/0/1~2", "a/b", "a/b~2"]
    assert flatten(Leaf(0), is_leaf)[1][0][0] == "state"


def test_random_states_of_python_and_numpy():
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "pcg": np.random.default_rng(1).bit_generator.state,
    }
    skeleton, leaves = flatten(state, is_leaf)
    assert same(pytree.unflatten(json.loads(json.dumps(skeleton)), dict(leaves)), state)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [{1, 2}]}, r"state\[a/0\]: a builtins.set"),
        ({"f": is_leaf}, r"state\[f\]: a builtins.function"),
        ({(1, 2): 3}, r"the state: the key \(1, 2\)"),
        ({True: 3}, "the key True"),
        (np.array(["x"]), "an array of <U1"),
        (np.array([object()]), "an array of object"),
        (np.zeros(2, ">i4"), "an array of >i4"),
        (type("Sub", (dict,), {})(), r"a test_tree\.Sub|Sub can't"),
    ],
)
def test_a_value_that_cannot_be_rebuilt_exactly_is_refused_with_place_and_type(value, words):
    with pytest.raises(SnapshotError, match=words):
        flatten(value, is_leaf)


def test_a_state_that_contains_itself_is_refused():
    state: list = []
    state.append(state)
    with pytest.raises(SnapshotError, match="contains itself"):
        flatten(state, is_leaf)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dict", "ordered", "tuple", "leaf", "array", "int", "float", "bytes", "numpy", "pickle"]),
            inner,
            max_size=2,
        )
    ),
)


@settings(deadline=None)
@given(json_values)
def test_a_hostile_skeleton_is_refused_or_harmless(skeleton):
    for consume in (lambda: pytree.unflatten(skeleton, {"": 0}), lambda: list(pytree.values(skeleton))):
        try:
            consume()
        except SnapshotError:
            pass


@pytest.mark.parametrize(
    "skeleton",
    [
        {"leaf": "gone"},
        {"numpy": ["object", "00"]},
        {"numpy": ["float32", "00"]},
        {"float": "00"},
        {"bytes": "%"},
        {},
        {"int": 3},
    ],
)
def test_a_malformed_skeleton_is_refused(skeleton):
    with pytest.raises(SnapshotError):
        pytree.unflatten([skeleton], {})


def test_a_skeleton_that_is_nested_too_deep_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SnapshotError, match="too deep"):
        pytree.unflatten(deep, {})
    assert sum(1 for _ in pytree.values(deep)) == 100_001
    while deep:  # freed level by level
        deep = deep[0]


def test_values_that_json_cannot_express_are_readable_as_text():
    huge = 1 << 20_000
    state = {"seed": huge, huge: [-huge, math.nan, b"x"], "of": pytree.Tagged(("set", [1]))}
    skeleton, _ = flatten(state, is_leaf)
    back = pytree.unflatten(json.loads(json.dumps(skeleton)), {})
    assert back == state or same(back, state)
    read = json.loads(json.dumps(pytree.readable(back)))
    assert read == {"seed": hex(huge), hex(huge): [hex(-huge), "nan", "eA=="], "of": {"set": [1]}}
    assert {name for name, _ in pytree.values(skeleton)} >= {"seed", f"{hex(huge)}/0"}
