"""Board pages, round by round → what is known of each rank."""

from mt_resilient.agent.monitor.rank_progress import LONGEST_ROUND_S, Hearing
from mt_resilient.resilience.detect.hang_rules import Progress
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES, Rewound
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.rewind import Remedy
from mt_resilient.resilience.model.types import Doing, RankPhase

SECOND = 1_000_000_000


class Rank:
    """One rank that is heard every second."""

    def __init__(self, warmup_steps: int = 3) -> None:
        self.page = Page(memoryview(bytearray(PAGE_BYTES)))
        self.page.clear(1, rank=4)
        self.hearing, self.now_s = Hearing(warmup_steps), 1000.0
        self.heard()

    def heard(self, after_s: float = 1.0) -> Progress:
        self.now_s += after_s
        return self.hearing.listen([self.page], [0], self.now_s)[0]

    def trains(self) -> None:
        self.page.pid, self.page.phase, self.page.built_ns = 7, RankPhase.TRAINING, 1

    def beat(self, step: int) -> None:
        self.page.beat(step, 1.0, 1.0, round(self.now_s * SECOND))


def test_silence_is_counted_from_the_last_sign_of_life() -> None:
    rank = Rank()
    rank.trains()
    assert [rank.heard().silent_s for _ in range(3)] == [0, 1, 2]
    rank.beat(1)
    assert [rank.heard().silent_s for _ in range(2)] == [0, 1]
    rank.page.doing = Doing.EVALUATION
    told = rank.heard()
    assert (told.silent_s, told.doing, told.rank) == (0, Doing.EVALUATION, 4)


def test_time_in_which_nobody_listened_is_no_silence() -> None:
    rank = Rank()
    rank.trains()
    rank.heard()
    assert rank.heard(after_s=500).silent_s == LONGEST_ROUND_S
    assert rank.hearing.gap_s == 500


def test_what_steps_took() -> None:
    rank = Rank()
    rank.trains()
    rank.heard()
    for step in (10, 11, 13):
        rank.now_s += 5
        rank.beat(step)
        told = rank.heard()
    assert list(told.steps_s) == [6.0, 3.0]
    assert told.done == 4


def test_steps_that_were_done_before_the_rank_was_heard_first() -> None:
    """Eleven in the time between two rounds: it is through with its first ones."""
    rank = Rank()
    rank.trains()
    rank.page.first_step, rank.page.stepped_ns = 8, round(rank.now_s * SECOND)
    rank.now_s += 5
    rank.beat(18)
    told = rank.heard()
    assert (told.done, list(told.steps_s)) == (11, [0.5])
    fresh = Rank()
    fresh.trains()
    fresh.page.first_step, fresh.page.stepped_ns = 1, round(fresh.now_s * SECOND)
    fresh.beat(1)
    told = fresh.heard()
    assert (told.done, list(told.steps_s)) == (1, [])


def test_a_rewind_is_no_step_and_has_the_time_of_a_start_until_the_next_one() -> None:
    rank = Rank()
    rank.trains()
    for step in (10, 11):
        rank.beat(step)
        rank.heard()
    at_ns = round(rank.now_s * SECOND)
    rank.page.rewound(
        Rewound(
            kind=Kind.NON_FINITE,
            onset=11,
            reached=11,
            to=9,
            remedy=Remedy.REPLAY,
            window=None,
            value=0.0,
            expected=0.0,
            at_ns=at_ns,
            done_ns=at_ns + 5,
        )
    )
    turned = rank.heard()
    assert (turned.turning, turned.done, len(turned.steps_s)) == (True, 2, 1)
    rank.beat(10)
    told = rank.heard()
    assert (told.turning, told.done) == (False, 3)


def test_the_first_steps_of_a_life_are_measured_by_those_of_the_one_before() -> None:
    rank = Rank()
    rank.trains()
    rank.heard()
    for step, pause in ((1, 40), (2, 3), (3, 1), (4, 90)):
        for _ in range(pause):
            rank.heard()
        rank.beat(step)
        told = rank.heard()
    assert told.warmup_s == 0
    rank.hearing.begin(tells=False)
    assert rank.heard().warmup_s == 41
    rank.hearing.begin(tells=False)  # a life that does not come so far says nothing
    assert rank.heard().warmup_s == 41
    rank.hearing.begin(tells=False, warmup_s=200)
    assert rank.heard().warmup_s == 41, "what this agent has seen itself goes before what others tell"
    new = Rank()
    new.hearing.begin(tells=False, warmup_s=200)
    assert new.heard().warmup_s == 200


def test_whether_a_script_tells_its_steps_is_known_once_its_loop_has_begun() -> None:
    rank = Rank()
    assert not rank.heard().tells
    rank.page.tells = 1
    assert rank.heard().tells
    rank.page.tells = 0  # it is called in another way than known ones
    assert not rank.heard().tells
    rank.page.built_ns = 1
    assert rank.heard().tells
    rank.page.clear(2)
    rank.hearing.begin(tells=False)
    assert rank.heard().tells
    other = Rank()
    other.hearing.begin(tells=True)
    assert other.heard().tells


def test_steps_are_expected_of_a_rank_that_another_one_waits_for_before_its_loop() -> None:
    pages = [Page(memoryview(bytearray(PAGE_BYTES))) for _ in range(2)]
    hearing = Hearing(warmup_steps=3)
    hearing.begin(tells=False)
    pages[0].tells = 1
    assert [each.tells for each in hearing.listen(pages, [0, 1], 1.0).values()] == [True, True]
    pages[0].tells = 0
    assert [each.tells for each in hearing.listen(pages, [0, 1], 2.0).values()] == [False, False]
