"""Which nodes are shut out for a while."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.decide import node_exclusion
from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.membership import quarantine
from mt_resilient.resilience.membership.quarantine import QuarantinePolicy
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.generation import Quarantine
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.node import AckKind, Spec
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, NodeId, Rank

from .worlds import NOW, A, B, ack, gone, incident, mismatch, node, record, status, world

C = NodeId("c")
POLICY = QuarantinePolicy()
HOUR = 3600.0


def struck(*faults: Incident, there: str = "abc", sizes: tuple[int, ...] = (2,)) -> World:
    nodes = {NodeId(name): node(name) for name in there}
    spec = Spec(command=("torchrun",), sizes=sizes)
    return world(record=record(members=("a", "b")), spec=spec, nodes=nodes, incidents=faults)


def fault(number: int, cause: str = "rank_killed", node: NodeId = B, ago_s: float = 10.0, **fields: Any) -> Incident:
    return replace(incident(number), cause=cause, nodes=(node,), at_s=NOW - ago_s, open=False, **fields)


def flip(number: int, **fields: Any) -> Incident:
    return fault(number, "fingerprint_mismatch", **fields)


def raised(number: int, cause: str = "script_raised", **fields: Any) -> Incident:
    """Before the first step of these ranks; the job has come further before."""
    return fault(number, cause, **{"started": False, "step_at_fault": 8, **fields})


def killed(number: int, **fields: Any) -> Incident:
    return raised(number, "rank_killed", **fields)


def glitch(number: int, origin: str = "transient", **fields: Any) -> Incident:
    return fault(number, "non_finite", rung=1, origin=origin, ranks=(Rank(1),), **fields)


@pytest.mark.parametrize(
    ("faults", "shut"),
    [
        ((), False),
        ((fault(1), fault(2)), False),
        ((fault(1), fault(2), fault(3)), True),
        ((fault(1), fault(2), fault(3, node=A)), False),
        ((fault(1), fault(2), fault(3, ago_s=25 * HOUR)), False),
        ((fault(1), fault(2), fault(3, ago_s=24 * HOUR)), True),
        ((fault(1, "rank_hung"), fault(2, "agent_lost"), fault(3)), True),
        ((fault(1, "script_raised"), fault(2, "script_raised"), fault(3, "script_raised")), False),
        (tuple(raised(n, started=True) for n in (1, 2, 3)), False),
        ((fault(1), raised(2)), True),
        ((raised(1, started=True), raised(2)), True),
        ((fault(1), raised(2, step_at_fault=-1)), False),
        ((fault(1, node=A), raised(2)), False),
        ((raised(1), raised(2, node=A)), False),
        ((raised(1), replace(raised(2), nodes=(A, B))), False),
        ((fault(1), raised(2), fault(3, "moved", node=A)), False),  # they have trained meanwhile
        ((fault(1), raised(2), fault(3, "straggler", node=A, rung=0, started=False)), True),
        (tuple(replace(flip(n), nodes=(A, B)) for n in (1, 2)), False),  # of two nobody knows which
        ((raised(1), raised(2)), True),
        ((raised(1), raised(2, size=1)), False),  # which may be too few, whichever it is
        (tuple(killed(n, size=1) for n in (1, 2, 3)), False),
        (tuple(killed(n, size=3) for n in (1, 2, 3)), True),
        (
            (fault(1, node=A, size=4, started=True), *(killed(n, size=3) for n in (2, 3, 4))),
            False,
        ),  # it has trained on four
        (tuple(fault(n, "agent_lost", size=1, started=False) for n in (1, 2, 3)), True),
        ((raised(1, node=A), raised(2), raised(3)), True),
        ((raised(1, node=A), raised(2, node=C), raised(3), raised(4)), False),  # wherever ranks start
        ((raised(1, node=A), raised(2, node=C), fault(3, started=True), raised(4), raised(5)), True),
        ((raised(1), raised(2, size=1), raised(3, size=2)), False),
        ((raised(1, size=1), raised(2, size=2), raised(3, size=2)), True),
        ((raised(1),), False),
        ((fault(1), killed(2)), True),
        ((fault(1), killed(2, started=True)), False),
        ((fault(1, "agent_lost"), killed(2)), True),
        ((fault(1), raised(2, rung=1)), False),
        ((fault(1, "agent_restarted"), fault(2, "agent_restarted"), fault(3, "agent_restarted")), False),
        (tuple(replace(fault(n, "agent_lost"), nodes=(A, B)) for n in (1, 2, 3)), False),
        ((fault(1, "moved"), fault(2, "ordered"), fault(3, "straggler")), False),
        ((flip(1),), False),
        ((flip(1), flip(2)), True),
        ((glitch(1), flip(2)), False),
        (tuple(map(glitch, (1, 2, 3))), False),  # nothing proves that it was the hardware
        ((glitch(1, origin="data"), glitch(2, origin="data")), False),
        ((glitch(1, origin="undecided"), glitch(2, origin="undecided")), False),  # it may have been other data
        ((replace(fault(1), would=2), fault(2), fault(3)), False),
        ((replace(glitch(1), ranks=()), replace(glitch(2), ranks=())), False),  # everybody's, or nobody knows whose
    ],
)
def test_which_faults_put_a_node_into_quarantine(faults: tuple[Incident, ...], shut: bool) -> None:
    judged = struck(*faults)
    judged = replace(judged, record=replace(judged.record, trained=2))
    assert {*node_exclusion.due(judged, NOW, POLICY)} == ({B} if shut else set())


SINCE = Generation(2)
NEW = {B: SINCE}


def failed(number: int, cause: str = "script_raised", **fields: Any) -> Incident:
    """At the start of the generation in which b was new."""
    return raised(number, cause, **{"generation": SINCE, **fields})


def ready(faults: tuple[Incident, ...], joined: dict[NodeId, Generation]) -> World:
    """All say so, after that."""
    judged = struck(*faults)
    gathers = record(Phase.GATHER, 3, members=("a", "b"), joined=joined, trained=2)
    acks = {NodeId(name): ack(AckKind.READY, 3, name) for name in "ab"}
    return replace(judged, record=gathers, acks=acks, status={})


@pytest.mark.parametrize(
    ("joined", "faults", "shut"),
    [
        (NEW, (failed(1),), "b"),
        (NEW, (failed(1, "rank_killed"),), "b"),
        (NEW, (failed(1, "rank_hung"),), "b"),
        (NEW, (failed(1, "agent_lost"),), ""),  # which is for its three faults
        (NEW, (failed(1, "snapshot_unreadable"),), ""),
        (NEW, (failed(1, step_at_fault=-1),), ""),  # nobody has trained
        (NEW, (failed(1, node=A),), ""),
        (NEW, (failed(1, size=1),), ""),
        (NEW, (replace(failed(1), nodes=(A, B)),), ""),
        (NEW, (replace(failed(1), nodes=()),), ""),  # all hang, and none is missing
        ({**NEW, A: SINCE}, (replace(failed(1, size=3), nodes=(A, B)),), "a"),  # one spare, one place
        ({**NEW, A: SINCE}, (replace(failed(1, size=2), nodes=(A, B)),), ""),  # wherever ranks are
        (NEW, (fault(1, generation=1), failed(2)), "b"),  # before it came
        (NEW, (fault(1, node=A, generation=2), failed(2)), ""),  # it has trained
        (NEW, (glitch(1, generation=2), failed(2)), ""),
        (NEW, (failed(1, "agent_restarted", node=A), failed(2)), ""),  # it may have: the new agent does not know
        (NEW, (failed(1), fault(2, node=A, generation=2)), ""),
        (NEW, (failed(1), fault(2, "moved", node=A, generation=2)), ""),  # they have trained meanwhile
        ({B: Generation(1)}, (failed(1),), ""),  # where all had died, all are new
    ],
)
def test_who_has_never_trained_is_shut_out_at_its_first_failing_start(
    joined: dict[NodeId, Generation], faults: tuple[Incident, ...], shut: str
) -> None:
    assert {*node_exclusion.due(ready(faults, joined), NOW, POLICY)} == {*shut}


def test_another_node_may_have_died_as_long_as_not_all_are_ready() -> None:
    judged = ready((failed(1),), NEW)
    assert node_exclusion.due(replace(judged, acks={A: judged.acks[A]}), NOW, POLICY) == {}


def test_one_of_two_that_failed_is_not_shut_out_again_once_somebody_has_it_back() -> None:
    both = ready((replace(failed(1), nodes=(A, B)),), {**NEW, A: SINCE})
    back = replace(both, quarantine={A: Quarantine(reason="", until_s=NOW, readmitted_s=NOW)})
    assert {*node_exclusion.due(back, NOW, POLICY)} == {B}


def test_a_node_that_trains_again_is_not_quarantined_for_a_failed_start() -> None:
    trains = replace(struck(fault(1), raised(2)), status={A: status(stepped_s=NOW - 1.0)})
    assert node_exclusion.due(trains, NOW, POLICY) == {}


def test_a_node_that_the_job_needs_is_not_quarantined() -> None:
    faults = (flip(1), flip(2))
    assert node_exclusion.due(struck(*faults, there="ab"), NOW, POLICY) == {}
    assert B in node_exclusion.due(struck(*faults, there="ab", sizes=(1, 2)), NOW, POLICY)
    both = (*faults, flip(3, node=A), flip(4, node=A))
    assert list(node_exclusion.due(struck(*both), NOW, POLICY)) == [A]  # one spare, one place


def test_what_is_only_told_of_it_does_not_shut_it_out_again() -> None:
    old = tuple(fault(n, ago_s=1000.0) for n in (1, 2, 3))
    served = {B: Quarantine(reason="bad", until_s=NOW - 640.0)}
    told = replace(struck(*old, fault(4, "straggler", rung=0)), quarantine=served)
    policy = replace(POLICY, lasts_h=0.1)
    assert node_exclusion.due(told, NOW, policy) == {}
    assert B in node_exclusion.due(told.with_incidents((fault(5),)), NOW, policy)


def test_it_lasts_for_its_time_and_the_same_faults_count_once() -> None:
    shut = struck(flip(1), flip(2))
    found = node_exclusion.due(shut, NOW, POLICY)
    assert found[B] == Quarantine(reason="its hardware is blamed for 2 faults within 24 h", until_s=NOW + 24 * HOUR)
    shut = replace(shut, quarantine=found)
    assert node_exclusion.due(shut, NOW + 1, POLICY) == {}
    brief = QuarantinePolicy(lasts_h=1.0)
    shut = replace(shut, quarantine=node_exclusion.due(struck(flip(1), flip(2)), NOW, brief))
    assert node_exclusion.due(shut, NOW + 2 * HOUR, brief) == {}
    again = replace(shut, incidents=(*shut.incidents, flip(3, ago_s=-HOUR)))
    assert B in node_exclusion.due(again, NOW + 2 * HOUR, brief)


def test_what_had_struck_a_node_before_somebody_had_it_back_counts_no_more() -> None:
    back = {B: Quarantine(reason="readmitted by alice", until_s=NOW, readmitted_s=NOW)}
    before = (flip(1), flip(2), fault(3), fault(4))
    since = (fault(5, ago_s=-1), fault(6, ago_s=-2), fault(7, ago_s=-3))
    for more, shut in ((since[:2], False), (since, True)):
        judged = replace(struck(*before, *more), quarantine=back)
        assert (B in node_exclusion.due(judged, NOW + 4, POLICY)) is shut


def test_what_had_struck_a_node_before_somebody_had_it_back_counts_for_no_budget_either() -> None:
    back = {B: Quarantine(reason="readmitted by alice", until_s=NOW, readmitted_s=NOW)}
    here, elsewhere, of_none = flip(1), flip(2, node=A), replace(flip(3), nodes=())
    both, since = replace(flip(4), nodes=(A, B)), flip(5, ago_s=-1)
    judged = struck(here, elsewhere, of_none, both, since)
    assert node_exclusion.unforgiven(judged) == judged.incidents
    assert node_exclusion.unforgiven(replace(judged, quarantine=back)) == (elsewhere, of_none, both, since)


@pytest.mark.parametrize(("readmitted_s", "code"), [(0.0, 7), (NOW - 5, 0)])
def test_flips_on_a_node_that_somebody_has_back_do_not_end_the_job(readmitted_s: float, code: int) -> None:
    back = {B: Quarantine(reason="readmitted by alice", until_s=NOW, readmitted_s=readmitted_s)}
    judged = struck(flip(1), flip(2), there="ab")
    told = {A: status(), B: status(mismatches=(mismatch(),))}
    decided = decide(replace(judged, quarantine=back, status=told), NOW, Policy()).record
    assert decided
    assert decided.exit_code == code


@pytest.mark.parametrize(
    ("bound", "faults", "reason"),
    [
        ({"faults": 1}, (fault(1),), "1 fault has struck it within 24 h"),
        ({"faults": 2}, (fault(1), fault(2)), "2 faults have struck it within 24 h"),
        ({"hardware_faults": 1}, (flip(1),), "its hardware is blamed for 1 fault within 24 h"),
    ],
)
def test_the_reason_names_the_number_of_faults(
    bound: dict[str, int], faults: tuple[Incident, ...], reason: str
) -> None:
    assert node_exclusion.due(struck(*faults), NOW, QuarantinePolicy(**bound))[B].reason == reason  # type: ignore[arg-type]


def test_only_quarantines_in_force_are_listed() -> None:
    over, still = Quarantine(reason="x", until_s=NOW), Quarantine(reason="x", until_s=NOW + 1)
    entries = {NodeId("n10"): still, NodeId("n9"): still, A: over}
    assert [*quarantine.in_force(world(quarantine=entries), NOW)] == ["n9", "n10"]


def test_the_controller_writes_a_quarantine_before_it_answers_the_fault() -> None:
    decision = decide(struck(flip(1), flip(2)), NOW, Policy())
    assert list(decision.quarantine) == [B]
    assert decision.record is None


@pytest.mark.parametrize(("there", "code"), [("ab", 5), ("abc", 0)])
def test_who_is_shut_out_and_trains_all_the_same_has_its_budgets(there: str, code: int) -> None:
    """The job cannot do without it: what fails there is the script's own error, if anything is. Where it can, the other one takes over."""
    left = gone(rank=2, at_s=NOW - 2, code=1, error="X")
    before = raised(1, generation=1, signature=f"script_raised:1:{left.error}")
    judged = struck(before, there=there)
    told = {A: status(), B: status(exits=(left,))}
    judged = replace(judged, status=told, quarantine={B: Quarantine(reason="bad", until_s=NOW + HOUR)})
    decided = decide(judged, NOW, Policy()).record
    assert decided
    assert (decided.exit_code, B in decided.members) == (code, bool(code))


@pytest.mark.parametrize("bad", [{"faults": 0}, {"hardware_faults": 0}, {"within_h": 0.0}, {"lasts_h": 0.0}])
def test_a_policy_with_impossible_values_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="quarantine"):
        QuarantinePolicy(**bad)  # type: ignore[arg-type]
