"""Lets the agent ask a rank where it is: at a signal, the rank writes the stacks of all its threads into a file that the agent reads.

The signal's handler is faulthandler's, in C: it works even while the main thread is stuck in C and holds the GIL.
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
    """Write stacks into `path` from now on, and note the signal for it on the page. It is a real-time signal without another handler, since
    schedulers send the other signals."""
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMAX - 2 - _TRIED, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            answers = high(opened(path, os.O_WRONLY | os.O_APPEND))  # stays open
            faulthandler.register(number, file=answers, all_threads=True, chain=False)
            page.main_thread = threading.main_thread().ident or 0
            page.listens = number  # last: without a handler, the signal would end this process
            return
