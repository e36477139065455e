"""The judgement at a step boundary: a truth table, and the same answer on every rank."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.inprocess.fallback import RescuePolicy
from mt_resilient.resilience.inprocess.loss_level import Level, Low, Outcome, Watch
from mt_resilient.resilience.inprocess.loss_spike import Figure, Finding, SpikePolicy
from mt_resilient.resilience.inprocess.rewind_ladder import Answer
from mt_resilient.resilience.inprocess.tally import (
    ROW,
    Directive,
    Held,
    Judgement,
    RankPolicy,
    Tally,
    Wanted,
    blamed,
    judge,
    left_alone,
    row,
    tally,
)
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.rewind import Remedy, Turn
from mt_resilient.resilience.model.types import Order, Step

POLICY = RankPolicy(spikes=SpikePolicy(baseline_steps=16))
CALM = [Figure(Step(n), 1.0 + 0.01 * (n % 3), 0.5) for n in range(30)]
HIGH = [*CALM[:-2], Figure(Step(28), 9.0, 0.5), Figure(Step(29), 9.0, 0.5)]
"""Two steps of a spike; the next one is its third."""
LEVEL = Level()


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("newest", Held)
@pytest.mark.parametrize("earlier", Held)
@pytest.mark.parametrize("wrong", ["", "nan", "spike", "nan in a spike"])
@pytest.mark.parametrize("same_step", [True, False])
def test_truth_table(same_step: bool, wrong: str, earlier: Held, newest: Held, order: Order) -> None:
    said = Tally(
        step=Step(30),
        same_step=same_step,
        non_finite="nan" in wrong,
        newest=newest,
        earlier=earlier,
        stride=3,
        order=order,
        loss=None if "nan" in wrong else 9.0 if wrong else 1.0,
    )
    judgement = judge(said, HIGH if "spike" in wrong else CALM, LEVEL, [], POLICY)
    if not same_step:  # nothing else that such a tally says can be believed
        expected = Judgement(directive=Directive.DIVERGED)
    elif "nan" in wrong:  # before any order: nobody leaves with, and nothing seals, a state that is wrong
        assert (judgement.directive, judgement.newest, judgement.snapshot) == (Directive.REWIND, Held.UNDER_WAY, False)
        assert judgement.finding
        assert (judgement.finding.kind, judgement.finding.onset) == (Kind.NON_FINITE, 30)
        assert judgement.answer == Answer(remedy=Remedy.REPLAY, at_most=Step(29))
        return
    else:
        directive, snapshot = {
            Order.NONE: (Directive.GO_ON, False),
            Order.STOP: (Directive.LEAVE, False),
            Order.SNAPSHOT_AND_STOP: (Directive.LEAVE, True),
        }[order]
        expected = Judgement(directive=directive, newest=newest, earlier=earlier, stride=3, snapshot=snapshot)
        if wrong:  # a spike mostly passes: it is watched
            assert judgement.finding
            assert (judgement.finding.kind, judgement.finding.onset) == (Kind.LOSS_SPIKE, 28)
            assert judgement.answer == Answer(remedy=Remedy.WAIT, at_most=Step(27))
            assert judgement.level.watch
            judgement = judgement._replace(finding=None, answer=None)
    assert judgement._replace(level=LEVEL) == expected


def test_a_nan_that_follows_a_spike_has_its_onset() -> None:
    watched = LEVEL._replace(watch=Watch(Step(28), Step(30), 1.0, 0.1))
    found = judge(Tally(step=Step(33), non_finite=True), CALM, watched, [], POLICY)
    assert found.answer == Answer(remedy=Remedy.REPLAY, at_most=Step(27))


@pytest.mark.parametrize("answered", [False, True])
def test_a_spike_that_hardware_likely_caused_is_replayed_at_once_and_only_once(answered: bool) -> None:
    done = [Turn(kind=Kind.LOSS_SPIKE, onset=Step(28), to=Step(27), remedy=Remedy.REPLAY)] if answered else []
    said = Tally(step=Step(30), loss=9.0)
    judgement = blamed(judge(said, HIGH, LEVEL, done, POLICY), said, done, POLICY.ladder)
    assert judgement.directive is (Directive.GO_ON if answered else Directive.REWIND)
    assert judgement.answer == Answer(remedy=Remedy.WAIT if answered else Remedy.REPLAY, at_most=Step(27))


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("replays", range(3))
def test_ranks_train_on_after_a_nan_that_does_no_harm(replays: int, order: Order) -> None:
    turns = [Turn(kind=Kind.NON_FINITE, onset=Step(30), to=Step(29), remedy=Remedy.REPLAY)] * replays
    said = Tally(step=Step(30), non_finite=1, order=order, earlier=Held.WHOLE)
    judgement = left_alone(said, judge(said, CALM, LEVEL, turns, POLICY))
    assert judgement.directive is (Directive.GO_ON if order is Order.NONE else Directive.LEAVE)
    assert (judgement.finding, judgement.answer) == (
        Finding(kind=Kind.NON_FINITE, onset=Step(30), seen=Step(30)),
        Answer(remedy=Remedy.LEAVE_ALONE),
    )
    assert (judgement.newest, judgement.earlier) == (Held.MISSED, Held.WHOLE)


def test_what_is_known_of_the_losses_comes_back_from_its_numbers() -> None:
    watch = Watch(Step(3), Step(5), 1.5, 0.25)
    for level in (
        LEVEL._replace(now=0.0),
        Level(
            7.5,
            16,
            2.5,
            2.6,
            0.3,
            Step(9),
            3.5,
            (Low(2.4, 0.1), Low(2.5, 0.2)),
            watch,
            Outcome.BACK,
            (Step(1), Step(2)),
        ),
    ):
        assert Level.of(level.numbers()) == level


@pytest.mark.parametrize("fixed_data", [True, False])
def test_what_no_replay_cures_ends_the_job_where_no_data_can_be_left_out(fixed_data: bool) -> None:
    done = [Turn(kind=Kind.NON_FINITE, onset=Step(30), to=Step(29), remedy=Remedy.REPLAY)] * 2
    said = Tally(step=Step(30), non_finite=True, fixed_data=fixed_data)
    expected = Directive.GIVE_UP if fixed_data else Directive.REWIND
    assert judge(said, CALM, LEVEL, done, POLICY).directive is expected


@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize("non_finite", [True, False])
def test_who_only_observes_goes_on_and_seals_nothing_that_is_wrong(same_step: bool, non_finite: bool) -> None:
    said = Tally(step=Step(30), same_step=same_step, non_finite=non_finite, earlier=Held.WHOLE)
    judgement = judge(said, CALM, LEVEL, [], replace(POLICY, observe=True))
    assert judgement.directive is Directive.GO_ON
    assert (judgement.finding is not None) is non_finite
    assert judgement.newest is (Held.WHOLE if same_step and not non_finite else Held.MISSED)
    assert judgement.earlier is Held.WHOLE


def test_care_is_for_where_the_policy_has_one() -> None:
    done = [
        Turn(kind=Kind.NON_FINITE, onset=Step(30), to=Step(29), remedy=r) for r in (*2 * [Remedy.REPLAY], Remedy.SKIP)
    ]
    for rescue, remedy in ((RescuePolicy(), Remedy.SKIP), (RescuePolicy(precision=True), Remedy.RESCUE)):
        found = judge(Tally(step=Step(30), non_finite=True), CALM, LEVEL, done, replace(POLICY, rescue=rescue)).answer
        assert found
        assert found.remedy is remedy


def test_nan_is_judged_whatever_is_switched_off() -> None:
    off = RankPolicy(spikes=SpikePolicy(enabled=False))
    assert judge(Tally(step=Step(30), non_finite=True), CALM, LEVEL, [], off).directive is Directive.REWIND


tallies = st.builds(
    Tally,
    step=st.integers(0, 2**40).map(Step),
    same_step=st.just(True),
    non_finite=st.booleans(),
    newest=st.sampled_from(Held),
    earlier=st.sampled_from(Held),
    stride=st.integers(1, 2**40),
    wanted=st.sampled_from(Wanted),
    order=st.sampled_from(Order),
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    grad_norm=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    fixed_data=st.booleans(),
    rewind=st.integers(0, 2),
    pause=st.booleans(),
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
        wanted=max(each.wanted for each in told),
        order=max(each.order for each in told),
        loss=max((each.loss for each in told if each.loss is not None), default=None),
        grad_norm=max((each.grad_norm for each in told if each.grad_norm is not None), default=None),
        fixed_data=any(each.fixed_data for each in told),
        rewind=told[0].rewind if len({each.rewind for each in told}) == 1 else 0,
        pause=all(each.pause for each in told),
    )


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("non_finite", [True, False])
def test_what_is_ordered_waits_for_what_is_wrong_and_leaving_goes_before_it(order: Order, non_finite: bool) -> None:
    said = Tally(step=Step(30), non_finite=non_finite, order=order, rewind=7, pause=True)
    judgement = judge(said, CALM, LEVEL, [], POLICY)
    obeyed = order is Order.NONE and not non_finite
    assert (judgement.rewind, judgement.pause) == ((7, True) if obeyed else (0, False))
