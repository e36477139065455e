"""The job at one moment in figures, and where its time goes."""

from dataclasses import replace

import pytest

from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.node import Copy, Spec
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, Step
from mt_resilient.resilience.report.overview import State, overview
from mt_resilient.resilience.report.time_ledger import Ledger, effective

from .worlds import NOW, A, B, incident, node, record, status, world


def steps(*numbers: int) -> tuple[Step, ...]:
    return tuple(map(Step, numbers))


def training(**fields: object) -> World:
    return world(status={A: status(min_step=10, max_step=10, alive=2, stepped_s=NOW - 5, **fields)})


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (training(), State.TRAINING),
        (world(), State.STARTING),
        (replace(training(), incidents=(incident(),)), State.RECOVERING),
        (replace(training(), incidents=(incident(open=False),)), State.TRAINING),
        (replace(training(), incidents=(incident(rung=0),)), State.TRAINING),
        (replace(training(paused=True), record=record(paused=True)), State.PAUSED),
        (replace(training(), record=record(paused=True)), State.TRAINING),
        (world(record=record(Phase.ENDED)), State.ENDED),
        (world(record=None, spec=Spec(command=("torchrun",), sizes=(2,))), State.WAITING),
    ],
)
def test_what_the_job_does(given: World, state: State) -> None:
    assert overview(given, NOW).state is state


def test_it_says_how_many_nodes_are_missing() -> None:
    spec = Spec(command=("torchrun",), sizes=(3, 4))
    assert overview(training(), NOW).missing == 0
    assert overview(world(record=None, spec=spec), NOW).missing == 2
    lost = world(record=record(Phase.GATHER, members=("a", "b")), spec=Spec(command=("torchrun",), sizes=(2,)))
    assert (overview(lost, NOW).state, overview(lost, NOW).missing) == (State.WAITING, 1)


def test_of_one_node_a_lost_node_costs_what_is_not_on_disk() -> None:
    told = overview(training(memory_steps=steps(8, 9), durable_steps=steps(4), certified_steps=steps(2, 4)), NOW)
    assert told.snapshots == {"memory": 9, "other node": -1, "disk": 4, "certified": 4}
    assert told.at_risk == {"a rank": 1, "a node": 6, "all nodes": 6}
    assert told.nodes == {"trains": 1}
    assert overview(training(), NOW).at_risk == {"a rank": 10, "a node": 10, "all nodes": 10}


def test_a_copy_counts_once_the_copies_of_all_members_lie_elsewhere() -> None:
    def copy(of: int, step: int) -> Copy:
        return Copy(node_rank=of, nodes=2, step=Step(step), generation=Generation(1), rewinds=0)

    def of(*copies_of_a: Copy) -> dict[str, int]:
        said = {"min_step": Step(10), "max_step": Step(10), "stepped_s": NOW - 5, "durable_steps": steps(2)}
        first, second = status(copies=(copy(1, 8),), **said), status(copies=copies_of_a, **said)
        nodes = {A: node("a"), B: node("b")}
        return overview(
            world(record=record(members=("a", "b")), nodes=nodes, status={A: first, B: second}), NOW
        ).at_risk

    assert of(copy(0, 8)) == {"a rank": 8, "a node": 2, "all nodes": 8}
    assert of() == of(copy(1, 8)) == of(copy(0, 6)) == {"a rank": 8, "a node": 8, "all nodes": 8}


def test_every_second_is_booked_once() -> None:
    ledger = Ledger()
    ledger.passed(5, State.STARTING, 0)
    ledger.passed(10, State.TRAINING, 2)
    ledger.passed(3, State.PAUSED, 2)
    assert {k: v for k, v in ledger.spent.items() if v} == {"first start": 5, "training": 8, "stall": 2, "paused": 3}
    assert effective(ledger.spent) == 8 / 15
    assert effective({}) == 0


def test_a_recovery_is_booked_by_phase_and_what_it_took_before_it_was_seen_is_owed() -> None:
    ledger = Ledger()
    ledger.passed(10, State.TRAINING, 0)
    ledger.passed(4, State.RECOVERING, 0)
    assert sum(ledger.spent.values()) == 10
    ledger.recovered({"detect": 1, "stop": 2, "replay": 2})
    assert ledger.spent["training"] == 10, "a counter never falls"
    ledger.passed(3, State.TRAINING, 0.5)
    assert {k: v for k, v in ledger.spent.items() if v} == {
        "training": 11.5,
        "stall": 0.5,
        "detect": 1,
        "stop": 2,
        "replay": 2,
    }
    assert sum(ledger.spent.values()) == 17


def test_a_wait_for_nodes_is_not_booked_as_stopping_too() -> None:
    ledger = Ledger()
    ledger.passed(9, State.WAITING, 0)
    ledger.passed(9, State.TRAINING, 0)
    ledger.passed(9, State.PAUSED, 0)
    ledger.spent = dict.fromkeys(ledger.spent, 0.0)
    ledger.passed(1, State.RECOVERING, 0)
    ledger.passed(20, State.WAITING, 0)
    ledger.passed(1, State.RECOVERING, 0)
    ledger.recovered({"stop": 21, "start": 1})
    assert {k: v for k, v in ledger.spent.items() if v} == {"waiting for nodes": 20, "stop": 1, "start": 1}


def test_what_a_recovery_took_beyond_its_phases_was_training() -> None:
    ledger = Ledger()
    ledger.passed(8, State.RECOVERING, 0)
    ledger.recovered({"restore": 3})
    assert {k: v for k, v in ledger.spent.items() if v} == {"restore": 3, "training": 5}
