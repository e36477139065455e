"""What the page of `mt-resilient dashboard` says, and whether a person must act."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.rewind import AGAIN
from mt_resilient.resilience.model.types import NodeId, Step
from mt_resilient.resilience.report import page_view, time_ledger
from mt_resilient.resilience.report.page_view import Seen
from mt_resilient.resilience.report.time_ledger import NO_AGENT

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
    if closed_s := given.pop("closed_s", None):
        last["incident"] = {"at_s": closed_s}
    last |= {} if given.pop("silent", False) else {"progress": {**LINE, **given}}
    last |= {"end": {"at_s": NOW, **end}} if end else {}
    numbered = {str(number): each for number, each in enumerate(incidents, 1)}
    told = page_view.state(Seen(**outside, last=last, incidents=numbered), NOW)
    return told["mood"], told["words"], " ".join(told["act"])


NOTHING = ""


@pytest.mark.parametrize(
    ("told", "mood", "words", "act"),
    [
        (said(), "good", "Training: step 70, 250 ms a step", NOTHING),
        (said(OVER), "good", "Training: step 70, 250 ms a step", NOTHING),
        (
            said(UNCURED),
            "bad",
            "Training, but rank 0 on a was killed by signal 9",
            "If it is bad, `mt-resilient pause` keeps the snapshots while you look for the cause. `mt-resilient rewind --to 8` goes back",
        ),
        (said(UNCURED, OVER), "good", "Training: step 70", NOTHING),
        (said(replace(UNCURED, at_s=NOW - 90), replace(OVER, cause="ordered")), "good", "Training: step 70", NOTHING),
        (
            said(replace(UNCURED, at_s=NOW - 90), OVER),
            "bad",
            "Training, but rank 0",
            "Incident 1 was not cured. Look at the curve",
        ),
        (
            said(SLOW),
            "warn",
            "Training, but rank 3 is slow",
            "Incident 1 lasts, and is only reported. Look at what else runs",
        ),
        (said(replace(SLOW, cause="frozen")), "bad", "Training, but rank 3", "Read the script"),
        (said(replace(SLOW, cause="loss_spike")), "good", "Training: step 70", NOTHING),  # the ranks rewind if it stays
        (said(replace(SLOW, cause="rank_hung", would=2)), "warn", "Training, but rank 3", "only reported."),
        (
            said(*STORM),
            "bad",
            "Training, but it recovered 6 times within an hour, all from rank killed, 6 on gpu-05",
            "Check that machine; `mt-resilient drain gpu-05`",
        ),
        (
            said(*STORM, nodes={"trains": 1}),
            "bad",
            "all from rank killed",
            "See what they have in common: `mt-resilient explain`.",
        ),
        (said(*STORM[1:]), "good", "Training", NOTHING),
        (said(*STORM[1:], replace(STORM[0], cause="ordered")), "good", "Training", NOTHING),
        (said(*STORM[1:], replace(STORM[0], origin=AGAIN)), "good", "Training", NOTHING),  # the next remedy has helped
        (
            said(*SPREAD[1:], replace(SPREAD[0], cause="rank_hung")),
            "bad",
            "6 times within an hour, 5 of them from rank killed",
            "See",
        ),
        (said(*(replace(i, at_s=NOW - 4000) for i in STORM)), "good", "Training", NOTHING),
        (said(snapshots={"certified": (7, NOW - 14_000)}), "good", "Training", NOTHING),
        (
            said(snapshots={"certified": (7, NOW - 15_000)}),
            "warn",
            "Training, but no new stable snapshot for 4.2 h",
            "the steps after it were clean. Now, a fault that is found late would go back to step 7 and cost 63 steps, about 15.8 s.",
        ),
        (
            said(snapshots={"certified": (-1, 0.0)}, start={"at_s": NOW - 15_000}),
            "warn",
            "Training, but",
            "to the beginning",
        ),
        (said(snapshots={"certified": (-1, 0.0)}), "good", "Training", NOTHING),
        (
            said(snapshots={"other node": (7, NOW - 3000)}),
            "warn",
            "no new copy on another node for 50.0 min",
            "the loss of a node would",
        ),
        (said(snapshots={"other node": (7, NOW - 2000)}), "good", "Training", NOTHING),
        (said(snapshots={"other node": (-1, 0.0)}, nodes={"trains": 1}), "good", "Training", NOTHING),
        (
            said(snapshots={"other node": (-1, 0.0)}, start={"configuration": {"copies.every_s": 0.0}}),
            "good",
            "Training",
            NOTHING,
        ),
        (said(etcd_s=None), "bad", "Training, but etcd does not answer", "Training continues meanwhile."),
        (said(quarantined=1), "warn", "1 node is in quarantine", "`mt-resilient readmit NODE`"),
        (
            said(SLOW, etcd_s=None),
            "bad",
            "etcd does not answer",
            "Rank 3 is slow. Incident 1 lasts",
        ),  # the worse one first
        (said(spares=1), "warn", "no spare is left", "Start another node"),
        (
            said(written=(9, "failed"), at_risk={"all nodes": 50}),
            "warn",
            "Training, but the last snapshot could not be written to disk",
            "Make room, or mend the storage (it is full). The program tries again by itself. "
            "If all nodes were lost now, 50 steps would be computed again.",
        ),
        (said(written=(9, "durable")), "good", "Training", NOTHING),
        (said(written=(9, "failed"), start={"at_s": 10.0}), "good", "Training", NOTHING),
        (said(spares=1, nodes={"trains": 2, "stands by": 1}), "good", "Training", NOTHING),
        (
            said(incident(at_s=NOW - 9), state="recovering"),
            "info",
            "Recovering for 9.0 s, at step 70: rank 0",
            "The job recovers by itself",
        ),
        (
            said(incident(at_s=NOW - 9, resume_step=Step(8)), state="recovering"),
            "info",
            "for 9.0 s, from step 8: ",
            "by itself",
        ),
        (
            said(OVER, state="recovering", closed_s=NOW),
            "good",
            "Training: step 70",
            NOTHING,
        ),  # the next line will say so
        (said(OVER, state="recovering", closed_s=NOW - 60), "info", "Recovering, at step 70", "by itself"),
        (said(state="starting", step=-1), "info", "Starting", NOTHING),
        (
            said(replace(OVER, open=True, nodes=(NodeId("gpu-11"),)), state="waiting for nodes", missing=1),
            "bad",
            "Not training for 60.0 s: gpu-11 is lost, waiting for 1 node",
            "Start gpu-11 again, as before. Or start another machine, with the command of the other nodes, but with its own --node "
            "and --address, or torchrun's --node-rank. "
            "The job waits at step 70. It resumes by itself as soon as 1 node has joined.",
        ),
        (
            said(state="waiting for nodes", missing=2),
            "bad",
            "Not training: waiting for 2 nodes",
            "Start 2 nodes, each with the command of the other nodes, but with its own --node and --address",
        ),
        (said(state="paused"), "info", "Paused at step 70", "`mt-resilient resume`"),
        (said(at_s=NOW - 900), "bad", "Silent: the last report is 15.0 min old", "`mt-resilient status`"),
        (said(at_s=NOW - 900, start=NODE), "warn", "Silent: the last report is 15.0 min old", "`mt-resilient status`"),
        (said(at_s=NOW - 900, alive=False), "bad", "Not training: its agent is gone", "Give the same command again"),
        (said(alive=False), "good", "Training", NOTHING),  # the agents of a hostfile run on other machines
        (
            said(
                replace(OVER, rung=6, plan="it gives up", at_s=NOW - 900),
                alive=False,
                end={"code": 93, "at_s": NOW - 600},
            ),
            "bad",
            "Not training for 10.0 min: rank 0 on a was killed by signal 9",
            "The job has stopped with exit code 93 after step 70: it gives up. Correct the cause. Give the same command again.",
        ),
        (
            said(alive=False, end={"code": 93}),
            "bad",
            "for 1.0 s: the disk is full",
            "exit code 93 after step 70. Correct that.",
        ),
        (
            said(alive=False, end={"code": 130}, start={"again": "cd /x && mt-resilient run"}),
            "warn",
            "the job ended by Ctrl-C after step 70",
            "Give the same command again: `cd /x && mt-resilient run`. It continues from the newest snapshot.",
        ),
        (
            said(alive=False, end={"code": 130}, start={"again": "cd /x && mt-resilient run -- a.py --hf-token s3"}),
            "warn",
            "the job ended by Ctrl-C after step 70",
            "`cd /x && mt-resilient run -- a.py --hf-token ***`, with what *** hides. It continues",
        ),
        (said(alive=False, finished=True, end={"code": 0}), "good", "Finished after step 70", NOTHING),
        (said(end={"code": 93}), "good", "Training", NOTHING),  # it has been started again
        (
            said(stepped_s=NOW - 700),
            "bad",
            "No step for 11.7 min, at step 70; the agent says: training",
            "logs/stacks-",
        ),
        (said(stepped_s=NOW - 700, step_s=40.0), "good", "Training", NOTHING),
        (said(stepped_s=NOW - 700, state="paused"), "info", "Paused", "`mt-resilient resume`"),
        (
            said(stepped_s=NOW - 700, state="recovering"),
            "bad",
            "No step for 11.7 min, at step 70; the agent says: recovering",
            "explain",
        ),
        (said(stepped_s=NOW - 700, state="starting", step=-1), "info", "Starting", NOTHING),
        (said(stepped_s=0.0, state="starting", step=-1), "bad", "No step for 2.8 h", "without a loop that is watched"),
        (
            said(state="recovering"),
            "info",
            "Recovering, at step 70",
            "by itself",
        ),  # another node's journal has the incident
        (said(alive=False, gone=True), "bad", "Not training: its agent is gone", "Give the same command again"),
        (said(alive=False, gone=True, start=NODE), "bad", "Not training here: its agent is gone", "on other nodes?"),
        (said(at_s=NOW + 900, alive=False), "bad", "Not training: its agent is gone", "Give the same command again"),
        (said(alive=False, end={"code": 140}), "warn", "by its scheduler's SIGUSR2", "Give the same command again"),
        (
            said(alive=False, end={"code": 0}, start=NODE),
            "warn",
            "Not training here for 1.0 s: the agent ended",
            "on other nodes?",
        ),
        (said(alive=False, silent=True, start=NODE), "warn", "Not known", "Look into the run directory of that node"),
        (
            said(alive=False, silent=True, launched=True),
            "warn",
            "Not known",
            "Look into the run directory of that node",
        ),
        (said(silent=True), "bad", "Silent", "`mt-resilient status`"),  # no agent leads, and for long
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
    assert bool(act) == bool(told[2])


def test_commands_name_the_run_directory_and_a_terminal_says_how_urgent_it_is() -> None:
    seen = Seen(
        finished=False,
        alive=True,
        last={"progress": LINE, "start": {"at_s": 0.0}},
        incidents={"1": UNCURED},
        directory="/a b",
    )
    told = page_view.state(seen, NOW)
    assert told["urgency"] == "act now"
    assert "`mt-resilient rewind --to 8 --run-dir '/a b'`" in told["act"][0]
    assert page_view.sentence(told).startswith(
        "Training, but rank 0 on a was killed by signal 9. Act now: Incident 1 was not cured."
    )


def test_costs_add_up_over_all_starts_of_the_agent() -> None:
    lives = [
        {"from_s": 0.0, "until_s": 100.0, "spent": {"training": 90.0, "paused": 10.0}},
        {"from_s": 5.0, "until_s": 50.0, "spent": {}},
        {"from_s": 160.0, "until_s": 200.0, "spent": {"training": 30.0, "replay": 10.0}},
    ]
    again = [
        replace(OVER, open=True, at_s=NOW - 9),
        UNCURED,
        replace(OVER, rung=6),
        replace(UNCURED, remedy="replay", origin="again"),
    ]
    known = {
        str(number): each
        for number, each in enumerate(
            [OVER, SLOW, *again, replace(OVER, step_at_fault=Step(99), phases_s={"step": 0.0})], 1
        )
    }
    told = time_ledger.costs(lives, known, NOW, 30.0)
    assert told["spent"] == {"training": 120.0, "replay": 10.0, "paused": 10.0, NO_AGENT: 60.0}
    assert told["effective"] == 120 / 190
    assert told["counted_s"] == 190
    assert told["results"] == {
        "came back": 1,
        "only reported": 1,
        "open": 1,
        "not cured": 2,
        "stopped the job": 1,
        "repaired": 1,
    }
    assert told["incidents"] == 7
    assert told["lost_s"] == 2 + 9 + 2 + 30, "with the recovery under way, and the time since it stopped"
    assert time_ledger.costs(lives, {"1": OVER}, step_s=0.5)["lost_s"] == 3.0, "with the steps that were computed again"


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
    assert page_view.row("1", OVER, back=True)["result"] == "came back"
    assert page_view.row("1", replace(UNCURED, remedy="replay", origin="again"))["result"] == "did not help"
    assert page_view.row("1", incident())["result"] == "under way"
    assert page_view.row("1", SLOW)["result"] == "still lasts"
    assert page_view.story("1", OVER, "then")["phases"] == {"step": 2.0}
