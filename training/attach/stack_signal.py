"""This rank lets itself be asked where it is: at a signal, the stacks of all its threads go into a file that the agent reads.

The signal's handler is faulthandler's, in C: it answers from a main thread that is stuck in C with the GIL in its hands.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading

from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.descriptor_client import opened
from ...resilience.ipc.file_descriptors import high

_TRIED = 8


def listen(page: Page, path: str) -> None:
    """Answer into `path` from now on, and say on the page with which signal: one of the real-time signals, since schedulers send
    the others, that nobody else has taken."""
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMAX - 2 - _TRIED, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            answers = high(opened(path, os.O_WRONLY | os.O_APPEND))  # open for good
            faulthandler.register(number, file=answers, all_threads=True, chain=False)
            page.main_thread = threading.main_thread().ident or 0
            page.listens = number  # last: before, the signal would end this process
            return
