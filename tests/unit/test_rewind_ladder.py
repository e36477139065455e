"""What the ranks do about a step that is wrong, the first time and each time again."""

import math
from dataclasses import replace

import pytest

from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.inprocess.loss_spike import Finding
from mt_resilient.resilience.inprocess.rewind_ladder import (
    Answer,
    LadderPolicy,
    answer,
    done,
    goes_on,
    goes_to,
    origin,
    same_fault,
)
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.data_windows import Window, merged
from mt_resilient.resilience.model.rewind import Origin, Remedy, Turn, left_out
from mt_resilient.resilience.model.types import OrderedBy, Step

POLICY = LadderPolicy()


def found(onset: int, kind: Kind = Kind.LOSS_DIVERGENCE) -> Finding:
    return Finding(kind=kind, onset=Step(onset), seen=Step(onset + 2))


def turn(onset: int, remedy: Remedy, to: int = 0) -> Turn:
    return Turn(kind=Kind.LOSS_DIVERGENCE, onset=Step(onset), to=Step(to), remedy=remedy)


R, E, S = Remedy.REPLAY, Remedy.REPLAY_EARLIER, Remedy.SKIP


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        ([], Answer(remedy=R, at_most=Step(999))),
        ([R], Answer(remedy=E, at_most=Step(899))),
        ([R, E], Answer(remedy=S, at_most=Step(899), before=100, after=100)),
        ([R, E, S], Answer(remedy=S, at_most=Step(799), before=200, after=200)),
        ([R, E, S, S], Answer(remedy=S, at_most=Step(599), before=400, after=400)),
        ([R, E, S, S, S], Answer(remedy=Remedy.CONTINUE, at_most=Step(999))),
        ([R, E, S, S, S, Remedy.CONTINUE], Answer(remedy=Remedy.CONTINUE, at_most=Step(999))),
    ],
)
def test_the_rungs_of_a_loss_that_has_diverged(past: list[Remedy], expected: Answer) -> None:
    turns = [turn(1000, remedy) for remedy in past]
    assert answer(found(1000), turns, POLICY, skippable=True) == expected


def test_the_remedies_end_if_harder_data_comes_sooner_by_what_was_left_out() -> None:
    turns: list[Turn] = []
    data = 4001  # the first harder batch's step
    for _ in range(6):
        remedy = answer(found(data), turns, POLICY, skippable=True)
        window = remedy.window(Step(data), Step(max(0, remedy.at_most)), ())
        turns.append(replace(turn(data, remedy.remedy), window=window))
        data -= remedy.before
    assert [each.remedy for each in turns] == [R, E, S, S, S, Remedy.CONTINUE]


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        ([], Answer(remedy=R, at_most=Step(999))),
        ([R], Answer(remedy=E, at_most=Step(899))),
        ([R, E], Answer(remedy=S, at_most=Step(999), after=1)),
        ([R, E, S], Answer(remedy=S, at_most=Step(999), after=2)),
        ([R, R, S, S], Answer(remedy=S, at_most=Step(999), after=4)),
        ([R, E, S, S, S], Answer(remedy=Remedy.GIVE_UP)),
    ],
)
def test_the_rungs_of_a_step_that_gives_nan(past: list[Remedy], expected: Answer) -> None:
    turns = [turn(1000, remedy) for remedy in past]
    assert answer(found(1000, Kind.NON_FINITE), turns, POLICY, skippable=True) == expected


def test_leaving_data_out_again_comes_with_care_where_one_is_set() -> None:
    turns = [turn(1000, remedy) for remedy in (R, E, S)]
    expected = Answer(remedy=Remedy.RESCUE, at_most=Step(799), before=200, after=200)
    assert answer(found(1000), turns, POLICY, skippable=True, rescue=True) == expected
    first = answer(found(1000), turns[:2], POLICY, skippable=True, rescue=True)
    assert first == answer(found(1000), turns[:2], POLICY, skippable=True)
    rescued = [*turns, turn(1000, Remedy.RESCUE), turn(1000, Remedy.RESCUE)]
    assert answer(found(1000), rescued, POLICY, skippable=True, rescue=True).remedy is Remedy.CONTINUE


@pytest.mark.parametrize("kind", [Kind.LOSS_SPIKE, Kind.GRADIENT_SPIKE])
def test_a_spike_is_waited_out(kind: Kind) -> None:
    expected = Answer(remedy=Remedy.WAIT, at_most=Step(999))
    assert answer(found(1000, kind), [turn(1000, R)], POLICY, skippable=True) == expected


@pytest.mark.parametrize("past", [[R, E], [R, R], [R, E, S]])
@pytest.mark.parametrize(
    ("kind", "end_job", "last"),
    [
        (Kind.NON_FINITE, False, Remedy.GIVE_UP),
        (Kind.LOSS_DIVERGENCE, False, Remedy.CONTINUE),
        (Kind.LOSS_DIVERGENCE, True, Remedy.GIVE_UP),
    ],
)
def test_the_last_rung_of_a_script_that_cannot_leave_data_out(
    kind: Kind, end_job: bool, last: Remedy, past: list[Remedy]
) -> None:
    turns = [turn(1000, remedy) for remedy in past]
    assert answer(found(1000, kind), turns, LadderPolicy(end_job=end_job), skippable=False).remedy is last


@pytest.mark.parametrize(("past", "again"), [([R], E), ([R, E], S), ([R, E, S], S)])
def test_a_nan_that_was_cured_does_not_count_against_the_next_one(past: list[Remedy], again: Remedy) -> None:
    """A bad sample in short epochs gives NaN again and again; so does a device that fails now and then."""
    bad = [Turn(kind=Kind.NON_FINITE, onset=Step(79), to=Step(78), remedy=remedy) for remedy in past]
    for onset, remedy in ((70, again), (79, again), (88, again), (89, R), (151, R)):
        assert answer(found(onset, Kind.NON_FINITE), bad, POLICY, skippable=True).remedy is remedy


def test_once_a_nan_was_cured_by_leaving_data_out_one_replay_tells_of_the_next() -> None:
    cured, again = ([Turn(kind=Kind.NON_FINITE, onset=Step(at), to=Step(at - 1), remedy=R)] for at in (79, 151))
    skip = [Turn(kind=Kind.NON_FINITE, onset=Step(79), to=Step(78), remedy=S)]
    assert answer(found(151, Kind.NON_FINITE), [*cured, *again], POLICY, skippable=True).remedy is E
    assert answer(found(151, Kind.NON_FINITE), [*cured, *skip, *again], POLICY, skippable=True).remedy is S
    assert (
        answer(found(151, Kind.NON_FINITE), [*cured, *skip, *again], POLICY, skippable=False).remedy
        is Remedy.REWIND_EARLIER
    )


def test_nothing_is_said_of_data_that_is_not_known() -> None:
    """It goes back as far as where it is, by remedies of their own: of what is gone then, nothing tells the origin."""
    first = answer(found(1000), [], POLICY, skippable=False)
    assert first == Answer(remedy=Remedy.REWIND, at_most=Step(999))
    second = answer(found(1000), [turn(1000, Remedy.REWIND)], POLICY, skippable=False)
    assert second == Answer(remedy=Remedy.REWIND_EARLIER, at_most=Step(899))
    assert done(second, [turn(1000, Remedy.REWIND, to=800)], Step(800)) is Remedy.REWIND
    assert {origin(first.remedy), origin(second.remedy)} == {Origin.UNDECIDED}


@pytest.mark.parametrize(
    ("policy", "past", "expected"),
    [
        (LadderPolicy(max_replays=3), [R, E], Answer(remedy=E, at_most=Step(799))),
        (LadderPolicy(max_replays=5), [R, E, S], Answer(remedy=S, at_most=Step(799), before=200, after=200)),
        (LadderPolicy(max_skips=0), [R, E], Answer(remedy=Remedy.CONTINUE, at_most=Step(999))),
        (LadderPolicy(skip_steps=5), [R, E], Answer(remedy=S, at_most=Step(899), before=2, after=3)),
        (LadderPolicy(distance_steps=7), [R, E], Answer(remedy=S, at_most=Step(992), before=7, after=100)),
    ],
)
def test_the_rungs_are_what_the_policy_says(policy: LadderPolicy, past: list[Remedy], expected: Answer) -> None:
    turns = [turn(1000, remedy) for remedy in past]
    assert answer(found(1000), turns, policy, skippable=True) == expected


def test_a_rewind_that_was_ordered_is_no_answer_to_a_fault() -> None:
    ordered = Turn(kind=OrderedBy.OPERATOR, onset=Step(1000), to=Step(999), remedy=R)
    assert same_fault(found(1000), [turn(1000, R), ordered], POLICY) == [turn(1000, R)]
    assert answer(found(1000), [ordered], POLICY, skippable=True).remedy is R


def test_near_the_start_it_goes_back_to_the_start() -> None:
    assert answer(found(3), [turn(3, R)], POLICY, skippable=True).at_most == 0
    assert answer(found(1), [], POLICY, skippable=True).at_most == 0


def test_faults_near_each_other_are_one() -> None:
    near, far = turn(900, R), turn(500, R)
    assert same_fault(found(1000), [far, near], POLICY) == [near]
    assert same_fault(found(1000), [turn(650, R), turn(820, E), near], POLICY) == [turn(650, R), turn(820, E), near]
    assert same_fault(found(1000), [turn(800, R)], POLICY)
    assert not same_fault(found(1000), [turn(799, R)], POLICY)
    assert goes_on(Kind.LOSS_DIVERGENCE, 802, found(1000), POLICY)
    assert not goes_on(Kind.LOSS_DIVERGENCE, 801, found(1000), POLICY)
    assert not goes_on(Kind.NON_FINITE, 1000, found(1000), POLICY)
    assert same_fault(found(1000), [near, far], POLICY) == []  # the last one was about something else
    assert same_fault(found(100), [turn(290, R)], POLICY)  # a window that was left out brings a fault forward


def test_what_is_left_out_lies_around_the_onset() -> None:
    skip = Answer(remedy=S, at_most=Step(899), before=100, after=100)
    assert skip.window(Step(1000), Step(850), []) == Window(899, 1099)
    assert skip.window(Step(1000), Step(950), []) == Window(950, 1099)  # nothing older is kept
    assert skip.window(Step(1000), Step(850), [Window(10, 20)]) == Window(909, 1109)
    assert Answer(remedy=S, after=1).window(Step(228), Step(291), []) == Window(
        291, 292
    )  # no state is from before the onset
    assert Answer(remedy=S, after=1).window(Step(7), Step(6), []) == Window(6, 7)
    assert Answer(remedy=R).window(Step(7), Step(6), []) is None


@pytest.mark.parametrize(
    ("remedy", "at_most", "kept", "kind", "then", "to"),
    [
        (R, 999, [900, 950, 1000], Kind.NON_FINITE, R, 950),
        (E, 899, [850, 950], Kind.NON_FINITE, E, 850),
        (E, 899, [950, 960, 1000], Kind.NON_FINITE, E, 950),
        (E, 899, [1000], Kind.NON_FINITE, E, 1000),
        (S, 899, [950, 960, 1000], Kind.LOSS_DIVERGENCE, S, 960),
        (S, 899, [1001, 1002, 1003], Kind.LOSS_DIVERGENCE, Remedy.CONTINUE, 1002),
        (S, 999, [1001], Kind.NON_FINITE, S, 1001),
        (R, 999, [1001], Kind.LOSS_SPIKE, R, -1),
        (R, 999, [], Kind.LOSS_DIVERGENCE, Remedy.CONTINUE, -1),
        (Remedy.GIVE_UP, -1, [900], Kind.NON_FINITE, Remedy.GIVE_UP, -1),
    ],
)
def test_where_the_ranks_rewind_to(
    remedy: Remedy, at_most: int, kept: list[int], kind: Kind, then: Remedy, to: int
) -> None:
    """The fault's onset is step 1000, and the ranks found it at step 1002."""

    def newest(at_most: int) -> int:
        return max((step for step in kept if step <= at_most), default=-1)

    got, step = goes_to(
        Answer(remedy=remedy, at_most=Step(at_most)), found(1000, kind), newest, lambda: min(kept, default=math.inf)
    )
    assert (got.remedy, step) == (then, to)


def test_where_nothing_older_is_kept_an_earlier_replay_is_a_replay() -> None:
    earlier = Answer(remedy=E, at_most=Step(899))
    assert done(earlier, [turn(1000, R, to=999)], Step(890)) is E
    assert done(earlier, [turn(1000, R, to=999)], Step(999)) is R
    assert done(Answer(remedy=S), [turn(1000, R, to=999)], Step(999)) is S


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [
        (R, Origin.TRANSIENT),
        (E, Origin.STATE),
        (S, Origin.DATA),
        (Remedy.GIVE_UP, Origin.UNKNOWN),
        (Remedy.CONTINUE, Origin.UNKNOWN),
    ],
)
def test_the_remedy_that_cured_it_tells_where_it_came_from(remedy: Remedy, expected: Origin) -> None:
    assert origin(remedy) is expected


@pytest.mark.parametrize("values", [{"max_replays": 0}, {"skip_steps": 0}, {"max_skips": -1}, {"settled_steps": -1}])
def test_policies_that_make_no_sense_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        LadderPolicy(**values)


L, N = Kind.LOSS_DIVERGENCE, Kind.NON_FINITE


@pytest.mark.parametrize(
    ("skips", "back_to", "left"),
    [
        ([(L, 899, 900, 1100), (L, 799, 1100, 1500)], 799, []),
        ([(L, 500, 600, 800), (L, 799, 1100, 1500)], 799, [Window(600, 800)]),  # the state was computed without these
        ([(N, 900, 900, 901), (L, 799, 1100, 1500)], 799, [Window(900, 901)]),  # this one did help
        ([(OrderedBy.OPERATOR, 900, 900, 910)], 799, [Window(900, 910)]),
    ],
)
def test_data_that_was_left_out_in_vain_is_used_once_the_ranks_train_on(
    skips: list[tuple[str, int, int, int]], back_to: int, left: list[Window]
) -> None:
    turns = [
        Turn(kind=kind, onset=Step(to + 1), to=Step(to), remedy=S, window=Window(first, after))
        for kind, to, first, after in skips
    ]
    trains_on = Turn(kind=L, onset=Step(back_to + 1), to=Step(back_to), remedy=Remedy.CONTINUE)
    assert left_out(turns) == merged(turn.window for turn in turns if turn.window)
    assert list(left_out([*turns, trains_on])) == left
