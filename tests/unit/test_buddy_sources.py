"""Which copies in other nodes' memory are of use, and what a node does about its own."""

import os
from dataclasses import replace

import pytest

from mt_resilient.agent.buddy.buddy_client import Copies
from mt_resilient.checkpoint.arena.arena import Slot, State
from mt_resilient.checkpoint.arena.slot_header import Header, Stamp, overwrite_order
from mt_resilient.checkpoint.durable.save_interval import CopiesPolicy
from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.membership import buddy_sources
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Source
from mt_resilient.resilience.model.node import AckKind, Copy, NodeStatus
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, NodeId, Step
from mt_resilient.resilience.plan import recoverable_state
from mt_resilient.resilience.plan.resume_point import common

from .worlds import NOW, ack, node, record, status, world

ABC = ("a", "b", "c")


def copied(node_rank: int, step: int, *, nodes: int = 3, generation: int = 1, rewinds: int = 0) -> Copy:
    return Copy(node_rank=node_rank, nodes=nodes, step=Step(step), generation=Generation(generation), rewinds=rewinds)


def told(rank: int, steps: tuple[int, ...] = (), *, course: tuple[int, int] = (1, 0), **fields: object) -> NodeStatus:
    """Of the node with that rank of three."""
    held = {"memory_steps": tuple(map(Step, steps)), "courses": (course,) * len(steps)}
    return status(2, seat=(rank, 3) if steps else (), **{**held, **fields})


def gathered(*said: NodeStatus, members: tuple[str, ...] = ABC, **changes: object) -> World:
    """`c` has taken the place of a node that is lost, and all are ready."""
    names = [NodeId(name) for name in members]
    ready = {name: replace(ack(AckKind.READY, 2, name), port=29500) for name in names}
    return world(
        record=record(Phase.GATHER, 2, members),
        nodes={name: replace(node(name), copies_port=4) for name in names},
        status=dict(zip(names, said, strict=True)),
        acks=ready,
        **changes,
    )


@pytest.mark.parametrize(
    ("a", "b", "c", "steps"),
    [
        (told(0, (9, 12)), told(1, (9, 12), copies=(copied(2, 9),)), told(2), {9}),
        (told(0, (9, 12), copies=(copied(2, 12),)), told(1, (9, 12), copies=(copied(2, 9),)), told(2), {9, 12}),
        (told(0, (9,)), told(1, (9,), copies=(copied(1, 9),)), told(2), set()),  # its own guest's, and it has that
        (told(0, (9,)), told(1, (9,), copies=(copied(2, 9, nodes=4),)), told(2), set()),  # of other ranks
        (told(0, (9,)), told(1, (9,), copies=(copied(2, 9, rewinds=1),)), told(2), set()),  # of another course
        (told(0, (9,)), told(1, (9,), course=(1, 1), copies=(copied(2, 9),)), told(2), set()),  # whose is it?
        (told(0, (12,)), told(1, (12,), copies=(copied(2, 9),)), told(2), set()),  # nobody holds that step itself
        (told(0, (9,)), told(1, (9,), copies=(copied(2, 9),)), told(2, unfetched=((1, 0, 9),)), set()),
        (
            told(0, (9,)),
            told(1, (9,), copies=(copied(2, 9),)),
            told(2, unfetched=((1, 1, 9),)),
            {9},
        ),  # of another course
        (told(0, (9,)), told(1, (9,), copies=(copied(2, 9),)), told(2, (9,)), set()),  # it has it
        (told(0, (9,)), told(1, (9,)), told(2, copies=(copied(2, 9),)), set()),  # a holder is another
    ],
)
def test_a_copy_counts_where_it_is_of_the_course_that_others_hold(
    a: NodeStatus, b: NodeStatus, c: NodeStatus, steps: set[int]
) -> None:
    there = gathered(a, b, c)
    found = buddy_sources.fetchable(there)
    all_have = common(recoverable_state.said(there))
    assert {each[-1] for each in found.get(NodeId("c"), {}) if each in all_have} == steps
    assert not found.keys() - {"c"}


def test_who_takes_no_part_gets_none_back() -> None:
    there = gathered(told(0, (9,)), told(1, (9,), copies=(copied(2, 9),)), told(2))
    assert buddy_sources.fetchable(there)
    assert not buddy_sources.fetchable(replace(there, nodes={**there.nodes, NodeId("c"): node("c")}))


def test_memory_of_other_ranks_or_of_an_agent_that_is_gone_is_not_its_own() -> None:
    there = gathered(told(0, (9,)), replace(told(1, (9,)), seat=(2, 3)), told(2, (9,)))
    there = replace(there, nodes={**there.nodes, NodeId("c"): node("c", "another agent")})
    assert buddy_sources.own(there) == {"a": (9,), "b": ()}


def test_the_job_goes_on_from_what_survivors_and_copies_have_in_common() -> None:
    said = told(0, (9, 12)), told(1, (9, 12), copies=(copied(2, 9),)), told(2)
    decision = decide(gathered(*said), NOW, Policy())
    assert decision.record
    assert decision.record.resume_step == 9
    assert decision.record.sources == {"c": Source(holder=NodeId("b"), generation=Generation(1), rewinds=0)}
    assert decision.reason == "step 9 from memory, c's part from b"


def test_which_node_holds_the_copies_of_which() -> None:
    four = record(members=("a", "b", "c", "d"))
    assert [buddy_sources.holder(four, NodeId(name)) for name in "abcd"] == ["c", "d", "a", "b"]
    assert buddy_sources.holder(four, NodeId("e")) is None
    assert buddy_sources.holder(record(), NodeId("a")) is None
    assert buddy_sources.holder(replace(four, holders={NodeId("a"): NodeId("b")}), NodeId("a")) == "b"


def test_nodes_of_one_rack_do_not_hold_each_others() -> None:
    there = gathered(*(told(n, (9,)) for n in range(4)), members=("a", "b", "c", "d"))
    assert buddy_sources.apart(there) == {}
    racks = dict(zip("abcd", ("r1", "r2", "r1", "r2"), strict=True))
    there = replace(there, nodes={n: replace(r, labels={"rack": racks[n]}) for n, r in there.nodes.items()})
    found = replace(record(members=("a", "b", "c", "d")), holders=buddy_sources.apart(there))
    assert all(racks[name] != racks[str(buddy_sources.holder(found, NodeId(name)))] for name in "abcd")
    alone = gathered(told(0, (9,)), members=("a",))
    assert (
        buddy_sources.apart(
            replace(alone, nodes={n: replace(r, labels={"rack": "r1"}) for n, r in alone.nodes.items()})
        )
        == {}
    )


# In a node's memory


def header(step: int, *, marked: bool = False, **fields: object) -> Header:
    return Header(state=State.SEALED, generation=1, step=step, rank=0, world=2, marked=marked, **fields)  # type: ignore[arg-type]


def test_the_two_newest_that_are_marked_go_last() -> None:
    row = [header(10, marked=True), header(20, marked=True), header(30, marked=True), header(31), header(32)]
    assert overwrite_order(row) == [0, 3, 1, 2]
    assert overwrite_order([replace(each, marked=False) for each in row], 100) == [
        1,
        2,
        3,
        0,
    ]  # the ring's is the oldest


def test_what_is_held_is_whole_and_of_one_node() -> None:
    held = Copies(2, "127.0.0.1", "5eed" * 16, CopiesPolicy())
    rows = [[Slot(path) for path in row] for row in held.config["guests"]]  # type: ignore[attr-defined]

    def keep(row: int, slot: int, rank: int, step: int) -> None:
        wanted = Header(generation=1, step=step, rank=rank, world=8, payload_bytes=4092)
        rows[row][slot].begin(wanted, b"{}")
        rows[row][slot].seal()
        rows[row][slot].release()

    keep(0, 0, 4, 10)
    assert held.held() == ()  # the other rank's part is on its way
    keep(1, 0, 5, 10)
    assert held.held() == (copied(2, 10, nodes=4),)
    keep(0, 1, 6, 20)
    keep(1, 1, 5, 20)
    assert held.held() == (copied(2, 10, nodes=4),)  # of two nodes
    held.forget(lambda stamp: stamp.step > 5)
    assert held.held() == ()
    assert str(os.getpid()) in held.config["guests"][0][0]  # type: ignore[index]


def asked(paced: Copies, start: int, stop: int, takes: int) -> list[int]:
    """When a snapshot was asked for, second by second, if each copy takes so long."""
    found: list[int] = []
    for now in range(start, stop):
        if found and now == found[-1] + takes:
            paced.heard({"event": "replicated", "seconds": float(takes)})
        if paced.due(now):
            found.append(now)
    return found


def test_the_next_one_waits_for_twice_as_long_as_a_copy_takes() -> None:
    paced = Copies(1, "127.0.0.1", "5eed" * 16, CopiesPolicy(every_s=10))
    assert asked(paced, 100, 131, takes=1) == [100, 110, 120, 130]
    paced.begin()
    assert asked(paced, 131, 180, takes=8) == [131, 141, 157, 173]
    never = Copies(1, "127.0.0.1", "5eed" * 16, CopiesPolicy(every_s=0))
    assert not never.due(1e9)


def test_no_other_one_is_asked_for_while_a_copy_is_on_its_way() -> None:
    """Ranks keep the two newest that are marked: of a third one the copy that is there would be of no use."""
    paced = Copies(1, "127.0.0.1", "5eed" * 16, CopiesPolicy(every_s=2, hold_s=60))
    assert asked(paced, 0, 100, takes=25) == [0, 25, 75]
    paced.begin()
    assert asked(paced, 200, 450, takes=1000) == [200, 320, 440], "it may never come"


def test_what_could_not_be_had_is_told() -> None:
    asked = Copies(1, "127.0.0.1", "5eed" * 16, CopiesPolicy())
    asked.fetching = nine = Stamp(1, 0, 9)
    asked.heard({"event": "died"})
    assert (asked.fetching, asked.unfetched) == (nine, [])
    asked.heard({"event": "not fetched"})
    assert (asked.fetching, asked.unfetched) == (None, [nine])


@pytest.mark.parametrize("wrong", [{"every_s": -1.0}, {"stall_s": 0.0}, {"hold_s": 0.0}])
def test_a_policy_that_cannot_be_meant(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="cannot be negative, and"):
        CopiesPolicy(**wrong)
