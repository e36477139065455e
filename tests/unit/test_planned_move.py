"""Changes of nodes that nobody is forced to: what is waited for, and for how long."""

from dataclasses import replace

import pytest

from mt_resilient.resilience.decide import planned_move
from mt_resilient.resilience.decide.planned_move import AGAIN_S, SAVE_S, Move
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.node import Spec
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.plan import recoverable_state

from .worlds import NOW, A, B, node, record, status, world

POLICY = Policy()
GROWS = Spec(command=("torchrun",), sizes=(1, 2))


def cluster(
    waited_s: float, *, saved: bool = False, storage: bool = True, unsaved: str = "", drained: bool = False
) -> World:
    """One node at work and one that has come; or two, one of which is drained."""
    told = status(
        max_step=10,
        min_step=10,
        stepped_s=NOW - 80,
        paused=True,
        storage=storage,
        unsaved=unsaved,
        durable_steps=(Step(10),) if saved else (),
    )
    members = ("a", "b") if drained else ("a",)
    fields = {"dismissed": ("agent-b",)} if drained else {}
    return world(
        spec=GROWS,
        record=record(members=members, moving="so", moving_s=NOW - waited_s, **fields),
        nodes={A: node("a"), B: node("b")},
        status={A: told, B: told} if drained else {A: told},
        since_s={B: NOW - 1000},
    )


@pytest.mark.parametrize("drained", [False, True])
def test_the_state_is_waited_for(drained: bool) -> None:
    """Its save may take long; without it steps would be lost."""
    in_place_s = POLICY.recovery.in_place_s
    late = Move.GO if drained else Move.LATE
    for waited_s, what, expected in (
        (1.0, {"saved": True}, Move.GO),
        (in_place_s + 1, {}, Move.WAIT),
        (SAVE_S - 1, {}, Move.WAIT),
        (SAVE_S + 1, {"saved": True}, Move.GO),
        (SAVE_S + 1, {}, late),
        (in_place_s - 1, {"storage": False}, Move.WAIT),
        (in_place_s + 1, {"storage": False}, late),
        (in_place_s - 1, {"unsaved": "it has a lambda"}, Move.WAIT),
        (in_place_s + 1, {"unsaved": "it has a lambda"}, late),
    ):
        judged = cluster(waited_s, drained=drained, **what)  # type: ignore[arg-type]
        assert planned_move.move(judged, NOW, POLICY)[0] is expected, (waited_s, what)


def test_the_state_is_that_at_which_the_ranks_wait() -> None:
    """Not the one that this generation began with: they have gone back behind it, in place. Before the first step, there is none."""
    waits = cluster(1.0, saved=True)
    assert waits.record
    behind = replace(waits, record=replace(waits.record, resume_step=Step(12)))
    assert recoverable_state.saved(behind)
    fresh = cluster(1.0)
    first = replace(fresh, status={A: replace(fresh.status[A], max_step=-1, min_step=-1)})
    assert recoverable_state.saved(first)
    assert first.record
    assert not recoverable_state.saved(replace(first, record=replace(first.record, resume_step=Step(12))))


def test_a_growth_whose_state_has_not_come_to_the_disk_is_not_tried_again_at_once() -> None:
    late = cluster(SAVE_S + 1)
    dropped = planned_move.begun(late, NOW, POLICY)
    assert dropped.reason.endswith("their state did not reach the disk")
    assert dropped.record
    told = {A: replace(late.status[A], paused=False)}
    after = replace(late, record=dropped.record, status=told)
    assert planned_move.move(after, NOW, POLICY)[0] is Move.NONE
    assert planned_move.move(after, NOW + AGAIN_S, POLICY)[0] is Move.BEGIN


@pytest.mark.parametrize("waited_s", [5.0, SAVE_S - 1, SAVE_S + 1])
def test_one_that_has_gone_again_may_come_back_at_once(waited_s: float) -> None:
    """Also where their state had not come to the disk yet."""
    alone = replace(cluster(waited_s), nodes={A: node("a")})
    dropped = planned_move.begun(alone, NOW, POLICY)
    assert dropped.record
    assert "disk" not in dropped.reason
    assert (dropped.record.moving, dropped.record.moving_s) == ("", 0.0)
