"""Board pages and ended processes → this node's status."""

import math
from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.agent.ranks.status_report import ended_well, exits, reached, rewinds, status
from mt_resilient.agent.ranks.worker_group import Watched, WorkerGroup
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES, Rewound
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.node import NodeStatus
from mt_resilient.resilience.model.rewind import Remedy
from mt_resilient.resilience.model.signals import RankExit, Repeated
from mt_resilient.resilience.model.types import Generation, Rank, RankPhase, Step

from .stalls import stall

NOW = 2000.0
OFFSET_S = 1000.0
"""The wall clock is that much ahead of the monotonic one."""


def pages(phase: RankPhase = RankPhase.TRAINING, step: int = 10, **fields: int) -> list[Page]:
    """Of global ranks 4 and 5, both alike."""
    made = [Page(memoryview(bytearray(PAGE_BYTES))) for _ in range(2)]
    for local_rank, page in enumerate(made):
        page.clear(generation=3, rank=4 + local_rank)
        page.pid, page.phase, page.step = 100 + local_rank, phase, step
        page.stepped_ns = 5 if step >= 0 else 0
        for name, value in fields.items():
            setattr(page, name, value)
    return made


def group(*codes: object, launcher: int | str | None = "alive", at_s: float = NOW) -> WorkerGroup:
    """codes: by local rank, `alive`, or the exit code, None where the kernel does not tell."""

    def watched(pid: int, code: object) -> Watched:
        alive = code == "alive"
        return Watched(pid, -1, ended_s=0.0 if alive else at_s, code=None if alive else code)  # type: ignore[arg-type]

    ranks = {local_rank: watched(100 + local_rank, code) for local_rank, code in enumerate(codes)}
    return WorkerGroup(3, watched(99, launcher), "warm", ranks)


@pytest.mark.parametrize(("code", "told"), [(-15, 1), (-6, 1), (3, 3), (-2, -2)])
def test_a_rank_that_has_told_its_exception_ended_by_it(code: int, told: int) -> None:
    """Both ranks raise; the launcher sees one gone, and sends the other, which is on its way out, a signal."""
    board = pages(RankPhase.ATTACHED, step=-1)
    board[0].say_farewell(error="FileNotFoundError: train.bin")
    assert [gone.code for gone in exits(group(code, "alive"), board)] == [told]


# -- which end was meant -----------------------------------------------------------------------------------------------------

BY_CODE = {0: True, 1: False, -9: False}
WITHOUT_CODE: dict[RankPhase, dict[int | None, bool | None]] = {
    RankPhase.ABSENT: {None: None, 0: True, 1: False},
    RankPhase.ATTACHED: {None: None, 0: True, 1: False},  # it may be a script that trains nothing
    RankPhase.RESTORING: {None: False, 0: False, 1: False},
    RankPhase.TRAINING: {None: False, 0: False, 1: False},
    RankPhase.FINISHED: {None: None, 0: True, 1: False},
    RankPhase.STOPPED: {None: None, 0: True, 1: False},
}
"""Phase → the launcher's code, None while it lives → whether the rank ended well, None: not yet known."""


@pytest.mark.parametrize("phase", RankPhase)
@pytest.mark.parametrize("launcher", [None, 0, 1])
def test_ended_well(phase: RankPhase, launcher: int | None) -> None:
    for code, well in BY_CODE.items():
        assert ended_well(phase, code, launcher) is well
    assert ended_well(phase, None, launcher) is WITHOUT_CODE[phase][launcher]


@pytest.mark.parametrize(("code", "well"), [(0, True), (-6, True), (-15, True), (1, False)])
def test_what_ends_a_rank_in_its_teardown_does_not_matter(code: int, well: bool) -> None:
    assert ended_well(RankPhase.FINISHED, code, 1, left=True) is well


@pytest.mark.parametrize(("launcher", "well"), [(None, None), (0, True), (1, False)])
def test_a_script_that_was_over_and_whose_code_a_wrapper_has_taken(launcher: int | None, well: bool | None) -> None:
    assert ended_well(RankPhase.TRAINING, None, launcher, left=True) is well


def test_a_job_is_done_when_all_scripts_were_over_whatever_the_launcher_says() -> None:
    board = pages(phase=RankPhase.FINISHED, step=9, left=1)
    told = said(group(-6, -15, launcher=1), board)
    assert (told.finished, told.exits) == (True, ())
    for page in board:
        page.say_seen(page.pid, -6)
    told = said(group(-6, -6, launcher=1), board)
    assert (told.finished, told.exits) == (True, ()), "the launcher saw that teardown too"
    board = pages(phase=RankPhase.FINISHED, step=9, left=1)
    board[1].left = 0
    told = said(group(-6, -15, launcher=1), board)
    assert not told.finished
    assert [gone.code for gone in told.exits] == [-15]


# -- exits ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("watched", "phase", "gone"),
    [
        (group("alive", "alive"), RankPhase.TRAINING, []),
        (group(-9, "alive"), RankPhase.TRAINING, [4]),
        (group("alive", 1), RankPhase.TRAINING, [5]),
        (group(-9, 1, launcher=1), RankPhase.TRAINING, [4, 5]),
        (group(1, 0, launcher=1), RankPhase.TRAINING, [4, 5]),  # who left early may be what the other failed of
        (group("alive", 0), RankPhase.TRAINING, []),
        (group(0, 0, launcher=0), RankPhase.TRAINING, []),
        (group(0, "alive"), RankPhase.FINISHED, []),
        (group(0, 0, launcher=0), RankPhase.FINISHED, []),
        (group(0, 1, launcher=1), RankPhase.FINISHED, [5]),
        (group(None, "alive"), RankPhase.TRAINING, [4]),
        (group(None, "alive"), RankPhase.FINISHED, []),
        (group(None, None, launcher=0), RankPhase.FINISHED, []),
        (group(None, None, launcher=1), RankPhase.FINISHED, [4, 5]),
        (group(None, "alive"), RankPhase.ATTACHED, []),
        (group(None, None, launcher=1), RankPhase.ATTACHED, [4, 5]),
        (group(launcher=1), RankPhase.ABSENT, [-1]),
        (group(launcher=-9), RankPhase.ABSENT, [-1]),
        (group(launcher=None), RankPhase.ABSENT, [-1]),
        (group(launcher=0), RankPhase.ABSENT, []),
        (group("alive", "alive", launcher=-9), RankPhase.TRAINING, [-1]),
        (group(0, 0, launcher=1), RankPhase.FINISHED, [-1]),
    ],
)
def test_who_is_gone_and_was_not_meant_to_be(watched: WorkerGroup, phase: RankPhase, gone: list[int]) -> None:
    assert [found.rank for found in exits(watched, pages(phase))] == gone


def test_an_exit_tells_how_and_what_was_said() -> None:
    board = pages()
    board[1].say_farewell(error="KeyError: 'x'", traceback="Traceback\nKeyError: 'x'")
    killed, raised = exits(group(-9, 1), board)
    assert killed == RankExit(rank=Rank(4), at_s=NOW, code=-9, started=True)
    assert raised == RankExit(
        rank=Rank(5), at_s=NOW, code=1, error="KeyError: 'x'", traceback="Traceback\nKeyError: 'x'", started=True
    )


def test_of_several_tracebacks_the_first_in_time_is_kept() -> None:
    board = pages()
    for page in board:
        page.say_farewell(error="ValueError: no", traceback=f"Traceback of {page.rank}")
    watched = group(1, 1)
    watched.ranks[1].ended_s = NOW - 0.5
    assert [gone.traceback for gone in exits(watched, board)] == ["", f"Traceback of {board[1].rank}"]


@pytest.mark.parametrize(("phase", "started"), [(RankPhase.RESTORING, False), (RankPhase.FINISHED, True)])
def test_who_fails_behind_the_last_step_has_not_failed_at_the_start(phase: RankPhase, started: bool) -> None:
    (gone,) = exits(group(1, "alive"), pages(phase=phase, step=-1))
    assert gone.started is started


def test_a_rank_can_name_its_own_end() -> None:
    board = pages(step=-1)
    board[0].say_farewell(error="it is torn", kind="snapshot", step=7, path="/a")
    (gone,) = exits(group(1, "alive"), board)
    assert (gone.kind, gone.step, gone.started) == ("snapshot", 7, False)


@pytest.mark.parametrize(("by_launcher", "gone"), [(True, [4]), (False, [4, 5])])
def test_want_of_memory_is_no_reason_of_a_rank_that_the_launcher_ended(by_launcher: bool, gone: list[int]) -> None:
    """The kernel killed a worker of rank 4's data loader. It only counts its kills, in a container."""
    board, watched = pages(), group(1, -9)
    watched.ranks[1].out_of_memory = True
    if by_launcher:
        board[1].say_seen(101, None)
    assert [found.rank for found in exits(watched, board)] == gone


def test_a_script_that_catches_the_error_that_ends_its_rank_has_failed() -> None:
    board = pages()
    board[0].say_farewell(error="loss NaN", kind="non_finite", step=7, caught=True)
    (gone,) = exits(group(0, "alive"), board)
    assert (gone.rank, gone.code, gone.kind) == (4, 1, "non_finite")
    board[0].say_farewell(error="loss NaN", kind="non_finite", step=7)
    assert exits(group(0, "alive"), board) == (), "its own exit hook may have decided for 0"


def test_one_that_left_a_word_raised_even_if_the_kernel_does_not_tell() -> None:
    board = pages()
    board[0].say_farewell(error="KeyError: 'x'")
    said, silent = exits(group(None, None), board)
    assert (said.code, silent.code) == (1, None)


def test_the_launcher_s_failure_is_explained_by_whatever_a_rank_said() -> None:
    board = pages(RankPhase.ATTACHED, step=-1)
    board[1].say_farewell(error="OSError: no such file")
    (gone,) = exits(group(launcher=1), board)
    assert (gone.rank, gone.code, gone.error, gone.started) == (-1, 1, "OSError: no such file", False)
    for step in (0, 10):
        (later,) = exits(group(launcher=1), pages(step=step))
        assert later.started


# -- rewinds -------------------------------------------------------------------------------------------------------------------

REWOUND = Rewound(
    kind=Kind.NON_FINITE,
    onset=7,
    reached=8,
    to=6,
    remedy=Remedy.REPLAY,
    window=None,
    value=0.0,
    expected=0.0,
    at_ns=5_000_000_000,
    done_ns=5_250_000_000,
)


def test_without_a_rewind_there_is_none() -> None:
    assert rewinds(pages(), 3, OFFSET_S, 0) == []
    assert rewinds([], 3, OFFSET_S, 0) == []


def test_a_rewind_counts_when_all_local_ranks_are_through() -> None:
    board = pages()
    board[0].rewound(REWOUND)
    assert rewinds(board, 3, OFFSET_S, 0) == []
    board[1].rewound(replace(REWOUND, done_ns=5_500_000_000))
    (told,) = rewinds(board, 3, OFFSET_S, 0)
    assert (told.ordinal, told.generation, told.onset, told.to, told.reached) == (1, 3, 7, 6, 8)
    assert (told.at_s, told.restore_s) == (1005.0, 0.5)
    assert board[0].step == 6
    assert rewinds(board, 3, OFFSET_S, 1) == []


def test_rewinds_between_two_looks_are_all_told_up_to_eight() -> None:
    board = pages()
    for onset in range(20, 31):
        for page in board:
            page.rewound(replace(REWOUND, onset=onset))
    assert [(r.ordinal, r.onset) for r in rewinds(board, 3, OFFSET_S, 9)] == [(10, 29), (11, 30)]
    assert [r.ordinal for r in rewinds(board, 3, OFFSET_S, 0)] == list(range(4, 12))


# -- the whole status ----------------------------------------------------------------------------------------------------------


def said(watched: WorkerGroup | None, board: list[Page], **more: Any) -> NodeStatus:
    return status(
        NodeStatus(
            generation=Generation(3),
            at_s=NOW,
            memory_steps=(Step(9), Step(10)),
            durable_steps=(Step(5),),
            rejected_steps=(Step(3),),
            storage=True,
        ),
        watched,
        board,
        offset_s=OFFSET_S,
        told=(),
        **more,
    )


def test_ranks_that_hang_in_their_teardown_have_finished() -> None:
    board = pages(phase=RankPhase.FINISHED, step=9)
    assert not said(group("alive", "alive"), board).finished
    told = said(group("alive", "alive"), board, stuck=True)
    assert (told.finished, told.stopped, told.exits, told.alive) == (True, False, (), 2)
    told = said(group("alive", "alive"), pages(phase=RankPhase.STOPPED, step=9), stuck=True)
    assert (told.finished, told.stopped) == (False, True)


def test_silent_ranks_are_told_of() -> None:
    assert said(group("alive", "alive"), pages(), stalls=(stall(4), stall(5))).stalls == (stall(4), stall(5))


def test_without_a_worker_group_only_snapshots_are_told() -> None:
    assert said(None, pages(step=10)) == NodeStatus(
        generation=3,
        at_s=NOW,
        memory_steps=(9, 10),
        durable_steps=(5,),  # type: ignore[arg-type]
        rejected_steps=(3,),  # type: ignore[arg-type]
    )


def test_a_training_node() -> None:
    board = pages(attached_ns=1_000_000_000, built_ns=2_000_000_000)
    board[1].step, board[1].attached_ns, board[1].built_ns = 9, 3_000_000_000, 0
    told = said(group("alive", "alive"), board)
    assert (told.min_step, told.max_step, told.alive, told.pids, told.launch) == (9, 10, 2, (100, 101), "warm")
    assert (told.attached_s, told.built_s) == (1003.0, 0.0)  # the last rank's time; none while one is missing
    assert (told.finished, told.stopped, told.exits, told.memory_steps) == (False, False, (), (9, 10))


@pytest.mark.parametrize(
    ("watched", "phases", "finished", "stopped"),
    [
        (group(0, 0, launcher=0), (RankPhase.FINISHED, RankPhase.FINISHED), True, False),
        (group(0, 0, launcher=0), (RankPhase.STOPPED, RankPhase.STOPPED), False, True),
        (group(0, 0, launcher=0), (RankPhase.FINISHED, RankPhase.STOPPED), False, True),
        (group(0, 0), (RankPhase.FINISHED, RankPhase.FINISHED), False, False),
        (group(0, 0, launcher=1), (RankPhase.FINISHED, RankPhase.FINISHED), False, False),
        (group(launcher=0), (RankPhase.ABSENT, RankPhase.ABSENT), True, False),
        (group("alive", "alive"), (RankPhase.TRAINING, RankPhase.STOPPED), False, False),
    ],
)
def test_finished_and_stopped_are_the_launcher_s_to_say(
    watched: WorkerGroup, phases: tuple[RankPhase, RankPhase], finished: bool, stopped: bool
) -> None:
    board = pages()
    for page, phase in zip(board, phases, strict=True):
        page.phase = phase
    told = said(watched, board)
    assert (told.finished, told.stopped) == (finished, stopped)


def test_the_dead_are_not_counted_among_the_living() -> None:
    told = said(group(-9, "alive"), pages())
    assert told.alive == 1
    assert [gone.rank for gone in told.exits] == [4]


# -- what follows from the end of another ----------------------------------------------------------------------------------------


def blamed(gone: WorkerGroup, seen: list[Page]) -> list[tuple[int, int | None, str]]:
    return [(found.rank, found.code, found.kind) for found in exits(gone, seen)]


def test_ranks_that_die_with_their_launcher_are_not_blamed() -> None:
    assert blamed(group(-9, "alive", launcher=-9), pages()) == [(-1, -9, "exit")]
    assert blamed(group(-9, -9, launcher=-9), pages()) == [(-1, -9, "exit")]
    assert blamed(group(-9, -9, launcher=1), pages()) == [(4, -9, "exit"), (5, -9, "exit")]


def test_a_launcher_that_a_signal_ends_is_blamed_and_not_the_ranks_that_it_takes_along() -> None:
    seen = pages()
    for page in seen:
        page.say_seen(page.pid, None)
    assert blamed(group(-15, -15), seen) == []  # not yet known why
    for page in seen:
        page.launcher_signal = 15
    assert blamed(group(-15, -15, launcher=1), seen) == [(-1, -15, "exit")]


def test_a_rank_that_ended_too_early_to_be_watched_has_the_code_that_the_launcher_saw() -> None:
    seen = pages(RankPhase.ATTACHED, step=-1)
    seen[0].say_seen(seen[0].pid, None)
    seen[1].say_seen(seen[1].pid, -15)
    assert blamed(group(-15, None), seen) == [(5, -15, "exit")]
    assert blamed(group(-15), seen) == [(5, -15, "exit")]  # it was gone before the agent had looked at its page


def test_a_killed_wrapper_is_told_of_and_not_the_ranks_that_end_with_it() -> None:
    seen = pages()
    seen[0].say_seen(50, None)
    seen[1].say_seen(51, -9)
    assert blamed(group(-15, "alive"), seen) == [(5, -9, "wrapper")]
    assert blamed(group(-15, -9, launcher=1), seen) == [(5, -9, "wrapper")]


def test_what_a_rank_says_itself_of_its_end_counts_for_more() -> None:
    seen = pages()
    seen[0].say_farewell(error="ValueError: no")
    seen[0].say_seen(seen[0].pid, None)
    assert blamed(group(1, -15), seen)[0] == (4, 1, "exit")


def test_a_script_that_is_gone_is_named() -> None:
    gone = group(2, 2, launcher=1)
    for process in gone.ranks.values():
        process.missing = "train.py"
    assert {(found.kind, found.error) for found in exits(gone, pages(RankPhase.ATTACHED, step=-1))} == {
        ("broken", "train.py is not there")
    }


def test_the_last_step_of_ranks_is_what_a_restart_computes_again_where_it_lies_behind_the_snapshot() -> None:
    ranks = pages(step=10, tells=2)
    for page in ranks:
        page.beat(10, 0.5, math.nan, 1)
    assert [(step, loss) for step, loss, _ in reached(ranks, 9)] == [(10, 0.5)] * 2
    assert reached(ranks, 10) == ()
    ranks[1].tells = 1  # its data is not known, so another loss would be no wonder
    assert reached(ranks, 9) == ()


def test_what_a_rank_finds_in_steps_computed_again_is_told_and_a_difference_on_any_rank_counts() -> None:
    ranks = pages()
    found_out = [Repeated.UNKNOWN]
    for local_rank, found in ((0, Repeated.SAME), (1, Repeated.OTHER)):
        ranks[local_rank].repeated = found
        found_out.append(said(group("alive", "alive"), ranks).repeated)
    assert found_out == [Repeated.UNKNOWN, Repeated.SAME, Repeated.OTHER]
