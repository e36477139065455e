"""Who holds whose copy: everybody one, on another rack wherever racks allow, and few change when one node does."""

from collections import Counter
from random import Random
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.membership.buddy_placement import holders
from mt_resilient.resilience.model.types import NodeId


def named(racks: list[str]) -> tuple[list[NodeId], dict[NodeId, dict[str, str]]]:
    members = [NodeId(f"n{at}") for at in range(len(racks))]
    return members, {node: {"rack": rack} for node, rack in zip(members, racks, strict=True) if rack}


def by_place(racks: list[str]) -> list[int]:
    members, labels = named(racks)
    of = holders(members, labels)
    return [members.index(of[node]) for node in members]


def together(racks: list[str]) -> int:
    """How many have their copy on their own rack."""
    return sum(racks[at] != "" and racks[at] == racks[holder] for at, holder in enumerate(by_place(racks)))


@pytest.mark.parametrize(
    ("racks", "expected"),
    [
        (["", ""], [1, 0]),
        (["", "", ""], [1, 2, 0]),
        (["", "", "", ""], [2, 3, 0, 1]),
        (["a", "a", "b", "b"], [2, 3, 0, 1]),  # racks in the order of names
        (["a", "b", "a", "b"], [3, 2, 1, 0]),  # half the ring away would be one's own rack
        (["a", "a", "a", "b"], [2, 3, 0, 1]),  # b can do for one, and for no other
        (["a", "a", "a", "a"], [2, 3, 0, 1]),
        (["a", "b", "a", "", ""], [3, 2, 4, 0, 1]),
    ],
)
def test_small_jobs(racks: list[str], expected: list[int]) -> None:
    assert by_place(racks) == expected


def test_a_node_alone_has_nobody() -> None:
    assert holders([NodeId("a")], {}) == {}
    assert holders([], {}) == {}


RACKS = st.lists(st.sampled_from(["a", "b", "c", "d", ""]), min_size=2, max_size=40)


@given(RACKS)
def test_everybody_has_one_guest_and_racks_differ_wherever_they_can(racks: list[str]) -> None:
    of = by_place(racks)
    assert sorted(of) == list(range(len(racks)))
    assert all(holder != at for at, holder in enumerate(of))
    most = max((count for rack, count in Counter(racks).items() if rack), default=0)
    assert together(racks) == max(0, 2 * most - len(racks))


@given(RACKS, st.data())
def test_whoever_takes_a_place_on_the_same_rack_changes_nothing_for_the_others(
    racks: list[str], data: st.DataObject
) -> None:
    members, labels = named(racks)
    gone = data.draw(st.sampled_from(members))
    spare = NodeId("spare")
    after = [spare if node == gone else node for node in members]
    known = {**{spare if node == gone else node: said for node, said in labels.items()}, NodeId("other"): {"rack": "a"}}
    renamed = {gone: spare}
    expected = {renamed.get(n, n): renamed.get(h, h) for n, h in holders(members, labels).items()}
    assert holders(after, known) == expected


def test_a_spare_of_another_rack_changes_few() -> None:
    """Of 1,000 nodes on racks of eight, in the order of their names, in a row across racks and drawn: how many
    change their holder when one node is replaced by one of a rack of its own."""
    for drawn, bound in (("order", 4), ("across", 6), ("random", 10)):
        racks = [f"r{at // 8}" if drawn == "order" else f"r{at % 125}" for at in range(1000)]
        if drawn == "random":
            Random(1).shuffle(racks)
        before, changes = by_place(racks), []
        for at in range(0, 1000, 37):
            after = by_place([*racks[:at], "spare", *racks[at + 1 :]])
            changes.append(sum(one != other for one, other in zip(before, after, strict=True)))
        assert max(changes) <= bound, (drawn, changes)


def test_ten_thousand_nodes_take_no_time() -> None:
    members, labels = named([f"r{at % 100}" for at in range(10_000)])
    before = process_time()
    holders(members, labels)
    assert process_time() - before < 10.0
