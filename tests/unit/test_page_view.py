"""What the page of `mt-resilient dashboard` says, and whether a person must act."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.types import NodeId, Step
from mt_resilient.resilience.report import page_view
from mt_resilient.resilience.report.page_view import NO_AGENT, Seen

from .worlds import incident

NOW = 10_000.0
LINE = {"at_s": NOW - 1, "state": "training", "step": 70, "step_s": 0.25, "etcd_s": 0.002, "nodes": {"trains": 2}}
OVER = incident(at_s=NOW - 60, resume_step=Step(8), phases_s={"step": 2.0}, open=False)
UNCURED = incident(2, rung=1, cause="loss_divergence", remedy="continue", resume_step=Step(8), open=False)
NODE = {"several": True}
STORM = [replace(OVER, id=f"{number:04d}", nodes=(NodeId("gpu-05"),)) for number in range(6)]
SPREAD = [replace(each, nodes=(NodeId(f"gpu-{number}"),)) for number, each in enumerate(STORM)]
SLOW = incident(3, rung=0, cause="straggler", summary="rank 3 is slow")


def said(
    *incidents: Incident, end: dict[str, Any] | None = None, start: dict[str, Any] | None = None, **given: Any
) -> tuple[str, str, str]:
    outside = {"alive": True, "finished": False}
    outside |= {
        name: given.pop(name) for name in ("alive", "finished", "gone", "launched", "stepped_s") if name in given
    }
    last: dict[str, dict[str, Any]] = {"start": {"at_s": 0.0, **(start or {})}, "bad": {"sentence": "the disk is full"}}
    if written := given.pop("written", None):
        last["written"] = {"at_s": written[0], "event": {"event": written[1], "reason": "it is full."}}
    last |= {} if given.pop("silent", False) else {"progress": {**LINE, **given}}
    last |= {"end": {"at_s": NOW, **end}} if end else {}
    numbered = {str(number): each for number, each in enumerate(incidents, 1)}
    told = page_view.state(Seen(**outside, last=last, incidents=numbered), NOW)
    return told["mood"], told["words"], told["act"]


NOTHING = "Nothing to do."


@pytest.mark.parametrize(
    ("told", "mood", "words", "act"),
    [
        (said(), "good", "Training: step 70, 250 ms a step", NOTHING),
        (said(OVER), "good", "Training: step 70, 250 ms a step", NOTHING),
        (
            said(UNCURED),
            "warn",
            "Training: step 70",
            "Incident 1 was not cured: rank 0 on a was killed by signal 9. Look at the loss. If it is bad: mt-resilient rewind",
        ),
        (said(UNCURED, OVER), "good", "Training: step 70", NOTHING),
        (
            said(replace(UNCURED, at_s=NOW - 90), OVER),
            "warn",
            "Training: step 70",
            "Incident 1 was not cured: rank 0 on a was killed by signal 9. Look at the loss. If it is bad: mt-resilient rewind",
        ),
        (
            said(SLOW),
            "warn",
            "Training: step 70",
            "Incident 1 lasts: rank 3 is slow. Look at what else runs on that node",
        ),
        (
            said(*STORM),
            "warn",
            "Training",
            "Too many recoveries: 6 within an hour, of which 6 of the cause rank killed, and 6 began on gpu-05. Check that machine",
        ),
        (said(*STORM, nodes={"trains": 1}), "warn", "Training", "See what they have in common: mt-resilient explain;"),
        (said(*STORM[1:]), "good", "Training", NOTHING),
        (
            said(*SPREAD),
            "warn",
            "Training",
            "of the cause rank killed. See what they have in common: mt-resilient explain;",
        ),
        (said(*(replace(i, at_s=NOW - 4000) for i in STORM)), "good", "Training", NOTHING),
        (said(snapshots={"certified": (7, NOW - 14_000)}), "good", "Training", NOTHING),
        (
            said(snapshots={"certified": (7, NOW - 15_000)}),
            "warn",
            "Training",
            "No new stable snapshot for 4.2 h (the newest is that of step 7)",
        ),
        (said(snapshots={"certified": (-1, 0.0)}, start={"at_s": NOW - 15_000}), "warn", "Training", "(there is none)"),
        (said(snapshots={"certified": (-1, 0.0)}), "good", "Training", NOTHING),
        (
            said(snapshots={"other node": (7, NOW - 3000)}),
            "warn",
            "Training",
            "No new copy on another node for 50.0 min (the newest is that of step 7): the loss of a node would go back that far.",
        ),
        (said(snapshots={"other node": (7, NOW - 2000)}), "good", "Training", NOTHING),
        (said(snapshots={"other node": (-1, 0.0)}, nodes={"trains": 1}), "good", "Training", NOTHING),
        (
            said(snapshots={"other node": (-1, 0.0)}, start={"configuration": {"copies.every_s": 0.0}}),
            "good",
            "Training",
            NOTHING,
        ),
        (
            said(etcd_s=None),
            "warn",
            "Training",
            "etcd does not answer: training goes on, but no fault can be answered.",
        ),
        (said(quarantined=1), "warn", "Training", "Nodes in quarantine: 1."),
        (said(spares=1), "warn", "Training", "No spare is left"),
        (
            said(written=(9, "failed")),
            "warn",
            "Training",
            "The last snapshot could not be written to disk: it is full.",
        ),
        (said(written=(9, "durable")), "good", "Training", NOTHING),
        (said(written=(9, "failed"), start={"at_s": 10.0}), "good", "Training", NOTHING),
        (said(spares=1, nodes={"trains": 2, "stands by": 1}), "good", "Training", NOTHING),
        (
            said(incident(at_s=NOW - 9), state="recovering"),
            "warn",
            "Not training yet, recovering for 9.0 s: rank 0",
            "Nothing to do yet",
        ),
        (said(state="starting", step=-1), "info", "Starting", NOTHING),
        (
            said(replace(OVER, open=True, nodes=(NodeId("gpu-11"),)), state="waiting for nodes"),
            "bad",
            "Not training: waiting for nodes for 60.0 s, at step 70",
            "Lost: gpu-11.",
        ),
        (
            said(state="waiting for nodes"),
            "bad",
            "Not training: waiting for nodes, at step 70",
            "Start the missing nodes",
        ),
        (said(state="paused"), "info", "Paused at step 70", "mt-resilient resume"),
        (said(at_s=NOW - 900), "warn", "Silent: the last word is 15.0 min old", "mt-resilient status"),
        (said(at_s=NOW - 900, alive=False), "bad", "Not training: its agent is gone", "Give the same command again"),
        (said(alive=False), "good", "Training", NOTHING),  # the agents of a hostfile run on other machines
        (
            said(replace(OVER, rung=6, summary="the disk is full"), alive=False, end={"code": 93}),
            "bad",
            "Not training: the job has stopped with exit code 93",
            "Why: the disk is full. Correct the cause, and give the same command again.",
        ),
        (
            said(replace(OVER, rung=6), alive=False, end={"code": 93}),
            "bad",
            "exit code 93 after step 70",
            "Why: rank 0 on a was killed by signal 9; the disk is full. Correct the cause, and give the same command again.",
        ),
        (said(alive=False, end={"code": 93}), "bad", "exit code 93 after step 70", "the disk is full"),
        (said(alive=False, end={"code": 130}), "info", "ended by Ctrl-C after step 70", "Give the same command again"),
        (said(alive=False, finished=True, end={"code": 0}), "good", "Finished after step 70", NOTHING),
        (said(end={"code": 93}), "good", "Training", NOTHING),  # it has been started again
        (
            said(stepped_s=NOW - 700),
            "warn",
            "No step for 11.7 min, at step 70; the agent says: training",
            "logs/stacks-",
        ),
        (said(stepped_s=NOW - 700, step_s=40.0), "good", "Training", NOTHING),
        (said(stepped_s=NOW - 700, state="paused"), "info", "Paused", "mt-resilient resume"),
        (
            said(stepped_s=NOW - 700, state="recovering"),
            "warn",
            "No step for 11.7 min, at step 70; the agent says: recovering",
            "explain",
        ),
        (said(stepped_s=NOW - 700, state="starting", step=-1), "info", "Starting", NOTHING),
        (said(stepped_s=0.0, state="starting", step=-1), "warn", "No step for 2.8 h", "without a loop that is watched"),
        (
            said(state="recovering"),
            "warn",
            "recovering",
            "Nothing to do yet",
        ),  # another node's journal has the incident
        (said(alive=False, gone=True), "bad", "Not training: its agent is gone", "Give the same command again"),
        (said(alive=False, gone=True, start=NODE), "bad", "Not training here: its agent is gone", "elsewhere?"),
        (said(at_s=NOW + 900, alive=False), "bad", "Not training: its agent is gone", "Give the same command again"),
        (said(alive=False, end={"code": 140}), "info", "by its scheduler's SIGUSR2", "Give the same command again"),
        (said(alive=False, end={"code": 0}, start=NODE), "info", "Not training here: the agent ended", "elsewhere?"),
        (said(alive=False, silent=True, start=NODE), "info", "Not known", "Look into the run directory of that node"),
        (
            said(alive=False, silent=True, launched=True),
            "info",
            "Not known",
            "Look into the run directory of that node",
        ),
        (said(silent=True), "warn", "Silent", "mt-resilient status"),  # no agent leads, and for long
        (said(silent=True, start={"at_s": NOW - 9}), "info", "Starting", NOTHING),
        (said(alive=False, silent=True, start={"at_s": NOW - 9}), "info", "Starting", NOTHING),
    ],
)
def test_one_sentence_says_what_it_does_and_one_what_to_do(
    told: tuple[str, str, str], mood: str, words: str, act: str
) -> None:
    assert told[0] == mood
    assert words in told[1]
    assert act in told[2]


def test_costs_add_up_over_all_starts_of_the_agent() -> None:
    lives = [
        {"from_s": 0.0, "until_s": 100.0, "spent": {"training": 90.0, "paused": 10.0}},
        {"from_s": 5.0, "until_s": 50.0, "spent": {}},
        {"from_s": 160.0, "until_s": 200.0, "spent": {"training": 30.0, "replay": 10.0}},
    ]
    told = page_view.costs(lives, {"1": OVER, "2": SLOW})
    assert told["spent"] == {"training": 120.0, "replay": 10.0, "paused": 10.0, NO_AGENT: 60.0}
    assert told["effective"] == 120 / 190
    assert (told["answered"], told["incidents"], told["lost_steps"], told["lost_s"]) == (1, 2, 2, 2.0)


def test_a_long_curve_is_thinned_and_keeps_its_end() -> None:
    lines = [{"at_s": float(at), "step": at, "loss": 1.0} for at in range(10_000)]
    told = page_view.curve(lines, 0.0)
    assert len(told["step"]) <= page_view.POINTS
    assert told["step"][-1] == 9_999
    assert page_view.curve(lines, 9_990.0)["step"] == [*range(9_990, 10_000)]
    assert page_view.curve([{"at_s": 1.0, "step": -1}], 0.0)["step"] == []


def test_an_incident_in_the_table() -> None:
    assert page_view.row("1", OVER)["result"] == "recovered"
    assert page_view.row("1", UNCURED)["result"] == "not cured"
    assert page_view.row("1", incident())["result"] == "under way"
    assert page_view.row("1", SLOW)["result"] == "still lasts"
    assert page_view.story("1", OVER, "then")["phases"] == {"step": 2.0}
