"""The judgement at a step boundary: a truth table, and the same answer on every rank."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.boundary import ROW, Directive, Tally, judge, row, tally
from mt_resilient.resilience.signals import Order, Step


def said(
    same_step: bool = True, non_finite: bool = False, staged: bool = True, order: Order = Order.NONE, step: int = 7
) -> Tally:
    return Tally(step=Step(step), same_step=same_step, non_finite=non_finite, staged=staged, order=order)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("replays", [0, 1, 2, 3])
@pytest.mark.parametrize("non_finite", [True, False])
@pytest.mark.parametrize("same_step", [True, False])
def test_truth_table(same_step: bool, non_finite: bool, replays: int, staged: bool, order: Order) -> None:
    judgement = judge(said(same_step, non_finite, staged, order), replays, max_replays=2)
    assert judgement.step == 7
    if not same_step:  # nothing else that such a tally says can be believed
        expected = (Directive.DIVERGED, False, False)
    elif non_finite:  # before any order: nobody leaves with, and nothing seals, a state that is not finite
        expected = (Directive.REWIND if replays < 2 else Directive.GIVE_UP, False, False)
    else:
        expected = {
            Order.NONE: (Directive.GO_ON, staged, False),
            Order.STOP: (Directive.LEAVE, staged, False),
            Order.SNAPSHOT_AND_STOP: (Directive.LEAVE, staged, True),
        }[order]
    assert (judgement.directive, judgement.seal, judgement.snapshot) == expected


@given(st.integers(0, 2**40), st.booleans(), st.booleans(), st.sampled_from(Order))
def test_a_row_alone_is_its_own_tally(step: int, finite: bool, staged: bool, order: Order) -> None:
    one = row(step, finite, staged, order)
    assert len(one) == ROW
    assert tally(one) == said(non_finite=not finite, staged=staged, order=order, step=step)


ranks = st.tuples(st.integers(0, 3), st.booleans(), st.booleans(), st.sampled_from(Order))


@given(st.lists(ranks, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_tally_is_what_all_ranks_say_in_whatever_order(
    contributions: list[tuple[int, bool, bool, Order]], chance: random.Random
) -> None:
    shuffled = list(contributions)
    chance.shuffle(shuffled)
    tallies = [
        tally([max(column) for column in zip(*(row(*c) for c in told), strict=True)])
        for told in (contributions, shuffled)
    ]
    steps, finite, staged, orders = zip(*contributions, strict=True)
    assert tallies[0] == tallies[1]
    assert tallies[0] == said(len(set(steps)) == 1, not all(finite), all(staged), max(orders), max(steps))
