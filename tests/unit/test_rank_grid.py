"""What `status --watch` shows of each rank."""

from typing import Any

import pytest

from mt_resilient.resilience.model.types import NodeId, Step
from mt_resilient.resilience.report import rank_grid

from .worlds import NOW, A, gone, node, record, status, world

TIMES = {"attached_s": 1.0, "built_s": 2.0, "restored_s": 3.0, "stepped_s": 4.0}
ALL = (*TIMES,)


@pytest.mark.parametrize(
    ("said", "phase"),
    [
        ({}, "start"),
        (ALL[:1], "build"),
        (ALL[:2], "restore"),
        (ALL[:3], "step"),
        (ALL, "trains"),
        ({**TIMES, "paused": True}, "paused"),
        ({**TIMES, "finished": True}, "finished"),
        ({**TIMES, "generation": 7}, "stops"),
    ],
)
def test_the_phase_of_a_node_is_what_its_ranks_have_reached(said: Any, phase: str) -> None:
    given = said if isinstance(said, dict) else {name: TIMES[name] for name in said}
    (row,) = rank_grid.rows(world(status={A: status(**{"max_step": Step(9), **given})}), NOW)
    assert (row.phase, row.ranks) == (phase, (phase, phase))


def test_ranks_that_have_not_come_back_to_the_fault_replay() -> None:
    told = status(max_step=Step(9), **TIMES)
    (row,) = rank_grid.rows(world(status={A: told}, record=record(replay_until=Step(12))), NOW)
    assert row.phase == "replay"


def test_a_rank_that_is_gone_is_named_and_its_node_comes_first() -> None:
    members = ("a", "b")
    told = {NodeId(name): status(max_step=Step(9), **TIMES) for name in members}
    told[NodeId("b")] = status(exits=(gone(3),), **TIMES)
    seen = world(record=record(members=members), nodes={NodeId(name): node(name) for name in members}, status=told)
    rows = rank_grid.rows(seen, NOW)
    assert [row.node for row in rows] == ["b", "a"]
    assert rows[0].ranks == ("trains", "gone"), "rank 3 is the second one of node rank 1"
    assert rows[1].calm
