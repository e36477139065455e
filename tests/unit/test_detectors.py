"""World → suspicions: each detector names what it saw."""

from dataclasses import replace

import pytest

from mt_resilient.resilience.detect.registry import (
    Suspicion,
    dead_ranks,
    hung_ranks,
    replaced_agents,
    replicas_apart,
    suspect,
)
from mt_resilient.resilience.diagnose.root_cause import judge
from mt_resilient.resilience.model.cause import Cause
from mt_resilient.resilience.model.signals import DeviceState, Mismatch, Place, RankExit
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, Rank

from .stalls import stall
from .worlds import NOW, A, B, gone, incident, mismatch, node, record, status, world


def suspicion(exited: RankExit) -> Suspicion:
    (found,) = dead_ranks(world(status={A: status(exits=(exited,))}))
    return found


@pytest.mark.parametrize(
    ("exited", "cause", "sentence"),
    [
        (gone(1, code=-9), Cause.RANK_KILLED, "rank 1 on a was killed by signal 9"),
        (gone(0, code=-9), Cause.RANK_KILLED, "rank 0 on a was killed by signal 9"),
        (gone(1, code=-11), Cause.RANK_KILLED, "rank 1 on a was killed by signal 11"),
        (gone(1, code=None), Cause.RANK_KILLED, "rank 1 on a ended, and its exit code is not known"),
        (
            gone(1, code=-9, out_of_memory=True),
            Cause.RANK_KILLED,
            "rank 1 on a was killed by the kernel, because memory ran out (OOM killer)",
        ),
        (
            gone(1, code=-9, oom_killer_active=True),
            Cause.RANK_KILLED,
            "rank 1 on a was killed by signal 9; it is not known by whom (the OOM killer was active on this machine at that time)",
        ),
        (gone(1, code=3), Cause.SCRIPT_RAISED, "rank 1 on a exited with code 3"),
        (
            gone(1, code=1, error="KeyError: 'x'"),
            Cause.SCRIPT_RAISED,
            "rank 1 on a exited with code 1: KeyError: 'x'",
        ),
        (gone(1, code=0), Cause.SCRIPT_RAISED, "rank 1 on a exited with code 0 before its loop was over"),
        (gone(1, code=-2, through=True), Cause.SCRIPT_RAISED, "rank 1 on a was killed by signal 2"),
        (gone(1, code=-9, through=True), Cause.RANK_KILLED, "rank 1 on a was killed by signal 9"),
        (gone(-1, code=1), Cause.SCRIPT_RAISED, "the launcher (torchrun) on a exited with code 1"),
        (gone(-1, code=-9), Cause.RANK_KILLED, "the launcher (torchrun) on a was killed by signal 9"),
    ],
)
def test_how_a_rank_ended(exited: RankExit, cause: Cause, sentence: str) -> None:
    found = suspicion(exited)
    assert (found.cause, found.evidence) == (cause, sentence)
    assert (found.node, found.rank, found.at_s) == (A, exited.rank, exited.at_s)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("non_finite", Cause.NON_FINITE), ("snapshot", Cause.SNAPSHOT_UNUSABLE), ("exit", Cause.SCRIPT_RAISED)],
)
@pytest.mark.parametrize(("started", "code"), [(True, 1), (False, 1), (False, None)])
def test_the_reason_that_a_rank_gives_counts_more_than_how_it_ended(
    kind: str, cause: Cause, started: bool, code: int | None
) -> None:
    cause = Cause.RANK_KILLED if kind == "exit" and code is None else cause
    found = suspicion(gone(0, code=code, kind=kind, step=7, error="it says why", started=started))
    assert (found.cause, found.step, found.started) == (cause, 7, started)
    assert ("it says why" in found.evidence) is (kind == "exit" and code == 1)
    assert ("step 7" in found.evidence) is (kind != "exit")


def test_what_makes_two_faults_the_same_fault() -> None:
    def signature(code: int, error: str, rank: int = 0) -> str:
        return suspicion(gone(rank, code=code, error=error)).signature

    assert signature(1, "KeyError: 'x'", rank=0) == signature(1, "KeyError: 'x'", rank=1)
    assert len({signature(1, "KeyError: 'x'"), signature(1, "KeyError: 'y'"), signature(2, "KeyError: 'x'")}) == 3
    assert signature(-9, "") != signature(-11, "")


def test_what_was_said_of_another_generation_is_no_suspicion() -> None:
    assert dead_ranks(world(record=record(number=2), status={A: status(1, exits=(gone(),))})) == []


@pytest.mark.parametrize(
    ("nodes", "cause"),
    [
        ({A: node()}, None),
        ({A: node(instance="another")}, Cause.AGENT_RESTARTED),
        ({}, Cause.AGENT_LOST),
        ({B: node("b")}, Cause.AGENT_LOST),
    ],
)
def test_whether_the_agent_is_the_one_that_the_record_names(nodes: dict, cause: Cause | None) -> None:
    found = replaced_agents(world(nodes=nodes))
    assert [s.cause for s in found] == ([cause] if cause else [])
    assert all(s.node == A and s.at_s == NOW - 1 and s.started for s in found)


@pytest.mark.parametrize("phase", Phase)
def test_who_is_gone_while_a_generation_gathers_is_waited_for(phase: Phase) -> None:
    assert bool(replaced_agents(world(record=record(phase), nodes={}))) is (phase is not Phase.GATHER)
    assert replaced_agents(world(record=record(phase), nodes={A: node(instance="another")}))


def test_a_lost_agent_of_which_nothing_is_known_was_there_when_the_generation_opened() -> None:
    (found,) = replaced_agents(world(nodes={}, status={}))
    assert found.at_s == record().opened_s
    assert not found.started


# -- hangs -----------------------------------------------------------------------------------------------------------------

WAITS = stall(0, Place.COLLECTIVE, words="in all_reduce", stacks="logs/a.txt")
HANGS = stall(1, Place.DATA, words="in its data loader", site="train.py line 3", stacks="logs/a.txt")


def test_the_rank_that_did_not_enter_is_suspected_and_who_waits_for_it_is_told() -> None:
    (found,) = hung_ranks(world(status={A: status(stalls=(WAITS, HANGS))}))
    assert (found.cause, found.rank, found.node, found.at_s, found.started) == (Cause.RANK_HUNG, 1, A, NOW - 70, True)
    assert found.evidence == "rank 1 on a hangs (in its data loader), silent for 70 s"
    assert found.details == ("rank 0 on a waits for it (in all_reduce)", "the stacks of a: logs/a.txt")
    (again,) = hung_ranks(
        world(status={A: status(stalls=(WAITS, stall(1, Place.DATA, site="train.py line 3", silent_s=9.0)))})
    )
    assert again.signature == found.signature
    other = [replace(HANGS, place=Place.ELSEWHERE), replace(HANGS, site="train.py line 4")]
    signatures = {s.signature for each in other for s in hung_ranks(world(status={A: status(stalls=(WAITS, each))}))}
    assert len({found.signature, *signatures}) == 3, "two hangs that are not the same"


def test_a_rank_whose_device_finishes_nothing_is_not_in_its_own_work() -> None:
    """So the job gets more than one restart, as it does for what the ranks wait for."""
    waits = replace(HANGS, place=Place.ELSEWHERE, device=DeviceState.STUCK)
    (found,) = hung_ranks(world(status={A: status(stalls=(WAITS, waits))}))
    (dead,) = hung_ranks(world(status={A: status(stalls=(WAITS, replace(waits, device=DeviceState.DEAD)))}))
    assert found.signature == dead.signature == "rank_hung:device:train.py line 3"


def test_where_none_is_missing_all_are_silent() -> None:
    also = replace(WAITS, rank=Rank(1), at_s=WAITS.at_s - 5)
    (found,) = hung_ranks(world(status={A: status(stalls=(WAITS, also))}))
    assert found.at_s == also.at_s
    assert (found.rank, found.details[0]) == (None, "rank 0 on a is silent (in all_reduce)")


@pytest.mark.parametrize("stalls", [(), (WAITS, stall(1, busy=True)), (stall(0, moved=True), stall(1))])
def test_a_rank_that_moves_does_not_hang(stalls: tuple) -> None:
    assert hung_ranks(world(status={A: status(stalls=stalls)})) == []


def test_no_node_is_judged_before_all_have_spoken() -> None:
    two = {"record": record(members=("a", "b")), "nodes": {A: node(), B: node("b")}}
    assert hung_ranks(world(**two, status={A: status(stalls=(WAITS,))})) == []
    assert hung_ranks(world(**two, status={A: status(stalls=(WAITS,)), B: status(stalls=())})) == []
    assert hung_ranks(world(**two, status={A: status(stalls=(WAITS,)), B: status(0, stalls=(HANGS,))})) == []
    spare = {"c": status(stalls=(HANGS,))}
    assert hung_ranks(world(**two, status={A: status(stalls=(WAITS,)), **spare})) == [], "no member's"
    (found,) = hung_ranks(world(**two, status={A: status(stalls=(WAITS,)), B: status(stalls=(HANGS,))}))
    assert (found.node, found.rank) == (B, 1)
    assert found.details[0] == "rank 0 on a waits for it (in all_reduce)"


@pytest.mark.parametrize("phase", Phase)
def test_nobody_is_suspected_while_the_job_ends_in_order(phase: Phase) -> None:
    troubled = world(record=record(phase), nodes={}, status={A: status(exits=(gone(),))})
    quiet = phase in (Phase.ENDING, Phase.ENDED)
    assert bool(suspect(troubled)) is not quiet


@pytest.mark.parametrize(("step", "started"), [(-1, False), (0, True), (7, True)])
def test_an_agent_s_ranks_had_started_if_any_step_was_done(step: int, started: bool) -> None:
    (found,) = replaced_agents(world(nodes={}, status={A: status(max_step=step)}))
    assert found.started is started


def test_all_detectors_are_asked_and_the_earliest_comes_first() -> None:
    exits = (gone(1, at_s=NOW - 0.2), gone(0, at_s=NOW - 5))
    found = suspect(world(nodes={A: node(instance="another")}, status={A: status(exits=exits)}))
    assert [(s.cause, s.rank) for s in found] == [
        (Cause.RANK_KILLED, 0),
        (Cause.AGENT_RESTARTED, None),
        (Cause.RANK_KILLED, 1),
    ]


def test_without_a_record_there_is_nothing_to_suspect() -> None:
    assert suspect(world(record=None)) == []


@pytest.mark.parametrize(
    ("found", "rank", "sentence"),
    [
        (mismatch(), 1, "rank 1 differs from the others"),
        (mismatch(wrong=()), None, "it is not known which of them is wrong"),
        (mismatch(wrong=(1, 2), ranks=(0, 1, 2, 3, 4)), None, "ranks 1, 2 differ from the others"),
        (mismatch(count=9), 1, "model/w and 8 more"),
        (
            mismatch(),
            1,
            "at step 8 the replicas on ranks 0, 1, 2 hold different bits (they held the same at step 7): model/w",
        ),
        (mismatch(agreed=-1), 1, "hold different bits: model/w"),
        (mismatch(replayed=True), 1, "it is not known which of them is wrong"),
    ],
)
def test_replicas_that_have_gone_apart(found: Mismatch, rank: int | None, sentence: str) -> None:
    (suspicion,) = replicas_apart(world(status={A: status(mismatches=(found,))}))
    assert (suspicion.cause, suspicion.rank, suspicion.onset) == (Cause.FINGERPRINT_MISMATCH, rank, 8)
    assert sentence in suspicion.evidence


def test_a_mismatch_is_answered_once() -> None:
    told = status(2, mismatches=(mismatch(),))
    assert replicas_apart(world(record=record(number=2), status={A: told})) == []


def test_a_mismatch_is_answered_by_a_rewind_in_place_that_came_after_it() -> None:
    told = {A: status(mismatches=(mismatch(),))}
    signature = replicas_apart(world(status=told))[0].signature
    answered = incident(1, rung=1, signature=signature, at_s=NOW - 1)
    assert replicas_apart(world(status=told, incidents=(answered,))) == []
    others = (
        replace(answered, rung=0),
        replace(answered, at_s=NOW - 1.5),
        replace(answered, signature="another"),
        replace(answered, generation=Generation(2)),
    )
    for other in others:
        assert replicas_apart(world(status=told, incidents=(other,))), other


def test_a_wrong_replica_is_the_cause_of_a_nan() -> None:
    exits = (gone(1, code=93, kind="non_finite"),)
    found = judge(suspect(world(status={A: status(exits=exits, mismatches=(mismatch(),))})))
    assert found is not None
    assert (found.cause, found.onset, len(found.consequences)) == (Cause.FINGERPRINT_MISMATCH, 8, 1)
