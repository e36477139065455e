"""Which of a rank's threads the agent looks at."""

import signal
import threading
from unittest import mock

import pytest

from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.types import RankPhase
from mt_resilient.training.attach import stack_signal
from mt_resilient.training.attach.attach import Attachment
from mt_resilient.training.boundary.watch_threads import unwatch, watch


def test_a_loop_in_a_thread_of_its_own_is_the_one_to_look_at() -> None:
    page, handoff = Page(memoryview(bytearray(PAGE_BYTES))), mock.Mock()
    thread = threading.Thread(target=watch, args=(Attachment(handoff, page, rank=0, local_rank=0, world=1), None))
    thread.start()
    thread.join()
    assert page.main_thread == thread.ident
    unwatch(page, RankPhase.FINISHED)  # after the loop, the script is in its main thread again
    assert (page.main_thread, page.phase) == (threading.main_thread().ident, RankPhase.FINISHED)


def test_a_script_may_take_the_signal_before_the_loop_or_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank and no device, no thread looks meanwhile."""
    page, handoff = Page(memoryview(bytearray(PAGE_BYTES))), mock.Mock()
    number = signal.SIGRTMAX - 2
    monkeypatch.setattr(stack_signal, "_signal", number)
    before = signal.signal(number, lambda *_: None)
    try:
        page.listens = number
        watch(Attachment(handoff, page, rank=0, local_rank=0, world=1), None)
        assert page.listens == 0
        page.listens = number
        unwatch(page, RankPhase.FINISHED)
        assert page.listens == 0
    finally:
        signal.signal(number, before)
