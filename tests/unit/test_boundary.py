"""The judgement at a step boundary: a truth table, and the same answer on every rank."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.boundary import ROW, Directive, Held, Judgement, Tally, judge, row, tally
from mt_resilient.resilience.signals import Order, Step


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("newest", Held)
@pytest.mark.parametrize("earlier", Held)
@pytest.mark.parametrize("replays", [0, 1, 2, 3])
@pytest.mark.parametrize("non_finite", [True, False])
@pytest.mark.parametrize("same_step", [True, False])
def test_truth_table(
    same_step: bool, non_finite: bool, replays: int, earlier: Held, newest: Held, order: Order
) -> None:
    said = Tally(
        step=Step(7), same_step=same_step, non_finite=non_finite, newest=newest, earlier=earlier, stride=3, order=order
    )
    judgement = judge(said, replays, max_replays=2)
    if not same_step:  # nothing else that such a tally says can be believed
        expected = Judgement(directive=Directive.DIVERGED, step=Step(7))
    elif non_finite:  # before any order: nobody leaves with, and nothing seals, a state that is not finite
        expected = Judgement(directive=Directive.REWIND if replays < 2 else Directive.GIVE_UP, step=Step(7))
    else:
        directive, snapshot = {
            Order.NONE: (Directive.GO_ON, False),
            Order.STOP: (Directive.LEAVE, False),
            Order.SNAPSHOT_AND_STOP: (Directive.LEAVE, True),
        }[order]
        expected = Judgement(
            directive=directive, step=Step(7), newest=newest, earlier=earlier, stride=3, snapshot=snapshot
        )
    assert judgement == expected


tallies = st.builds(
    Tally,
    step=st.integers(0, 2**40).map(Step),
    non_finite=st.booleans(),
    newest=st.sampled_from(Held),
    earlier=st.sampled_from(Held),
    stride=st.integers(1, 2**40),
    durable=st.booleans(),
    order=st.sampled_from(Order),
)


@given(tallies)
def test_a_row_alone_is_its_own_tally(said: Tally) -> None:
    assert len(row(said)) == ROW
    assert tally(row(said)) == said


@given(st.lists(tallies, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_tally_is_the_worst_that_any_rank_says_in_whatever_order(told: list[Tally], chance: random.Random) -> None:
    shuffled = list(told)
    chance.shuffle(shuffled)
    found, other = (tally([max(column) for column in zip(*map(row, rows), strict=True)]) for rows in (told, shuffled))
    assert found == other
    assert found == Tally(
        step=max(each.step for each in told),
        same_step=len({each.step for each in told}) == 1,
        non_finite=any(each.non_finite for each in told),
        newest=max(each.newest for each in told),
        earlier=max(each.earlier for each in told),
        stride=max(each.stride for each in told),
        durable=any(each.durable for each in told),
        order=max(each.order for each in told),
    )
