"""Which process of a rank has its page."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.ipc.handoff import local_rank
from mt_resilient.resilience.model.types import RankPhase
from mt_resilient.training.attach.attach import _excepthook
from mt_resilient.training.attach.board import claim, page_of

from .test_handoff import HANDOFF

ENVIRON = {"RANK": "5", "LOCAL_RANK": "1"}
OTHER = 1
"""A process that is not this one."""


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """Of local rank 1, cleared for the generation of HANDOFF."""
    (tmp_path / "board").write_bytes(bytes(2 * PAGE_BYTES))
    found = page_of(replace(HANDOFF, board=str(tmp_path / "board")), 1, writable=True)
    found.clear(HANDOFF.generation)
    return found


def claimed(tmp_path: Path, *, trains: bool) -> bool:
    return claim(replace(HANDOFF, board=str(tmp_path / "board")), ENVIRON, 7, trains=trains) is not None


@pytest.mark.parametrize(
    ("holder", "phase", "trains", "mine"),
    [
        (0, RankPhase.ABSENT, False, True),
        (0, RankPhase.ABSENT, True, True),
        pytest.param(os.getpid(), RankPhase.ATTACHED, False, True, id="itself"),  # it has become another program
        (OTHER, RankPhase.ATTACHED, False, False),
        (OTHER, RankPhase.ATTACHED, True, True),  # it has started this one, and waits
        (OTHER, RankPhase.RESTORING, True, False),
        (OTHER, RankPhase.TRAINING, True, False),
        (OTHER, RankPhase.FINISHED, True, False),
    ],
)
def test_a_process_that_trains_takes_the_page_of_one_that_does_not(
    page: Page, tmp_path: Path, holder: int, phase: RankPhase, trains: bool, mine: bool
) -> None:
    page.pid, page.phase = holder, phase
    assert claimed(tmp_path, trains=trains) is mine
    assert page.pid == (os.getpid() if mine else holder)
    assert page.phase == (RankPhase.ATTACHED if mine else phase)


def test_a_claimed_page_forgets_the_words_of_the_process_before(page: Page, tmp_path: Path) -> None:
    page.pid, page.phase, page.listens, page.left = OTHER, RankPhase.ATTACHED, 62, 1
    page.say_farewell(error="No module named 'apex'")
    assert claimed(tmp_path, trains=True)
    assert (page.farewell(), page.listens, page.left, page.rank, page.attached_ns) == ({}, 0, 0, 5, 7)


def test_a_process_of_another_generation_gets_no_page(page: Page, tmp_path: Path) -> None:
    page.clear(HANDOFF.generation + 1)
    assert not claimed(tmp_path, trains=True)
    assert page.pid == 0


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "2", "LOCAL_RANK": "2"},
        {"RANK": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"},
        {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},  # it would read the pages of the others
    ],
)
def test_a_rank_of_a_larger_torchrun_within_a_rank_gets_no_page(
    page: Page, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The third page lies beyond the end of the board's file, where each access is SIGBUS."""
    assert claim(replace(HANDOFF, board=str(tmp_path / "board")), environ, 7, trains=True) is None
    assert page.pid == 0


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1),
        ({"RANK": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 1),  # --virtual-local-rank
        ({"RANK": "5", "LOCAL_RANK": "1"}, 1),
    ],
)
def test_each_rank_of_a_node_has_a_page_of_its_own(environ: dict[str, str], number: int) -> None:
    assert local_rank(environ) == number


def test_only_an_exception_that_ends_the_rank_stays_on_its_page(page: Page) -> None:
    """A thread that passes its exceptions to sys.excepthook ends alone, and an interactive console goes on."""
    page.pid = os.getpid()
    seen: list[object] = []
    hook = _excepthook(page, lambda *words: seen.append(words[1]))
    error = ValueError("no")
    thread = threading.Thread(target=hook, args=(ValueError, error, None))
    thread.start()
    thread.join()
    assert (seen, page.farewell()) == ([error], {})
    hook(ValueError, error, None)
    assert page.farewell()["error"] == "ValueError: no"
    page.beat(8, 0.5, 1.0, 7)
    assert page.farewell() == {}
