"""Since when nodes are apart, and which of them is wrong."""

from dataclasses import replace

import pytest

from mt_resilient.resilience.detect.node_divergence import TRUSTED, compared, parted
from mt_resilient.resilience.detect.registry import nodes_apart
from mt_resilient.resilience.model.signals import Held
from mt_resilient.resilience.model.types import NodeId, Step
from mt_resilient.resilience.report import status_view

from .worlds import NOW, incident, node, record, status, world


def held(words: str, first: int = 1, model: str = "m") -> str:
    """A letter for each snapshot, ten steps apart: what was held; a dot: it is not told."""
    told = {(1, 0, 10 * at): ord(word) for at, word in enumerate(words, first) if word != "."}
    return str(Held(model=model, words=told))


CASES = {
    # what nodes a, b, c … have told → the step seen, the one before at which they agreed, and who is wrong
    ("abcdef", "abcdef"): None,
    ("abcdef", "abcdeX"): (60, 50, ""),
    ("abcdef", "abcdeX", "abcdef"): (60, 50, "b"),
    ("abcdef", "abcdeX", "abcdeY"): (60, 50, ""),
    ("abcdef", "abcdef", "abcdeX", "abcdeX"): (60, 50, ""),
    ("abcdef", "abcdef", "abcdeX", "abcdeX", "abcdef"): (60, 50, "cd"),
    ("abcdefgh", "abcdefXY"): (70, 60, ""),  # the first one counts
    ("abcdefg", "abcdef"): None,
    ("abcdefg", "abcdef."): None,
    ("abcdeXg", "abcde.g", "abcdeXg"): None,  # one has missed it, and it is gone again
    ("abcdXf", "abcd.g", "abcdXf"): (60, 40, "b"),
    ("abcdeX", "abcde", "abcdef"): None,  # not yet known
    ("abcX", "abcd"): None,  # three in a row
    ("abcdX", "abcde"): (50, 40, ""),
    ("aaaaaaX", "aaaaaab"): None,  # frozen: one value
    ("aabbccdX", "aabbccde"): (80, 70, ""),
    ("abcdXfghi", "abcdYfghX"): (50, 40, ""),
    ("aXcdefgh", "aYcdefgX"): (80, 70, ""),  # apart long before, on purpose or not, and alike since
    ("pqrstu", "abcdef"): None,  # another model, whatever it is called
    ("abcdef", "abcdeX", "uvwxyz"): (60, 50, ""),  # who never was alike is believed nothing, and holds up nobody
    ("abcdef", "uvwxyz", "uvwxyZ"): (60, 50, ""),
    ("abc.efgX", "ab.defgh", ".bcdefgh"): (80, 70, "a"),  # each has missed one
    ("abcde.X", "abcdefg", "abcdefg"): (70, 50, "a"),
    ("abcdef",): None,
    (): None,
}


@pytest.mark.parametrize(("told", "expected"), CASES.items())
def test_which_nodes_diverged_and_since_when(told: tuple[str, ...], expected: tuple[int, int, str] | None) -> None:
    found = parted({NodeId("abcdefgh"[at]): held(words) for at, words in enumerate(told)})
    assert [(each.seen, each.agreed, "".join(each.wrong)) for each in found] == (
        [((1, 0, expected[0]), expected[1], expected[2])] if expected else []
    )


def test_a_node_that_is_new_is_not_asked_and_one_of_another_model_neither() -> None:
    old = {NodeId("a"): held("abcdefgh"), NodeId("b"): held("abcdefgX")}
    for other in (held("Z", first=8), held("pqrstuvw", model="n"), held("")):
        [found] = parted({**old, NodeId("c"): other})
        assert found.nodes == ("a", "b")
    assert parted({NodeId("a"): old[NodeId("a")], NodeId("c"): held("X", first=8)}) == []


def test_nodes_that_have_told_different_windows_are_compared_where_these_overlap() -> None:
    [found] = parted({NodeId("a"): held("abcdefgh"), NodeId("b"): held("cdefgX", first=3)})
    assert (found.agreed, found.seen) == (70, (1, 0, 80))
    assert parted({NodeId("a"): held("abcdefgh"), NodeId("b"): held("fghijk", first=6)}) == []


def test_in_each_pair_of_models_it_is_found() -> None:
    """Of the stages of a pipeline, say."""
    told = {NodeId(f"{model}{n}"): held("abcdeX" if n else "abcdef", model=model) for model in "pq" for n in (0, 1)}
    assert [each.nodes for each in parted(told)] == [("p0", "p1"), ("q0", "q1")]


@pytest.mark.parametrize(
    ("told", "replicas", "own"),
    [
        (("abcde", "abcde"), ["ab"], ""),
        (("abc", "abc"), [], ""),  # not yet
        (("abcde", "abcd."), ["ab"], ""),
        (("abcde", "pqrst"), [], ""),
        (("abcde", "pqrst", "abcde"), ["ac"], "b"),
        (("abcde", "pqr", "abcde"), ["ac"], ""),  # nor is it known that it is no replica
        (("abcde", "ppppp", "abcde"), ["ac"], ""),  # frozen
        (("abcde", "pqcde", "abcde"), ["ac"], ""),  # alike since
        (("abcdeX", "abcdef", "pqrstu"), ["ab"], "c"),  # apart
        (("abcde",), [], ""),
        ((), [], ""),
    ],
)
def test_which_nodes_are_known_as_replicas(told: tuple[str, ...], replicas: list[str], own: str) -> None:
    found, others = compared({NodeId("abcdefgh"[at]): held(words) for at, words in enumerate(told)})
    assert (["".join(each) for each in found], "".join(others)) == (replicas, own)


def test_what_is_compared_is_told() -> None:
    two = [["a", "b"], ["c", "d", "e"]]
    assert status_view.compared([], []) == ""
    assert status_view.compared(two[:1], []) == "replicas are compared across nodes: a and b"
    assert status_view.compared(two, ["f"]) == (
        "replicas are compared across nodes: 5 nodes, of 2 models; not f, which holds something else"
    )


A, B = NodeId("a"), NodeId("b")
APART = world(
    record=record(members=("a", "b")),
    nodes={A: node("a"), B: node("b")},
    status={A: status(held=held("abcdef")), B: status(held=held("abcdeX"))},
)


def test_the_suspicion_is_of_both_where_nobody_knows() -> None:
    found = nodes_apart(APART)
    assert [(each.node, each.onset, each.step, each.rank) for each in found] == [
        ("a", 51, 60, None),
        ("b", 51, 60, None),
    ]
    assert "the replicas on a and b hold different bits (they held the same at step 50)" in found[0].evidence


def test_it_is_as_old_as_who_leads_has_heard_it_for() -> None:
    """Whatever the nodes' clocks say."""
    ahead = replace(APART, status={A: replace(APART.status[A], at_s=NOW + 3600.0), B: APART.status[B]})
    assert {each.at_s for each in nodes_apart(replace(ahead, heard_s={A: NOW - 2.0, B: NOW - 1.0}))} == {NOW - 1.0}


@pytest.mark.parametrize(
    ("fields", "answered"),
    [
        ({"signature": "fingerprint_mismatch:nodes:1.0.60"}, True),
        ({"signature": "fingerprint_mismatch:nodes:1.1.60"}, False),
        (
            {"cause": "fingerprint_mismatch", "onset": Step(55), "open": True},
            True,
        ),  # the ranks go back behind it anyhow
        ({"cause": "fingerprint_mismatch", "onset": Step(55), "open": False}, False),  # and have
        ({"cause": "fingerprint_mismatch", "onset": Step(61), "open": True}, False),
        ({"cause": "rank_killed", "open": True}, False),
        ({"cause": "rank_killed", "onset": Step(51), "open": True}, True),
        ({"cause": "fingerprint_mismatch", "onset": Step(51), "open": True, "would": 1}, False),
    ],
)
def test_what_is_answered_is_not_suspected_again(fields: dict[str, object], answered: bool) -> None:
    assert bool(nodes_apart(replace(APART, incidents=(incident(1, **fields),)))) is not answered


def test_only_members_are_compared() -> None:
    assert nodes_apart(replace(APART, record=record(members=("a",)))) == []


def test_a_thousand_nodes_that_all_hold_something_else_are_no_replicas() -> None:
    told = {NodeId(f"n{n}"): held("abcde" + chr(1000 + n)) for n in range(1000)}
    assert parted(told) == []
    alike = {node: text if node in ("n1", "n2") else told[NodeId("n0")] for node, text in told.items()}
    [found] = parted(alike)
    assert found.wrong == ("n1", "n2")


def test_what_is_told_is_read_as_it_was() -> None:
    told = Held(model="m", words={(2, 1, 30): 2**48 - 1, (1, 0, 40): 0})
    assert Held.parse(str(told)) == told
    assert str(told) == f"m 1.0.40.0 2.1.30.{2**48 - 1}"


def test_so_many_have_to_be_alike() -> None:
    assert TRUSTED == 4, "as in the cases above"
