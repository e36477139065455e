"""What an agent does that comes to a job, as a table of what it finds."""

from __future__ import annotations

from typing import Any

import pytest

from mt_resilient.agent.join.admission import Course, Found, course
from mt_resilient.resilience.model.node import Spec
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, NodeId, Step

from .worlds import incident, node, record

HERE = NodeId("c")
OTHERS = {NodeId("d"): node("d")}
CUT_OFF = tuple(incident(n, 3, cause="cut_off", nodes=(NodeId(name),)) for n, name in enumerate("ab", 1))


def found(**what: Any) -> Found:
    """Of generation 3, on a and b; ours is c, and there is d."""
    spec = Spec(
        command=("torchrun",),
        sizes=(2,),
        **{k: Generation(what.pop(k)) for k in ("first_generation", "given_up") if k in what},
    )
    last = {"record": record(what.pop("phase"), 3, ("a", "b"), **what.pop("said", {}))} if "phase" in what else {}
    return Found(**{"known": spec, "record": None, "others": {}, "incidents": (), "just": False, **last, **what})


THROUGH = {"phase": Phase.ENDED, "said": {"complete": True, "replay_until": Step(40)}}
TABLE = [
    (found(), Course.BEGIN),
    (found(others=OTHERS, just=True), Course.JOIN),
    (found(phase=Phase.RUN, others=OTHERS), Course.JOIN),
    (found(phase=Phase.RUN), Course.ALL_DEAD),
    (found(phase=Phase.RUN, just=True), Course.ALL_DEAD),  # it has just begun, and all have died
    (found(phase=Phase.RUN, just=True, given_up=3), Course.JOIN),
    (found(phase=Phase.RUN, given_up=3), Course.ALL_DEAD),  # who has said so has left
    (found(phase=Phase.RUN, incidents=CUT_OFF), Course.JOIN),
    (
        found(phase=Phase.RUN, incidents=CUT_OFF[:1]),
        Course.JOIN,
    ),  # the other one led, and nobody was there to tell that it is, too
    (found(phase=Phase.ENDING, others=OTHERS), Course.LEAVERS),
    (found(phase=Phase.ENDED), Course.NEXT_LIFE),
    (found(phase=Phase.ENDED, first_generation=4), Course.NEXT_LIFE),  # who has begun it has left
    (found(phase=Phase.ENDED, first_generation=4, just=True), Course.JOIN_LIFE),
    (found(phase=Phase.ENDED, first_generation=4, others=OTHERS), Course.JOIN_LIFE),
    (found(**THROUGH), Course.DONE),
    (found(**THROUGH, others=OTHERS), Course.DONE),
    (found(**THROUGH, first_generation=4, others=OTHERS), Course.JOIN_LIFE),
]


@pytest.mark.parametrize(("there", "expected"), TABLE)
def test_what_an_agent_does_follows_from_what_it_finds(there: Found, expected: Course) -> None:
    assert course(there, HERE, several=True, finished=False, kept=40) is expected


def test_a_job_continues_if_its_last_state_is_not_on_disk() -> None:
    assert course(found(**THROUGH), HERE, several=True, finished=False, kept=39) is Course.NEXT_LIFE
    assert course(found(**THROUGH), HERE, several=True, finished=False, kept=-1) is Course.DONE, (
        "the script keeps its own"
    )
    assert course(found(**THROUGH), HERE, several=True, finished=True, kept=39) is Course.DONE
    assert course(found(**THROUGH), HERE, several=False, finished=False, kept=40) is Course.NEXT_LIFE


def test_a_member_that_returns_knows_that_its_own_ranks_are_dead() -> None:
    there = found(phase=Phase.RUN, incidents=CUT_OFF)
    assert course(there, NodeId("a"), several=True, finished=False, kept=-1) is Course.ALL_DEAD


@pytest.mark.parametrize(("members", "expected"), [("ab", Course.JOIN), ("a", Course.ALL_DEAD)])
def test_a_command_for_one_node_may_find_other_members_training(members: str, expected: Course) -> None:
    there = found(record=record(Phase.RUN, 3, tuple(members)), incidents=CUT_OFF)
    assert course(there, HERE, several=False, finished=False, kept=-1) is expected
