"""What thousands of nodes say at once is judged without looking through all for each, and told so that a store can keep it."""

import dataclasses

import pytest

from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.membership.buddy_sources import apart, fetchable, own
from mt_resilient.resilience.model.cause import Cause
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.node import Spec
from mt_resilient.resilience.model.signals import RankExit
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId, Step
from mt_resilient.resilience.store.codec import dumps

from .worlds import NOW, gone, incident, node, record, status

NODES = 3_000
NAMES = tuple(NodeId(f"n{number}") for number in range(NODES))
MOST_BYTES = 1_500_000
"""That etcd takes in one request."""


def world_of_all(**said: tuple[RankExit, ...]) -> World:
    """said: exits by node; all others are well."""
    return World(
        spec=Spec(command=("train",), sizes=(NODES,)),
        record=record(members=NAMES),
        nodes={name: dataclasses.replace(node(name), labels={"rack": name[:3]}) for name in NAMES},
        status={name: status(max_step=10, memory_steps=(Step(10),), exits=said.get(name, ())) for name in NAMES},
        acks={},
        incidents=(),
        requests=(),
    )


def raised(number: int) -> tuple[RankExit, ...]:
    words = f"RuntimeError: connection closed by {number}"
    return tuple(gone(8 * number + n, at_s=NOW - 2, code=1, error=words, started=True) for n in range(8))


def told(world: World) -> Incident:
    decision = decide(world, NOW, Policy())
    assert decision.record
    assert decision.record.phase is Phase.GATHER
    assert len(dumps(decision.record)) < MOST_BYTES
    [incident] = decision.incidents
    return incident


@pytest.mark.timeout(300)
def test_all_ranks_raise() -> None:
    """24,000 suspicions, each compared with all others, would take hours; told one by one they are megabytes, which etcd refuses."""
    incident = told(world_of_all(**{name: raised(number) for number, name in enumerate(NAMES)}))
    assert incident.cause == Cause.SCRIPT_RAISED
    assert len(dumps(incident)) < 10_000
    assert "also seen, as a consequence: 23,983 more" in incident.evidence
    [weighed] = incident.weighed
    assert weighed.ranks == ()


@pytest.mark.timeout(300)
def test_half_of_all_agents_are_lost() -> None:
    world = world_of_all()
    lost = dataclasses.replace(world, nodes={name: known for name, known in world.nodes.items() if name[-1] in "02468"})
    lost = dataclasses.replace(lost, spec=Spec(command=("train",), sizes=(NODES // 2, NODES)))
    incident = told(lost)
    assert incident.cause == Cause.AGENT_LOST
    assert len(incident.nodes) == NODES // 2
    assert "1,484 more" in incident.summary
    assert "1,484 more: 1500 nodes continue" in incident.plan
    assert len(dumps(incident)) < 100_000


@pytest.mark.timeout(300)
def test_whose_copy_lies_where_is_found_without_looking_through_all_for_each() -> None:
    world = world_of_all()
    assert own(world) == dict.fromkeys(NAMES, (Step(10),))
    assert fetchable(world) == {}
    assert len(apart(world)) < NODES


def test_what_nodes_have_said_is_looked_through_once_whatever_incidents_there_are_and_anew_when_they_say_more() -> None:
    judged = world_of_all(n7=raised(7))
    told = judged.with_incidents([incident(1)])
    assert judged.uncalm() == told.uncalm() == {NAMES[7]: judged.status[NAMES[7]]}
    assert told.with_incidents([incident(2)]).uncalm() is told.uncalm()
    once = told.statuses()
    assert told.with_incidents([incident(2)]).statuses() is once
    calm = dataclasses.replace(told, status=world_of_all().status)
    assert (calm.uncalm(), len(calm.statuses())) == ({}, NODES)
