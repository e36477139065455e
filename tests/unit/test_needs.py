"""What `explain` says first: the cause, whom it is blamed on, what it cost, and what to do."""

from typing import Any

import msgspec
import pytest

from mt_resilient.resilience.model.signals import Repeated
from mt_resilient.resilience.model.types import NodeId, Rank, Step
from mt_resilient.resilience.report.json_outputs import IncidentObject, incident_object
from mt_resilient.resilience.report.needs import needs, told
from mt_resilient.resilience.store.codec import printed

from .worlds import incident

RECOVERED: dict[str, Any] = {"open": False, "resume_step": Step(8), "phases_s": {"detect": 0.5, "step": 2.0}}


@pytest.mark.parametrize(
    ("fields", "cost", "act"),
    [
        (RECOVERED, "2 steps computed again, 2.50 s", "nothing"),
        ({}, "not known yet: 0 steps computed again, 0 ms so far", "nothing yet: the job recovers by itself"),
        (
            {**RECOVERED, "repeated": Repeated.OTHER},
            "2 steps computed again",
            "see why the same steps gave another loss",
        ),
        (
            {**RECOVERED, "rung": 1, "remedy": "continue"},
            "2 steps",
            "look at the curve of the loss. If it is as expected, as with other data, do nothing. If it is bad",
        ),
        ({"rung": 0, "cause": "straggler"}, "nothing so far", "look at what else runs on that node"),
        ({"rung": 0, "cause": "straggler", "open": False}, "nothing so far", "nothing"),
        ({"rung": 6, "cause": "script_raised", "open": False}, "the job ended", "read the traceback"),
        ({"rung": 6, "cause": "a cause of a newer version", "open": False}, "the job ended", "correct the cause"),
    ],
)
def test_a_person_reads_first_what_it_cost_and_what_to_do(fields: dict[str, Any], cost: str, act: str) -> None:
    found = needs(incident(**fields))
    assert found.cost.startswith(cost)
    assert found.act.startswith(act)
    lines = told(incident(**fields), "at noon", "3")
    assert [line.split()[0] for line in lines[1:6]] == ["cause", "blamed", "cost", "to", "evidence:"]


def test_the_blamed_are_named() -> None:
    assert needs(incident(ranks=(Rank(3),), nodes=(NodeId("a"),))).blamed == "rank 3 on node a"
    assert "nobody is known to be" in told(incident(), "at noon", "3")[2]


def test_the_object_for_other_programs_has_all_of_it() -> None:
    given = incident(**RECOVERED)
    text = printed(incident_object("3", given))
    known = msgspec.json.decode(text, type=IncidentObject)
    assert (known.incident, known.number, known.result, known.seconds, known.lost_steps) == (
        given,
        "3",
        "recovered",
        2.5,
        2,
    )
