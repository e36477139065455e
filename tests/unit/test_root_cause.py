"""Suspicions → verdict: one cause, and the rest are its consequences."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.detect.registry import Suspicion
from mt_resilient.resilience.diagnose.root_cause import HEARD_S, TOGETHER_S, Verdict, judge, settled
from mt_resilient.resilience.model.cause import Cause
from mt_resilient.resilience.model.types import NodeId, Step


def seen(cause: Cause, at_s: float = 0.0, evidence: str = "", started: bool = False) -> Suspicion:
    what = evidence or f"{cause} at {at_s}"
    return Suspicion(
        cause=cause, node=NodeId("a"), at_s=at_s, evidence=what, signature=f"{cause}:{what}", started=started
    )


def judged(suspicions: Sequence[Suspicion]) -> Verdict:
    verdict = judge(suspicions)
    assert verdict
    return verdict


def test_nothing_suspected() -> None:
    assert judge([]) is None


@pytest.mark.parametrize(
    ("cause", "consequence"),
    [
        (Cause.RANK_KILLED, Cause.SCRIPT_RAISED),
        (Cause.AGENT_RESTARTED, Cause.RANK_KILLED),
        (Cause.AGENT_LOST, Cause.SCRIPT_RAISED),
        (Cause.AGENT_LOST, Cause.RANK_KILLED),
        (Cause.NON_FINITE, Cause.SCRIPT_RAISED),
        (Cause.SNAPSHOT_UNUSABLE, Cause.SCRIPT_RAISED),
        (Cause.SNAPSHOT_UNUSABLE, Cause.AGENT_RESTARTED),
        (Cause.NON_FINITE, Cause.RANK_KILLED),
        (Cause.RANK_KILLED, Cause.RANK_HUNG),
        (Cause.SCRIPT_RAISED, Cause.RANK_HUNG),
        *((Cause.FINGERPRINT_MISMATCH, other) for other in Cause if other is not Cause.FINGERPRINT_MISMATCH),
    ],
)
@pytest.mark.parametrize("cause_seen_first", [True, False])
def test_the_cause_among_things_seen_together(cause: Cause, consequence: Cause, cause_seen_first: bool) -> None:
    times = (5.0, 5.0 + TOGETHER_S) if cause_seen_first else (5.0 + TOGETHER_S, 5.0)
    blamed, rest = seen(cause, times[0]), seen(consequence, times[1])
    verdict = judged(sorted([blamed, rest], key=lambda s: s.at_s))
    assert (verdict.cause, verdict.blamed, verdict.consequences) == (cause, (blamed,), (rest,))
    assert verdict.at_s == (5.0 if consequence is not Cause.RANK_HUNG else blamed.at_s)


def test_who_is_gone_is_the_cause_of_those_who_have_hung_for_long() -> None:
    hung, gone = seen(Cause.RANK_HUNG, 5.0), seen(Cause.SCRIPT_RAISED, 600.0)
    verdict = judged([hung, gone])
    assert (verdict.cause, verdict.blamed, verdict.consequences, verdict.at_s) == (
        Cause.SCRIPT_RAISED,
        (gone,),
        (hung,),
        600.0,
    )


def test_of_causes_that_weigh_the_same_it_is_the_first() -> None:
    both = [seen(Cause.NON_FINITE, 5.0), seen(Cause.SNAPSHOT_UNUSABLE, 5.5)]
    assert [verdict.cause for order in permutations(both) if (verdict := judge(order))] == [Cause.NON_FINITE] * 2


def test_the_onset_is_the_first_step_that_anything_says_is_wrong() -> None:
    told = [replace(seen(Cause.RANK_KILLED, 1.0), onset=Step(onset)) for onset in (-1, 7, 0, 9)]
    verdict = judged(told)
    assert verdict.onset == 0
    assert replace(verdict, blamed=told[:1], consequences=(told[3],)).onset == 9  # type: ignore[arg-type]
    assert replace(verdict, blamed=told[:1], consequences=()).onset == -1  # type: ignore[arg-type]


def test_all_that_hang_by_themselves_are_blamed() -> None:
    hung = [seen(Cause.RANK_HUNG, at_s) for at_s in (5.0, 9.0)]
    verdict = judged(hung)
    assert (verdict.blamed, verdict.at_s) == (tuple(hung), 5.0)


def test_what_comes_later_is_a_consequence_whatever_it_is() -> None:
    first, later = seen(Cause.SCRIPT_RAISED, 5.0), seen(Cause.RANK_KILLED, 5.0 + TOGETHER_S + 0.01)
    verdict = judged([first, later])
    assert (verdict.blamed, verdict.consequences) == ((first,), (later,))


def test_all_killed_ranks_are_blamed_but_only_the_first_that_raised() -> None:
    killed = [seen(Cause.RANK_KILLED, at_s) for at_s in (1.0, 1.1)]
    raised = [seen(Cause.SCRIPT_RAISED, at_s) for at_s in (1.0, 1.1, 1.2)]
    both = judged(killed)
    one = judged(raised)
    assert both.blamed == tuple(killed)
    assert (one.blamed, one.consequences) == (tuple(raised[:1]), tuple(raised[1:]))


@pytest.mark.parametrize(
    ("cause", "errors", "nodes"),
    [
        (Cause.SCRIPT_RAISED, ("X", "X", "X"), "abc"),
        (Cause.SCRIPT_RAISED, ("X", "closed by a", "X"), "ac"),
        (Cause.SCRIPT_RAISED, ("X", "closed by a", "closed by a"), "a"),
        (Cause.RANK_KILLED, ("X", "Y", "Z"), "abc"),
    ],
)
def test_which_nodes_a_verdict_names(cause: Cause, errors: tuple[str, ...], nodes: str) -> None:
    """Who raises the same as the first does so by itself."""
    all_seen = [replace(seen(cause, 1 + n / 10, e), node=NodeId("abc"[n])) for n, e in enumerate(errors)]
    verdict = judged(all_seen)
    assert verdict.nodes == tuple(nodes)


def test_started_and_signature_are_those_of_the_blamed() -> None:
    blamed = seen(Cause.RANK_KILLED, 1.0)
    verdict = judged([blamed, seen(Cause.SCRIPT_RAISED, 1.0, started=True)])
    assert not verdict.started
    assert verdict.signature == blamed.signature
    started = judged([blamed, seen(Cause.RANK_KILLED, 1.1, started=True)])
    assert started.started


def test_the_sentence_says_once_what_every_rank_says() -> None:
    verdict = judged([seen(Cause.NON_FINITE, 1.0, "step 5 gave NaN"), seen(Cause.NON_FINITE, 1.1, "step 5 gave NaN")])
    assert verdict.describe() == "step 5 gave NaN"
    two = judged([seen(Cause.RANK_KILLED, 1.0, "rank 0 was killed"), seen(Cause.RANK_KILLED, 1.1, "rank 1 was killed")])
    assert two.describe() == "rank 0 was killed; rank 1 was killed"


times = st.floats(0, 3, allow_nan=False)


@given(st.lists(st.builds(seen, st.sampled_from(Cause), times), min_size=1, max_size=8))
def test_everything_is_either_blamed_or_a_consequence(suspicions: list[Suspicion]) -> None:
    suspicions = sorted(suspicions, key=lambda s: s.at_s)
    verdict = judged(suspicions)
    sudden = [s for s in suspicions if s.cause is not Cause.RANK_HUNG] or suspicions
    assert verdict.at_s == sudden[0].at_s
    assert {s.cause for s in verdict.blamed} == {verdict.cause}
    assert {*verdict.blamed, *verdict.consequences} == set(suspicions)
    assert verdict.blamed[0].at_s - verdict.at_s <= TOGETHER_S
    assert verdict.cause is not Cause.RANK_HUNG or sudden is suspicions


def test_the_order_of_telling_does_not_change_the_cause() -> None:
    told = [seen(Cause.SCRIPT_RAISED, 1.0), seen(Cause.RANK_KILLED, 1.1), seen(Cause.AGENT_RESTARTED, 1.2)]
    causes = {verdict.cause for order in permutations(told) if (verdict := judge(order))}
    assert causes == {Cause.AGENT_RESTARTED}


@pytest.mark.parametrize(
    ("cause", "unheard", "after_s", "settles"),
    [
        (Cause.SCRIPT_RAISED, True, 0.1, False),
        (Cause.SCRIPT_RAISED, True, HEARD_S, True),
        (Cause.SCRIPT_RAISED, True, -0.1, False),  # a clock that is a little ahead
        (Cause.SCRIPT_RAISED, True, -3600.0, True),
        (Cause.SCRIPT_RAISED, False, 0.1, True),
        (Cause.RANK_KILLED, True, 0.1, True),
        (Cause.AGENT_LOST, True, 0.1, True),
    ],
)
def test_an_exception_waits_for_what_other_nodes_have_seen(
    cause: Cause, unheard: bool, after_s: float, settles: bool
) -> None:
    verdict = judged([seen(cause, at_s=5000.0)])
    assert settled(verdict, unheard, 5000.0 + after_s) is settles
