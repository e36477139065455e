"""Own times, sample by sample → who is slow: rule, false alarms, delay."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.agent.monitor.step_times import Strides
from mt_resilient.resilience.detect.straggler import Answer, Sample, Spent, StragglerPolicy, look, over
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.signals import Lost, Straggler
from mt_resilient.resilience.model.types import Rank, RankPhase, Step
from mt_resilient.resilience.text import sentences

POLICY = StragglerPolicy()
CALM = POLICY.baseline_samples


def noisy(ranks: int, seed: int, even: bool = True) -> Iterator[Sample]:
    """3 % from step to step, 2 % that lasts, 5 % that all ranks share, and one step in a hundred up to three times as long."""
    rng = random.Random(seed)
    base = [1.0 if even else rng.uniform(0.8, 1.2) for _ in range(ranks)]
    lasting = [0.0] * ranks
    while True:
        shared, sample = rng.lognormvariate(0, 0.05), []
        for rank in range(ranks):
            lasting[rank] = 0.95 * lasting[rank] + rng.gauss(0, 0.02 * (1 - 0.95**2) ** 0.5)
            own_s = base[rank] * shared * rng.lognormvariate(0, 0.03) * (1 + lasting[rank])
            sample.append(Spent(own_s * (rng.uniform(1, 3) if rng.random() < 0.01 else 1.0)))
        yield sample


def slowed(sample: Sample, rank: int, factor: float) -> Sample:
    return [Spent(spent.own_s * factor) if n == rank else spent for n, spent in enumerate(sample)]


def certain(history: list[Sample], rank: int) -> bool:
    found = look(history, rank, POLICY)
    return found is not None and found.answer is Answer.CERTAIN


def test_clean_ranks_are_not_accused() -> None:
    """In small; the module's docstring has the figures of 100,000 samples."""
    source, history = noisy(8, seed=3, even=False), []
    for _ in range(1500):
        history = [*history, next(source)][-POLICY.baseline_samples - POLICY.window_samples :]
        assert not any(certain(history, rank) for rank in range(8))


def test_a_rank_that_becomes_slow_is_found_within_two_windows() -> None:
    found = 0
    for seed in range(20):
        source = noisy(4, seed)
        history = [next(source) for _ in range(CALM)]
        for _ in range(2 * POLICY.window_samples):
            history.append(slowed(next(source), 2, 1.3))
            if certain(history, 2):
                found += 1
                break
    assert found >= 19


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(1.2, 5.0), st.integers(2, 6))
def test_what_slows_all_alike_accuses_nobody(seed: int, factor: float, ranks: int) -> None:
    source = noisy(ranks, seed)
    history = [next(source) for _ in range(CALM)]
    later = [[Spent(spent.own_s * factor) for spent in next(source)] for _ in range(POLICY.window_samples)]
    assert not any(certain([*history, *later], rank) for rank in range(ranks))


STEADY: Sample = [Spent(1.0), Spent(1.0), Spent(0.5), Spent(1.0)]
"""The third rank has less to do."""


@pytest.mark.parametrize(
    ("rank", "factor", "window", "answer"),
    [
        (1, 1.09, 10, None),
        (1, 1.2, 10, Answer.CERTAIN),
        (1, 1.2, 6, Answer.SUSPECTED),
        (1, 1.2, 4, None),
        (2, 1.5, 10, None),  # slower than it was, and holds up nobody
        (2, 3.0, 10, Answer.CERTAIN),
        (0, 0.5, 10, None),
    ],
)
def test_a_straggler_is_denied_suspected_or_certain(
    rank: int, factor: float, window: int, answer: Answer | None
) -> None:
    """window: slow samples at the end."""
    history = [*[STEADY] * CALM, *[slowed(STEADY, rank, factor)] * window]
    found = look(history, rank, POLICY)
    assert (found.answer if found else None) == answer


def test_twice_the_peers_time_from_the_start_is_too_much() -> None:
    history = [slowed(STEADY, 1, 2.2)] * (CALM // 2 + POLICY.window_samples)
    found = look(history, 1, POLICY)
    assert found
    assert (found.answer, found.usual) == (Answer.CERTAIN, 0.0)
    assert look(history[1:], 1, POLICY) is None, "too little is known"


@pytest.mark.parametrize(("usual", "said", "ratio"), [(0.0, "is slow", False), (1.1, "has become slow", True)])
def test_only_a_rank_that_was_faster_has_become_slow(usual: float, said: str, ratio: bool) -> None:
    found = Straggler(rank=Rank(1), at_s=0.0, step=Step(9), own_s=2.2, peers_s=1.0, usual=usual, lost=Lost.COMPUTING)
    assert said in sentences.straggler(found, "n1")
    assert ("usual ratio" in sentences.straggling(found)[0]) is ratio


def test_who_works_on_while_the_others_have_less_to_do_is_not_slower() -> None:
    later: Sample = [Spent(1.0), *(Spent(spent.own_s / 2) for spent in STEADY[1:])]
    assert look([*[STEADY] * CALM, *[later] * POLICY.window_samples], 0, POLICY) is None


@pytest.mark.parametrize(
    ("after", "lost"),
    [
        (Spent(2.0, 1.9, 0.1), Lost.COMPUTING),
        (Spent(2.0, 1.3, 0.7), Lost.COMPUTING),  # on a machine where one has to queue
        (Spent(2.0, 0.9, 1.1), Lost.QUEUED),
        (Spent(2.0, 0.9, 0.1), Lost.ASLEEP),
    ],
)
def test_where_the_extra_time_of_a_straggler_goes(after: Spent, lost: Lost) -> None:
    before: Sample = [Spent(1.0, 0.85, 0.1)] * 2
    found = look([*[before] * CALM, *[[before[0], after]] * POLICY.window_samples], 1, POLICY)
    assert found
    assert found.lost is lost


def test_it_is_over_when_the_rank_is_as_fast_again() -> None:
    slow = [*[STEADY] * CALM, *[slowed(STEADY, 1, 1.5)] * POLICY.window_samples]
    assert not over(slow, 1, 1.0, POLICY)
    assert over([*slow, *[STEADY] * POLICY.window_samples], 1, 1.0, POLICY)


@pytest.mark.parametrize("field", ["shift", "factor", "sample_s", "window_samples", "baseline_samples"])
def test_wrong_configuration_is_named(field: str) -> None:
    with pytest.raises(UsageError, match=rf"stragglers\.{field} is 0"):
        StragglerPolicy(**{field: 0})


# -- the agent's side ----------------------------------------------------------------------------------------------------


def pages(ranks: int) -> list[Page]:
    found = [Page(memoryview(bytearray(PAGE_BYTES))) for _ in range(ranks)]
    for rank, page in enumerate(found):
        page.clear(1, rank)
        page.pid, page.phase = 100 + rank, RankPhase.TRAINING
    return found


def test_pages_become_samples_and_a_straggler_comes_and_goes() -> None:
    board, strides, now_s, news = pages(2), Strides(POLICY), 0.0, []
    for times in (
        [1] * 70 + [15] * 40 + [1] * 15 + [1.5] * 12
    ):  # its slow days are not what it is measured by afterwards
        now_s += 2.0
        for rank, page in enumerate(board):
            for _ in range(3):
                page.timed(int(10_000_000 * (times if rank == 1 else 1)), 9_000_000, 0)
        if strides.look(board, now_s, 500.0):
            news.append([told.rank for told in strides.stragglers])
    assert news == [[1], [], [1]]


def test_nothing_is_said_while_ranks_turn_back_or_are_alone() -> None:
    board, strides = pages(2), Strides(POLICY)
    for turn in range(5):
        for page in board:
            page.timed(10, 10, 0)
            page.rewinds = turn
        strides.look(board, 10.0 * turn, 500.0)
    assert not strides.newest
    assert not Strides(POLICY).look(board[:1], 5.0, 500.0)
