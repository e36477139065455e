"""Who trains, and in which node rank."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.membership import rank_assignment
from mt_resilient.resilience.membership.rank_assignment import NodesPolicy
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Quarantine, Seats
from mt_resilient.resilience.model.node import Spec
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId

from .worlds import NOW, incident, node, record, status, world


def cluster(members: str, there: str, sizes: tuple[int, ...] = (3,), spares: int = 0, **fields: object) -> World:
    """members, there: one letter a node; a capital is an agent that was started anew."""
    nodes = {NodeId(n.lower()): node(n.lower(), "anew" if n.isupper() else None) for n in there}
    spec = Spec(command=("torchrun",), sizes=sizes, spares=spares)
    return world(record=record(members=tuple(members), **fields), spec=spec, nodes=nodes)


def seated(found: Seats) -> str:
    return " ".join(found.members)


AGAIN = {
    # (members, who is there, allowed numbers) → who trains, who takes whose place, who is dropped, who joins, who is waited for
    ("abc", "abc", (3,)): ("a b c", "", "", "", ""),
    ("abc", "abcd", (3,)): ("a b c", "", "", "", ""),
    ("abc", "acd", (3,)): ("a d c", "b>d", "", "", ""),
    ("abc", "ade", (3,)): ("a d e", "b>d c>e", "", "", ""),
    ("abc", "ac", (3,)): ("a b c", "", "", "", "b"),
    ("abc", "ad", (3,)): ("a d c", "b>d", "", "", "c"),
    ("abc", "ac", (2, 3)): ("a c", "", "b", "", ""),
    ("abc", "a", (2, 3)): ("a b c", "", "", "", "b c"),
    ("abc", "a", (1, 2, 3)): ("a", "", "b c", "", ""),
    ("abcd", "abd", (2, 4)): ("a b", "", "c d", "", ""),
    ("abcd", "bde", (2, 4)): ("b d", "", "a c", "", ""),
    ("abcd", "de", (2, 4)): ("e d", "a>e", "b c", "", ""),
    ("ac", "abc", (2, 3)): ("a c b", "", "", "b", ""),
    ("ac", "abcde", (2, 4)): ("a c b d", "", "", "b d", ""),
    ("ac", "abc", (2, 4)): ("a c", "", "", "", ""),
    ("ac", "bc", (2, 3)): ("b c", "a>b", "", "", ""),
    ("ac", "bcd", (2, 3)): ("b c d", "a>b", "", "d", ""),
    ("a", "", (1,)): ("a", "", "", "", "a"),
    ("c", "ab", (3,)): ("a", "c>a", "", "", ""),  # so many were allowed once
}


@pytest.mark.parametrize(("case", "expected"), AGAIN.items())
def test_node_ranks_are_kept_taken_over_dropped_and_added(
    case: tuple[str, str, tuple[int, ...]], expected: tuple[str, str, str, str, str]
) -> None:
    found = rank_assignment.again(cluster(*case), NOW, settled_s=0.0)
    successors = " ".join(f"{gone}>{new}" for gone, new in found.successors.items())
    told = (seated(found), successors, *map(" ".join, (found.dropped, found.joined, found.missed)))
    assert told == expected


ALLOWED = {
    # (who is there, what became of starts: on 3 nodes that number was left (3-), one failed (3x), or steps were made (3+)) → allowed
    ("abc", ""): (1, 2, 3, 4),
    ("abc", "3-"): (1, 2, 4),
    ("abc", "3- 3x"): (1, 2, 4),
    ("abc", "3- 2-"): (1, 4),
    ("abc", "3- 2- 1-"): (3,),  # in turn, which was left longest ago
    ("abc", "3- 2- 1- 3-"): (2,),
    ("ab", "3- 2- 1-"): (2,),
    ("abcd", "3- 2- 1-"): (4,),
    ("", "3- 2- 1-"): (4,),
    ("abc", "3- 4+"): (1, 2, 4),
    ("abc", "3- 2+"): (1, 2, 4),
    ("abc", "3- 2x 2+"): (1, 2, 3, 4),  # it was something else
    ("abc", "4x 3- 4+"): (1, 2, 3, 4),
    ("abc", "3- 2- 1- 2+"): (1, 2, 3, 4),
    ("abc", "3- 2+ 2x 2+"): (1, 2, 3, 4),
    ("abc", "3- 2- 1- 2+ 3-"): (1, 2, 4),
    ("abc", "3- later 4+"): (1, 2, 3, 4),  # long ago
    ("abc", "3- later 2- 2x"): (1, 4),  # until steps are made, it is all one story
}


@pytest.mark.parametrize(("case", "expected"), ALLOWED.items())
def test_the_numbers_of_nodes_that_may_train(case: tuple[str, str], expected: tuple[int, ...]) -> None:
    story, at_s = [], NOW
    for word in case[1].split():
        if word == "later":
            at_s += 3600
            continue
        size = int(word[0])
        told = incident(len(story) + 1, at_s=at_s, size=size, started=word[1] == "+", unfit=size * (word[1] == "-"))
        story.append(told)
    judged = replace(cluster("abcd", case[0], (1, 2, 3, 4), trained=4), incidents=tuple(story), status={})
    assert rank_assignment.allowed(judged, at_s) == expected


def test_a_number_on_which_steps_are_made_is_allowed_at_once() -> None:
    left = tuple(incident(size, started=False, size=size, unfit=size) for size in (1, 2))
    judged = replace(cluster("ab", "ab", (1, 2), trained=3), incidents=left, status={})
    assert rank_assignment.left(judged, NOW) == (1, 2)
    assert rank_assignment.left(replace(judged, status={NodeId("a"): status(stepped_s=NOW)}), NOW) == ()
    assert rank_assignment.left(replace(judged, record=replace(judged.record, trained=2)), NOW) == ()  # type: ignore[type-var]


def test_from_a_number_that_is_not_allowed_any_more_a_job_grows_at_a_fault() -> None:
    """All had died, and with them what memory held; the command was given again for more."""
    assert seated(rank_assignment.again(cluster("c", "abc"), NOW)) == "c a b"
    assert seated(rank_assignment.again(cluster("c", "abc", (1, 3)), NOW)) == "c"


@pytest.mark.parametrize(
    ("members", "there", "fields", "expected"),
    [
        ("ab", "cd", {}, "a b"),  # both of the old ones may be at work, and nobody is there who would end their ranks
        ("ab", "bcd", {}, "c b"),
        ("ab", "Acd", {}, "a c"),  # its ranks have died with its agent
        ("ac", "cde", {"phase": Phase.GATHER, "new": ("c",), "left": ("b",)}, "a c"),
        (
            "ac",
            "bcd",
            {"phase": Phase.GATHER, "new": ("c",), "left": ("b",)},
            "b c",
        ),  # before a newcomer: it has been at work
        ("ab", "cd", {"phase": Phase.GATHER, "new": ("a", "b")}, "c d"),  # they have not begun
    ],
)
def test_of_more_nodes_than_are_expected_none_begin_by_themselves(
    members: str, there: str, fields: dict[str, Any], expected: str
) -> None:
    found = rank_assignment.again(cluster(members, there, (2,), **{"number": 2, **fields}), NOW)
    assert seated(found) == expected
    assert found.at_work == bool(found.missed)


def test_where_the_lease_ends_the_ranks_or_all_are_known_to_be_dead_others_begin() -> None:
    assert seated(rank_assignment.again(cluster("ab", "cd", (2,), 2), NOW)) == "c d"
    dead = cluster("ab", "cd", (2,))
    assert dead.spec
    assert dead.record
    dead = replace(dead, spec=replace(dead.spec, given_up=dead.record.number))
    assert seated(rank_assignment.again(dead, NOW)) == "c d"


def test_names_of_any_digits_are_in_some_order() -> None:
    assert sorted(["n10", "n1²", "n2"], key=rank_assignment.natural) == ["n1²", "n2", "n10"]


def test_a_node_with_a_new_agent_keeps_its_node_rank() -> None:
    assert rank_assignment.again(cluster("abc", "aBc"), NOW).members == {"a": "agent-a", "b": "anew", "c": "agent-c"}
    missed = rank_assignment.again(cluster("abc", "ac"), NOW)
    assert missed.members["b"] == "agent-b"  # as the record has it: it is waited for


def test_the_job_grows_by_those_that_have_been_there_for_a_while() -> None:
    fresh = cluster("ac", "abcd", (2, 3, 4))
    fresh = replace(fresh, since_s={NodeId("d"): NOW - 5})
    assert seated(rank_assignment.again(fresh, NOW, settled_s=60)) == "a c b"
    assert seated(rank_assignment.again(fresh, NOW, settled_s=0)) == "a c b d"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (("ac", "abcd", (2, 3, 4)), "a c"),
        (("ac", "bcd", (2, 3)), "b c"),  # a vacant place is taken
        (("a", "abc", (1, 3)), "a"),
    ],
)
def test_the_job_does_not_grow_at_a_fault(case: tuple[str, str, tuple[int, ...]], expected: str) -> None:
    """The memory of those that are left is that of so many nodes: with others, all states would come from disk."""
    assert seated(rank_assignment.again(cluster(*case), NOW)) == expected


BAD = Quarantine(reason="it computes wrongly", until_s=NOW + 1)


def test_a_quarantined_or_drained_node_does_not_train() -> None:
    shut = replace(cluster("abc", "abcd"), quarantine={NodeId("b"): BAD})
    assert seated(rank_assignment.again(shut, NOW)) == "a d c"
    assert seated(rank_assignment.again(shut, NOW + 2)) == "a b c"
    gone = cluster("abc", "abcd", dismissed=("agent-b",))
    assert seated(rank_assignment.again(gone, NOW, 60.0)) == "a d c"
    assert seated(rank_assignment.again(cluster("abc", "aBcd", dismissed=("agent-b",)), NOW)) == "a b c"


def test_a_node_that_failed_preflight_does_not_train_and_delays_no_start() -> None:
    here = cluster("", "abcd", (3,), 1)
    nodes = {**here.nodes, NodeId("b"): replace(here.nodes[NodeId("b")], fit="b is not fit: its clock is wrong")}
    found = rank_assignment.first(replace(here, record=None, nodes=nodes), NOW, NodesPolicy(join_s=60))
    assert found is not None
    assert seated(found) == "a c d"
    back = cluster("abc", "aBcd")
    nodes = {**back.nodes, NodeId("b"): replace(back.nodes[NodeId("b")], fit="b is not fit: its clock is wrong")}
    assert seated(rank_assignment.again(replace(back, nodes=nodes), NOW)) == "a d c"


FIRST = {
    # who is there, allowed numbers, spares, seconds since the last has joined → who trains
    ("ab", (3,), 0, 100): "",
    ("abc", (3,), 0, 0): "a b c",
    ("cba", (3,), 0, 0): "a b c",
    ("abcd", (3,), 0, 0): "a b c",
    ("abc", (3,), 1, 0): "",
    ("abc", (3,), 1, 61): "a b c",
    ("abcd", (3,), 1, 0): "a b c",
    ("ab", (2, 3), 0, 0): "",
    ("ab", (2, 3), 0, 61): "a b",
    ("a", (2, 3), 0, 61): "",
    ("abc", (2, 4), 0, 61): "a b",
    ("", (1,), 0, 0): "",
}


@pytest.mark.parametrize(("case", "members"), FIRST.items())
def test_the_first_members(case: tuple[str, tuple[int, ...], int, int], members: str) -> None:
    there, sizes, spares, quiet_s = case
    empty = cluster("", there, sizes, spares)
    since_s = dict.fromkeys(empty.nodes, NOW - quiet_s)
    found = rank_assignment.first(replace(empty, record=None, since_s=since_s), NOW, NodesPolicy(join_s=60))
    assert (seated(found) if found else "") == members


def test_names_are_sorted_as_people_do() -> None:
    names = ["node-10", "node-9", "node-1", "node", "10", "9", "a1b10", "a1b9"]
    assert sorted(names, key=rank_assignment.natural) == [
        "9",
        "10",
        "a1b9",
        "a1b10",
        "node",
        "node-1",
        "node-9",
        "node-10",
    ]


@pytest.mark.parametrize("bad", [{"spares": -1}, {"join_s": -1.0}, {"grow_after_s": -1.0}])
def test_a_policy_with_negative_values_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="nodes"):
        NodesPolicy(**bad)  # type: ignore[arg-type]


def test_a_gathering_generation_takes_the_place_of_one_who_is_gone() -> None:
    gathering = cluster("abc", "acd", phase=Phase.GATHER)
    assert seated(rank_assignment.again(gathering, NOW)) == "a d c"


def test_a_quarantined_node_trains_if_the_job_needs_it() -> None:
    """Its place was taken while there was somebody to take it; and it goes again when another one has come."""
    bad = {NodeId("b"): BAD}
    assert seated(rank_assignment.again(replace(cluster("adc", "abd"), quarantine=bad), NOW)) == "a d b"
    assert rank_assignment.without(replace(cluster("adc", "abd"), quarantine=bad), NOW).missed == (NodeId("c"),)
    assert seated(rank_assignment.again(replace(cluster("adb", "abd"), quarantine=bad), NOW)) == "a d b"
    assert seated(rank_assignment.again(replace(cluster("adb", "abcd"), quarantine=bad), NOW)) == "a d c"
    assert rank_assignment.again(replace(cluster("adc", "ab"), quarantine=bad), NOW).missed, "no use"


def test_a_drained_node_trains_on_if_its_successor_is_lost() -> None:
    assert seated(rank_assignment.again(cluster("ac", "ab", (2,), 1, dismissed=("agent-b",)), NOW)) == "a b"
    assert seated(rank_assignment.again(cluster("ab", "ab", (2,), 1, dismissed=("agent-b",)), NOW)) == "a b"
    assert seated(rank_assignment.again(cluster("ab", "abc", (2,), 1, dismissed=("agent-b",)), NOW, 60.0)) == "a c"
    shut = replace(cluster("ad", "abc", (2,), 2, dismissed=("agent-b",)), quarantine={NodeId("c"): BAD})
    assert seated(rank_assignment.again(shut, NOW)) == "a c", "rather who is shut out"


def test_no_more_excluded_nodes_train_than_the_job_needs() -> None:
    bad = {NodeId("b"): BAD, NodeId("c"): BAD}
    assert seated(rank_assignment.again(replace(cluster("ab", "abc", (2, 3)), quarantine=bad), NOW, 60.0)) == "a b", (
        "no growth"
    )
    both = cluster("abc", "abcd", (3,), 1, dismissed=("agent-b", "agent-c"))
    assert seated(rank_assignment.again(both, NOW, 60.0)) == "a b d", "one of them can go"


def test_a_quarantined_node_whose_ranks_may_still_train_takes_part() -> None:
    """Others would do, but nobody else ends its ranks. It is rather one whose agent is the same."""
    bad = {NodeId("a"): BAD, NodeId("b"): BAD}
    assert seated(rank_assignment.again(replace(cluster("ab", "Abcd", (1, 2)), quarantine=bad), NOW)) == "c b"
    alone = replace(cluster("ab", "Acd", (1, 2)), quarantine=bad)
    assert seated(rank_assignment.again(alone, NOW)) == "a c"


def test_at_a_fault_a_drained_node_that_is_present_stays_with_its_memory() -> None:
    """It goes when the ranks train, with their state on disk."""
    for there, after in (("abc", "a b"), ("abcd", "a b d")):
        drained = cluster("abc", there, (2, 3), 1, dismissed=("agent-c",))
        assert seated(rank_assignment.again(drained, NOW)) == "a b c"
        assert seated(rank_assignment.again(drained, NOW, struck={NodeId("c")})) == after
        assert seated(rank_assignment.again(drained, NOW, 60.0)) == after
    anew = cluster("abc", "abC", (2, 3), dismissed=("anew",))
    assert seated(rank_assignment.again(anew, NOW)) == "a b", "its memory is gone"


def test_a_job_that_is_started_again_begins_with_who_was_shut_out_where_nobody_else_comes() -> None:
    came_s = {NodeId("a"): NOW - 90, NodeId("b"): NOW}
    waits = replace(cluster("", "ab", (2,), 1), quarantine={NodeId("b"): BAD}, since_s=came_s)
    policy = NodesPolicy(join_s=60.0)
    assert rank_assignment.first(waits, NOW + 59, policy) is None
    found = rank_assignment.first(waits, NOW + 61, policy)
    assert found
    assert seated(found) == "a b"
