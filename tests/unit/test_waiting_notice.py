"""What is said while a node waits."""

from types import SimpleNamespace
from typing import Any

from mt_resilient.agent.loop.waiting_notice import AWAITS_S, Awaiting
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId

from .worlds import record


def test_each_thing_is_said_once_and_a_wait_only_when_it_has_lasted() -> None:
    said: list[str] = []
    telling: Any = SimpleNamespace(say=said.append)
    awaiting, on_a = Awaiting(NodeId("c"), telling), record(members=("a", "b"))
    for now_s, awaits in (
        (1.0, "for b"),
        (1.5 + AWAITS_S, "for b"),
        (2.0 + AWAITS_S, "for b"),
        (3.0 + AWAITS_S, "for d"),
    ):
        awaiting.look(awaits, None, now_s)
    assert said == ["for b"]
    awaiting.look("for d", on_a, 4.0 + 2 * AWAITS_S)
    awaiting.look("for d", on_a, 5.0 + 2 * AWAITS_S)
    awaiting.look("", record(Phase.ENDED, members=("a", "b")), 60.0)
    assert said == ["for b", "for d", "c stands by; the job is on a and b"]
