"""Which state to go back to: the newest that every node can read."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.signals import NodeStatus
from mt_resilient.resilience.stability import choose

from .worlds import status

Tiers = tuple[Sequence[int], Sequence[int]]


def nodes(*tiers: Tiers) -> list[NodeStatus]:
    """Each node's steps in memory and on disk."""
    return [status(memory_steps=tuple(memory), durable_steps=tuple(disk)) for memory, disk in tiers]


@pytest.mark.parametrize(
    ("tiers", "step", "where"),
    [
        ([], -1, "no node has reported"),
        ([([], [])], -1, "there is no snapshot yet"),
        ([([7, 8], [5])], 8, "step 8 from memory"),
        ([([], [5, 10])], 10, "step 10 from disk"),
        ([([8], [10])], 10, "step 10 from disk"),
        ([([0], [])], 0, "step 0 from memory"),
        ([([7, 8], []), ([7], [])], 7, "step 7 from memory"),
        ([([8], [5]), ([7], [5])], 5, "step 5 from disk"),
        ([([8], []), ([], [8])], 8, "step 8 from memory and disk"),
        ([([8], []), ([7], [])], -1, "there is no snapshot yet"),
        ([([8], [5]), ([], [])], -1, "there is no snapshot yet"),
    ],
)
def test_the_newest_common_step(tiers: list[Tiers], step: int, where: str) -> None:
    point = choose(nodes(*tiers))
    assert point.step == step
    assert where in point.reason


steps = st.sets(st.integers(0, 12), max_size=6)


@given(st.lists(st.tuples(steps, steps), min_size=1, max_size=5))
def test_every_node_can_read_it_and_none_newer(tiers: list[tuple[set[int], set[int]]]) -> None:
    chosen = choose(nodes(*((sorted(memory), sorted(disk)) for memory, disk in tiers))).step
    readable = [memory | disk for memory, disk in tiers]
    assert chosen == -1 or all(chosen in held for held in readable)
    assert not any(all(newer in held for held in readable) for newer in range(chosen + 1, 13))
