"""Typed things → sentences."""

from dataclasses import replace

import pytest

from mt_resilient.resilience.model.cause import Cause
from mt_resilient.resilience.model.incident import PHASES, Incident
from mt_resilient.resilience.model.rewind import Origin
from mt_resilient.resilience.model.signals import Repeated
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.report import explain
from mt_resilient.resilience.text import formatting

from .worlds import incident

TOOK = {"detect": 0.004, "stop": 0.0316, "start": 1.0, "build": 2.5}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 ms"), (0.0004, "0 ms"), (0.0316, "32 ms"), (0.999, "999 ms"), (1, "1.00 s"), (61.239, "61.24 s")],
)
def test_seconds(value: float, text: str) -> None:
    assert formatting.seconds(value) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps")])
def test_steps(count: int, text: str) -> None:
    assert formatting.steps(count) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "rung 1, rewind in place"),
        (2, "rung 2, restart of the worker group"),
        (6, "rung 6, stop"),
        (9, "rung 9, unknown"),
    ],
)
def test_rungs(number: int, text: str) -> None:
    assert explain.rung(number) == text


def test_phases_come_in_their_order_however_they_were_told() -> None:
    told = incident(phases_s=dict(reversed(TOOK.items())))
    assert explain.phases(told) == "detect 4 ms · stop 32 ms · start 1.00 s · build 2.50 s"
    all_of_them = explain.phases(incident(phases_s=dict.fromkeys(reversed(PHASES), 1.0)))
    assert [words.split()[0] for words in all_of_them.split(" · ")] == list(PHASES)


def test_a_recovery_in_one_line() -> None:
    over = incident(at=10, resume_step=Step(9), launch="warm", phases_s={"step": 0.004}, open=False)
    assert (
        explain.recovered(over)
        == "recovered (rung 2, restart of the worker group, started warm): 1 step computed again; step 4 ms"
    )
    rewound = incident(rung=1, at=10, resume_step=Step(8), phases_s={"restore": 0.01}, open=False)
    assert explain.recovered(rewound) == "recovered (rung 1, rewind in place): 2 steps computed again; restore 10 ms"
    unheard = explain.recovered(replace(over, cause=Cause.AGENT_RESTARTED))
    assert "at least 1 step computed again" in unheard  # what the ranks did after the agent's death nobody has told
    same = explain.recovered(replace(over, repeated=Repeated.SAME))
    assert same.endswith("1 step computed again, with the same loss as before; step 4 ms")
    other = explain.recovered(replace(rewound, repeated=Repeated.OTHER, origin=Origin.TRANSIENT))
    assert "2 steps computed again, with another loss than before; restore 10 ms; it did not recur, but" in other
    assert other.endswith("or its snapshots lack a part of its state (docs/state.md lists what they hold)")


def test_the_story_of_a_restart() -> None:
    told = incident(
        at=10,
        resume_step=Step(9),
        evidence=("rank 0 on a was killed by signal 9", "also seen: rank 1 raised", "Traceback\n  line 1\n"),
        plan="start it again",
        launch="cold: no warm process yet",
        phases_s={"detect": 0.004},
        open=False,
    )
    assert explain.lines(told, "at noon", "3") == [
        "incident 3, at noon, generation 1: rank 0 on a was killed by signal 9",
        "  seen       also seen: rank 1 raised",
        "  seen       Traceback",
        "  seen         line 1",
        "  concluded  rank killed, answered by rung 2, restart of the worker group",
        "  done       start it again",
        "  went on    from step 9, ranks started cold: no warm process yet",
        "  took       detect 4 ms",
        "  cost       1 step computed again (the fault struck after step 10)",
    ]


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (incident(resume_step=Step(9)), "  went on    from step 9"),
        (incident(resume_step=Step(0)), "  went on    from step 0"),
        (incident(resume_step=Step(-1)), "  went on    from the job's beginning"),
        (incident(), "  went on    not yet"),
        (incident(open=False), "  went on    no: the job ended first"),
    ],
)
def test_where_the_job_went_on(told: Incident, line: str) -> None:
    assert line in explain.lines(told, "at noon", "1")


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (incident(rung=0, cause="cut_off", plan="look after it"), "it still lasts; look after it"),
        (incident(rung=0, cause="cut_off", plan="look after it", open=False), "it is over"),
        (incident(rung=0, cause="straggler", open=False), "it is over"),
        (incident(rung=0, cause="device_sick", plan="look after it", open=False), "look after it"),
        (
            incident(rung=0, cause="non_finite", plan="nothing is done while observing"),
            "it still lasts; nothing is done while observing",
        ),
        (incident(rung=6, cause="rank_hung", plan="end the job", open=False), "end the job"),
        (incident(), "the recovery is under way"),
        (incident(open=False), "the ranks did not reach a step: another fault or the end of the job came first"),
        (
            incident(open=False, phases_s={"step": 0.1}, resume_step=Step(9)),
            "recovered (rung 2, restart of the worker group): 1 step computed again; step 100 ms",
        ),
        (
            incident(
                rung=1,
                cause="non_finite",
                remedy="replay",
                origin="again",
                resume_step=Step(9),
                phases_s={"restore": 0.5},
                open=False,
            ),
            "in vain (rung 1, rewind in place): 1 step computed again; restore 500 ms; it recurred",
        ),
    ],
)
def test_the_outcome_of_an_incident(told: Incident, text: str) -> None:
    assert explain.outcome(told) == text


@pytest.mark.parametrize(("open_", "line"), [(True, "  now        it still lasts"), (False, "  now        it is over")])
def test_what_was_told_only_says_whether_it_is_over(open_: bool, line: str) -> None:
    assert line in explain.lines(incident(rung=0, cause="cut_off", open=open_), "at noon", "1")


@pytest.mark.parametrize(
    ("at", "text"), [(10, "after step 10"), (0, "after step 0"), (-1, "before the first reported step")]
)
def test_the_step_at_which_a_fault_struck(at: int, text: str) -> None:
    assert f"(the fault struck {text})" in explain.lines(incident(at=at), "at noon", "1")[-1]


def test_a_stop_has_no_cost_and_nothing_to_go_on_from() -> None:
    lines = explain.lines(incident(rung=6, plan="3 restarts in a row", open=False), "at noon", "1")
    assert [line.split()[0] for line in lines] == ["incident", "concluded", "done"]


@pytest.mark.parametrize(
    ("at", "resume", "lost"),
    [(10, 9, 1), (10, 10, 0), (10, 0, 10), (10, -1, 10), (10, None, 0), (-1, -1, 0), (4, 8, 0)],
)
def test_lost_steps(at: int, resume: int | None, lost: int) -> None:
    assert incident(at=at, resume_step=None if resume is None else Step(resume)).lost_steps == lost


def test_a_phase_is_told_once_and_never_negative() -> None:
    told = incident().with_phase("detect", -0.5).with_phase("detect", 7.0).with_phase("stop", 0.123456)
    assert told.phases_s == {"detect": 0.0, "stop": 0.1235}
