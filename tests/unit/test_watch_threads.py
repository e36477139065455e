"""Which of a rank's threads the agent looks at."""

import threading
from unittest import mock

from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.training.attach.attach import Attachment
from mt_resilient.training.boundary.watch_threads import watch


def test_a_loop_in_a_thread_of_its_own_is_the_one_to_look_at() -> None:
    page, handoff = Page(memoryview(bytearray(PAGE_BYTES))), mock.Mock()
    thread = threading.Thread(target=watch, args=(Attachment(handoff, page, rank=0, local_rank=0, world=1), None))
    thread.start()
    thread.join()
    assert page.main_thread == thread.ident
