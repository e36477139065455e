"""What a campaign checks: each promise has a history that keeps it, and one that breaks it alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.chaos.command import registry
from mt_resilient.chaos.judgement import lines, pace
from mt_resilient.chaos.judgement.checker import checked, phase, violated
from mt_resilient.chaos.judgement.history import History, Run, Seen, Struck
from mt_resilient.chaos.judgement.page import page
from mt_resilient.chaos.judgement.plan import Injection

KINDS = registry.kinds()
LINES = ("step 1 loss 0.5", "step 2 loss 0.25")


def record(number: int, phase: str = "launch", resume_step: int = -1, **more: Any) -> dict[str, Any]:
    known = {"number": number, "phase": phase, "resume_step": resume_step, "onset": -1, "members": {"vm": "a"}}
    return {"kind": "generation", "at_s": 0.0, "record": {**known, "replay_until": 12, **more}}


def incident(cause: str) -> dict[str, Any]:
    return {"kind": "incident", "incident": {"cause": cause, "generation": 1}}


def struck(fault: str, *, at_s: float = 10.0, disk: int = 5, copied: int = 7, memory: int = 9, **more: Any) -> Struck:
    seen = Seen(at_s=at_s, generation=1, steps=(10, 11), memory_step=memory, copied_step=copied, disk_step=disk)
    known = {"injection": Injection(fault=fault), "kind": KINDS[fault], "at_s": at_s, "ended_s": at_s}
    return Struck(**{**known, "seen": seen, "did": "done", **more})


GOOD = History(
    plain=Run(exit_code=0, lines=("1.25 s a step", *LINES)),
    clean=Run(exit_code=0, lines=("1.50 s a step", *LINES), digest="abc", step=20),
    faults=Run(exit_code=0, lines=("step 2 loss nan", *LINES, *LINES), digest="abc", step=20),
    struck=(struck("rank_killed"),),
    journal=(record(1), record(2, resume_step=9)),
)
STATE, PRINTED = (
    "the final state has the bits of the run without faults",
    "it printed every result that the run without faults printed",
)


def test_a_run_that_came_back_keeps_every_promise() -> None:
    findings = checked(GOOD)
    assert violated(findings) == ()
    assert not any(finding.unknown for finding in findings)
    assert "PASSED." in page(GOOD, findings, [], 0.0)


@pytest.mark.parametrize(
    ("changes", "promise"),
    [
        ({"faults": replace(GOOD.faults, digest="abd")}, STATE),
        ({"faults": replace(GOOD.faults, step=19)}, STATE),
        ({"faults": replace(GOOD.faults, lines=LINES[:1])}, PRINTED),
        ({"faults": replace(GOOD.faults, exit_code=93)}, "the job reached its end with exit code 0"),
        ({"unexpected": ("the agent did not end",)}, "the job reached its end with exit code 0"),
        (
            {"struck": (struck("rank_killed", did="", why_not="rank 3 has no process"),)},
            "every fault of the plan struck",
        ),
        (
            {"faults": replace(GOOD.faults, left=("process 7: python",))},
            "nothing is left over: processes, shared memory, temporary files",
        ),
        (
            {"journal": (record(1), record(2, resume_step=9), incident("fingerprint_mismatch"))},
            "no fault was named that nobody injected",
        ),
        (
            {"journal": (record(1), incident("snapshot_unusable"))},
            "every snapshot on disk is complete, but for those that a fault damaged",
        ),
        (
            {"journal": (record(1, members={"n1": "a"}), record(2, resume_step=6, members={"n2": "b"}))},
            "no more steps were lost than the newest snapshot was old",
        ),
        ({"damaged": ("step 10: damaged",)}, "every snapshot on disk is complete, but for those that a fault damaged"),
        (
            {"journal": (record(2, resume_step=9), record(1))},
            "no two generations of ranks worked at once, and their numbers only rose",
        ),
        (
            {"journal": (record(1), record(1, "run", members={"vm": "b"}))},
            "no two generations of ranks worked at once, and their numbers only rose",
        ),
        (
            {"seen": (Seen(at_s=1.0, overlap="process 3 of generation 1 is alive"),)},
            "no two generations of ranks worked at once, and their numbers only rose",
        ),
        (
            {"journal": (record(2, resume_step=9, onset=9),)},
            "ranks never started from a state that was known to be wrong",
        ),
        (
            {"journal": (record(1), record(2, resume_step=8))},
            "no more steps were lost than the newest snapshot was old",
        ),
        (
            {"struck": (struck("agent_killed", needs_disk=True),), "journal": (record(2, resume_step=4),)},
            "no more steps were lost than the newest snapshot was old",
        ),
        (
            {
                "struck": (struck("network_slow", ended_s=18.0),),
                "seen": (Seen(at_s=19.0, generation=2, steps=(12, 12)),),
            },
            "nothing restarted because of a fault that training survives",
        ),
        (
            {"struck": (struck("node_lost", needs_copy=True),), "journal": (record(2, resume_step=6),)},
            "no more steps were lost than the newest snapshot was old",
        ),
        (
            {"journal": ({**record(2, resume_step=9), "of": "n1"}, {**record(1), "of": "n1"})},
            "no two generations of ranks worked at once, and their numbers only rose",
        ),
        (
            {
                "struck": (struck("etcd_stopped", ended_s=15.0),),
                "journal": (),
            },
            "training went on while etcd, the drain process or the disk was away",
        ),
        (
            {
                "struck": (struck("etcd_stopped", ended_s=16.0),),
                "seen": (Seen(at_s=10.5, generation=1, steps=(11, 11)), Seen(at_s=15.5, generation=1, steps=(12, 12))),
                "journal": (),
            },
            "training went on while etcd, the drain process or the disk was away",
        ),
        (
            {
                "faults": replace(GOOD.faults, step=19),
                "again": replace(GOOD.clean, digest="xyz"),
            },
            STATE,
        ),
        (
            {
                "struck": (
                    struck("nan_in_gradient", at_s=5.0, seen=Seen(at_s=5.0, generation=1, steps=(6, 6), memory_step=5)),
                    struck("rank_killed"),
                ),
                "journal": (record(1), record(2, resume_step=8)),
            },
            "no more steps were lost than the newest snapshot was old",
        ),
        (
            {
                "struck": (
                    struck("slab_torn", at_s=5.0, needs_disk=True, damaged="4-g1"),
                    struck("agent_killed", needs_disk=True),
                ),
                "journal": (record(1), record(2, resume_step=3)),
            },
            "no more steps were lost than the newest snapshot was old",
        ),
    ],
)
def test_each_promise_can_be_broken_alone(changes: dict[str, Any], promise: str) -> None:
    history = replace(GOOD, **changes)
    findings = checked(history)
    assert violated(findings) == (promise,)
    assert "FAILED: 1 promise was not kept." in page(history, findings, [], 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "struck": (struck("etcd_data_lost", needs_disk=True),),
            "journal": (record(2, resume_step=5), record(1, resume_step=5, members={"vm": "b"})),
        },
        {
            "struck": (struck("etcd_data_lost", needs_disk=True),),
            "journal": (record(2, resume_step=5), record(2, resume_step=5, members={"vm": "b"})),
        },
        {"struck": (struck("agent_killed", needs_disk=True),), "journal": (record(2, resume_step=5),)},
        {"struck": (struck("node_lost", needs_copy=True),), "journal": (record(2, resume_step=7),)},
        {
            "struck": (struck("node_lost", needs_copy=True), struck("agent_killed", at_s=11.0, needs_copy=True)),
            "journal": (record(2, resume_step=5),),
        },
        {"journal": ({**record(2, resume_step=9), "of": "n1"}, {**record(1), "of": "n2"})},
        {
            "struck": (struck("rank_stopped"), struck("network_slow", at_s=12.0, ended_s=20.0)),
            "seen": (Seen(at_s=30.0, generation=2, steps=(12, 12)),),
        },
        {"struck": (struck("slab_torn", needs_disk=True, damaged="5-g1"),), "journal": (record(2, resume_step=0),)},
        {"struck": (struck("bit_in_arena"),), "journal": (incident("snapshot_unusable"),)},
        {"struck": (struck("bit_in_moment"),), "journal": (incident("fingerprint_mismatch"),)},
        {"journal": (record(1, members={"n1": "a"}), record(2, resume_step=7, members={"n2": "b"}))},
        {"journal": (record(2, resume_step=3, onset=4),)},
        {
            "struck": (struck("warm_killed"), struck("agent_killed", at_s=11.0, needs_disk=True)),
            "journal": (record(2, resume_step=5),),
        },
        {
            "struck": (
                struck("nan_in_gradient", at_s=5.0, seen=Seen(at_s=5.0, generation=1, steps=(9, 9), memory_step=8)),
                struck("rank_killed"),
            ),
            "journal": (record(1), record(2, resume_step=8)),
        },
        {
            "struck": (struck("etcd_stopped", ended_s=15.0),),
            "clean": replace(GOOD.clean, pause_s=2.6),
            "journal": (),
        },
        {"struck": (struck("etcd_stopped", ended_s=15.0),), "delay_s": 2.6, "journal": ()},
        {
            "struck": (struck("etcd_stopped", ended_s=15.0),),
            "seen": (Seen(at_s=14.0, generation=1, steps=(15, 15)),),
            "journal": (),
        },
        {
            "struck": (struck("etcd_stopped", ended_s=15.0),),
            "seen": (Seen(at_s=10.5, generation=1, steps=(20, 20)),),
            "journal": (),
        },
        {
            "struck": (struck("rank_stopped", at_s=-5.0), struck("etcd_stopped", at_s=10.0, ended_s=15.0)),
            "journal": (),
        },
        {
            "struck": (struck("network_slow", at_s=-9.0, ended_s=12.0), struck("etcd_stopped", ended_s=15.0)),
            "journal": (),
        },
        {
            "struck": (struck("etcd_stopped", ended_s=15.0, seen=Seen(at_s=10.0, generation=2, steps=(-1, -1))),),
            "journal": (),
        },
        {
            "plain": replace(GOOD.plain, left=("process 8: sleep 100", "/tmp/a/tmpab12cd34", "/dev/shm/torch_1_2")),
            "faults": replace(GOOD.faults, left=("process 9: sleep 100", "/tmp/a/tmpxy_98765", "/dev/shm/torch_3_4")),
        },
        {
            "struck": (struck("etcd_stopped", ended_s=15.0), struck("rank_killed", at_s=12.0)),
            "seen": (Seen(at_s=11.0, generation=1, steps=(10, 10)),),
        },
        {
            "struck": (
                struck("everything_killed", needs_disk=True),
                struck("disk_read_only", at_s=11.0, seen=Seen(at_s=11.0, disk_step=5)),
            ),
            "journal": (record(1), record(2, resume_step=5)),
        },
        {
            "struck": (struck("network_slow", ended_s=18.0),),
            "seen": (Seen(at_s=19.0, generation=2, steps=(12, 12)),),
            "spares": 1,
        },
    ],
    ids=[
        "etcd's data lost",
        "etcd's data lost, before a snapshot of the last generation was on disk",
        "from disk",
        "from another node's memory",
        "two nodes, one after the other",
        "a leader that was cut off, read late",
        "a hang before, not yet found",
        "damaged on disk",
        "damaged in memory",
        "a flipped bit",
        "a spare came in",
        "suspected state",
        "agent after a helper",
        "a NaN right before, which the newest snapshot may have",
        "steps that always take long",
        "steps that are held up",
        "no look for some time",
        "the end of the training",
        "a hang that is not yet found",
        "another fault that lasts longer",
        "a start that is not over",
        "what torchrun alone leaves, too",
        "another fault meanwhile",
        "a fault while no rank runs",
        "a link so slow that a node that stands by takes the place",
    ],
)
def test_what_a_fault_explains_breaks_no_promise(changes: dict[str, Any]) -> None:
    assert violated(checked(replace(GOOD, **changes))) == ()


def test_what_is_left_without_any_fault_is_told_and_breaks_no_promise() -> None:
    history = replace(GOOD, clean=replace(GOOD.clean, left=("process 8: sleep 1",)))
    findings = checked(history)
    assert violated(findings) == ()
    assert "without any fault, but not under torchrun alone, is left: process 8" in page(history, findings, [], 0.0)


@pytest.mark.parametrize(
    ("printed", "missing"),
    [
        (["step 1 loss 0.5step 2 loss 0.25", ""], []),
        (["[rank 1] step 1 loss 0.5 step 2", "step 2 loss 0.25"], []),
        (["step 1 loss 0.5", "step 2 lo", "ss 0.25"], []),
        (["step 1 loss 0.5", "step 2 loss 0.3"], ["step 2 loss 0.25"]),
        (["step 1 loss 0.5", "step 1 loss 0.5"], ["step 2 loss 0.25"]),
    ],
)
def test_a_line_that_another_rank_has_joined_or_torn_was_printed(printed: list[str], missing: list[str]) -> None:
    assert [*lines.missing(Counter(LINES), printed).elements()] == missing


def test_a_line_that_a_second_run_does_not_print_is_not_demanded() -> None:
    timed = ("step 3 (0.01 s)", *LINES)
    history = replace(GOOD, plain=replace(GOOD.plain, lines=timed), clean=replace(GOOD.clean, lines=timed))
    assert violated(checked(history)) == (PRINTED,)
    again = replace(history.clean, lines=("step 3 (0.02 s)", *LINES))
    assert violated(checked(replace(history, again=again))) == ()


def test_a_script_that_ends_at_another_step_each_time_cannot_be_compared() -> None:
    history = replace(GOOD, faults=replace(GOOD.faults, step=19), again=replace(GOOD.clean, step=18))
    assert violated(checked(history)) == ()


def test_the_first_step_and_the_longest_pause_after_it() -> None:
    moments = ((1.0, -1), (9.0, 1), (10.0, 2), (14.0, 4), (20.0, 4))
    seen = [Seen(at_s=at_s, generation=1, steps=(step, step)) for at_s, step in moments]
    assert (pace.started_s(seen), pace.usual_pause_s(seen)) == (9.0, 2.0)
    assert (pace.started_s(seen[:1]), pace.usual_pause_s(seen[:1])) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("earlier", "blamed"),
    [
        ([], True),
        ([("rank_killed", 1, "done")], False),
        ([("rank_killed", 1, "done"), ("etcd_stopped", 1, "done")], False),
        ([("rank_killed", 1, "")], True),
        ([("network_slow", 1, "done")], True),
        ([("rank_killed", 0, "done")], True),
        ([("rank_killed", 0, "done"), ("network_slow", 1, "done")], True),
        ([("start_fails", 0, "done"), ("network_slow", 1, "done")], False),
        ([("agent_killed", 2, "done")], False),
    ],
    ids=[
        "alone, and a kill after it that was not injected",
        "a kill before",
        "a kill, and one more between",
        "a kill that was not injected",
        "only harmless ones",
        "a kill that has its answer",
        "a kill that has its answer, and one more between",
        "a kill that makes later starts fail, too",
        "while no rank ran",
    ],
)
def test_a_restart_is_blamed_on_a_harmless_fault_if_no_other_explains_it(
    earlier: list[tuple[str, int, str]], blamed: bool
) -> None:
    """earlier: faults before, with the generation that they struck and what they did."""
    at_s, missed = float(len(earlier)), struck("rank_killed", at_s=1.0, did="", why_not="no")
    before = [
        struck(name, at_s=float(at), did=did, why_not="" if did else "no", seen=Seen(at_s=at, generation=generation))
        for at, (name, generation, did) in enumerate(earlier)
    ]
    history = replace(
        GOOD,
        struck=(*before, struck("slow", at_s=at_s), *(() if earlier else [missed])),
        seen=(Seen(at_s=at_s + 5.0, generation=2),),
        journal=(),
    )
    found = next(each.wrong for each in checked(history) if each.promise.startswith("nothing restarted"))
    assert [line.partition(" ")[0] for line in found] == ["slow"] * blamed


def test_what_does_not_repeat_cannot_be_compared() -> None:
    other = replace(GOOD.clean, digest="xyz", lines=("step 1 loss 0.7",))
    history = replace(GOOD, faults=replace(GOOD.faults, digest="abd", lines=()), again=other)
    findings = {finding.promise: finding for finding in checked(history)}
    assert "the script does not repeat" in findings[STATE].unknown
    assert findings[PRINTED].unknown
    assert not violated(list(findings.values()))


@pytest.mark.parametrize(
    ("phases", "generation", "marks", "step", "found"),
    [
        ((1, "run"), 1, 4, 10, "detect"),
        ((2, "gather"), 1, 4, 10, "stop"),
        ((2, "launch"), 1, 4, 10, "stop"),
        ((2, "launch"), 2, 0, -1, "start"),
        ((2, "launch"), 2, 1, -1, "build"),
        ((2, "run"), 2, 2, -1, "restore"),
        ((2, "run"), 2, 3, -1, "step"),
        ((2, "run"), 2, 4, 10, "replay"),
        ((2, "run"), 2, 4, 12, ""),
    ],
)
def test_the_phase_of_a_recovery(phases: tuple[int, str], generation: int, marks: int, step: int, found: str) -> None:
    names = ("attached", "built", "restored", "stepped")
    reached = {name: at < marks for at, name in enumerate(names)}
    seen = Seen(at_s=0.0, generation=generation, steps=(step, step))
    assert phase(record(*phases)["record"], 1, seen, reached) == found
