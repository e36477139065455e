"""Whatever stands on a page: it is refused, or it is read, and nothing else comes of it."""

from __future__ import annotations

import struct
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.agent.monitor.rank_progress import Hearing
from mt_resilient.agent.monitor.step_times import Strides
from mt_resilient.agent.ranks import status_report
from mt_resilient.agent.ranks.board import Board
from mt_resilient.agent.ranks.worker_group import Watched, WorkerGroup
from mt_resilient.resilience.detect.straggler import StragglerPolicy
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES, Rewound, Sighted
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.ipc.page_validation import MOST, Orders, nonsense
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.data_windows import Window
from mt_resilient.resilience.model.generation import RewindOrder
from mt_resilient.resilience.model.node import NodeStatus
from mt_resilient.resilience.model.rewind import Remedy
from mt_resilient.resilience.model.types import Generation, Order, OrderedBy, RankPhase, Step
from mt_resilient.resilience.store.codec import dumps, loads

EXAMPLES, WRITES = 800, 128
"""More than 100,000 writes in all."""
KNOWN = {0: 100, 1: 101}


def train(board: Board) -> None:
    """Two ranks that have done nearly all that a page can tell of."""
    board.clear(3)
    for local_rank, page in enumerate(board._live):
        page.rank, page.attached_ns, page.phase, page.pid = local_rank, 5, RankPhase.TRAINING, KNOWN[local_rank]
        page.built_ns, page.restored_ns, page.stepped_ns, page.first_step, page.tells = 6, 7, 8, 1, 2
        page.timed(5, 4, 1)
        page.beat(10, 1.0, 2.0, 9)
        noted = {"kind": Kind.LOSS_SPIKE, "onset": 4, "to": 3, "window": Window(3, 5), "value": 2.0, "expected": 1.0}
        for ordinal in range(1, 11):
            page.rewound(Rewound(**noted, reached=9, remedy=Remedy.SKIP, at_ns=ordinal, done_ns=ordinal + 1))
        page.sighted(Sighted(**noted, remedy=Remedy.REPLAY, at_ns=3, seen=4, last=5))
        page.say_farewell(error="it failed", kind="exit", step=7)
        page.unsaved = "it is sparse"
    board.ask_durable()
    board.ask_copy()
    board.pause(True)
    board.leased(12.0)
    board.order(Order.STOP)
    board.turn_back(RewindOrder(number=4, to=Step(2), skip=1, cause=OrderedBy.OPERATOR))


@pytest.fixture(scope="module")
def board() -> Board:
    return Board(2)


ODD = [0, 1, 2, 3, 5, 7, 64, 65, 2**31, MOST, MOST + 1, 2**62, 2**63 - 1, -1, -2, -(2**63), 10, 100, 4096]
TEXTS = [b"[" * 800, b'{"step": "x", "error": {}}', b"\xff" * 40]


def content(chance: Random) -> bytes:
    return chance.choice([struct.pack("<q", chance.choice(ODD)), chance.randbytes(8), chance.choice(TEXTS)])


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32), together=st.sampled_from([8, 64, WRITES]))
def test_whatever_a_rank_writes_is_refused_or_read(board: Board, seed: int, together: int) -> None:
    chance = Random(seed)
    train(board)
    assert board.look(KNOWN) == {}
    group = WorkerGroup(
        3, Watched(99, -1), "warm", {n: Watched(pid, -1, ended_s=20.0, code=-9) for n, pid in KNOWN.items()}
    )
    hearing, strides = Hearing(5), Strides(StragglerPolicy())
    for number in range(1, WRITES + 1):
        at = 8 * chance.randrange(PAGE_BYTES // 8)
        data = content(chance)[: PAGE_BYTES - at]
        board._live[0].raw[at : at + len(data)] = data
        if number % together:
            continue
        if board.look(KNOWN):
            train(board)
        for rank in hearing.listen(board.pages, [0, 1], float(number)).values():
            assert rank.silent_s >= 0
        strides.look(board.pages, float(number), 0.0)
        rewinds = status_report.rewinds(board.pages, 3, 0.0, 0)
        kept = NodeStatus(generation=Generation(3), at_s=1.0)
        told = status_report.status(kept, group, board.pages, offset_s=0.0, told=tuple(rewinds))
        assert len(loads(NodeStatus, dumps(told)).exits) <= 2
        assert -1 <= told.min_step <= told.max_step <= MOST
        assert isinstance(board.pages[0].unsaved, str)
        assert board.orders.generation == Generation(3)


def test_what_a_device_writes_is_no_reason_to_end_its_rank(board: Board) -> None:
    train(board)
    for value in ODD:
        board._live[0].device_reached = board._live[0].device_answered = value
        assert board.look(KNOWN) == {}


@pytest.mark.parametrize(
    ("name", "value"), [("phase", 6), ("doing", -1), ("step", 2**60), ("pid", 7), ("order", 1), ("rewinds", -1), ("listens", 65)]
)  # fmt: skip
def test_what_cannot_be_is_named(name: str, value: int) -> None:
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    page.clear(3)
    page.pid = 100
    assert nonsense(page, Orders(generation=3), 100) == ""
    setattr(page, name, value)
    assert nonsense(page, Orders(generation=3), 100).startswith(f"{name} {value}")


def test_of_a_rank_that_was_not_believed_nothing_more_is_until_the_next_generation(board: Board) -> None:
    train(board)
    board.look(KNOWN)
    board._live[1].phase = 77
    assert board.look(KNOWN) == {1: "phase 77"}
    board._live[1].phase, board._live[1].step = RankPhase.TRAINING, 500
    assert board.look(KNOWN) == {}
    assert (board.pages[1].phase, board.pages[1].step) == (RankPhase.TRAINING, 3)
    board.clear(4)
    board._live[1].step = 500
    assert board.look({}) == {}
    assert board.pages[1].step == 500
