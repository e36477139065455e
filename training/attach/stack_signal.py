"""Lets the agent ask for a rank's stacks. At a signal, the rank writes the stacks of all its threads into a file that the agent reads.

The signal's handler is faulthandler's, in C, so it works even while the main thread is stuck in C and holds the GIL.
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
answers = -1
"""Descriptor of the file with this process's stacks; -1: there is none."""
_signal = 0
"""The signal at which this process writes its stacks; 0: there is none. The page says the same, but a stray write can change the page."""


def listen(page: Page, path: str) -> None:
    """From now on, write stacks into `path` at a signal, and record the signal's number on the rank's page. The signal is a real-time
    signal without another handler, because schedulers use the other signals."""
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMAX - 2 - _TRIED, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            global answers, _signal
            answers = high(opened(path, os.O_WRONLY | os.O_APPEND))  # stays open
            faulthandler.register(number, file=answers, all_threads=True, chain=False)
            page.main_thread = threading.main_thread().ident or 0
            page.listens = _signal = number  # set last: without a handler, the signal would end this process
            return


def yield_to_script(page: Page) -> None:
    """If the script has set a handler of its own for this signal meanwhile, tell the agent not to send it any more."""
    if _signal and signal.getsignal(_signal) is not signal.SIG_DFL:
        page.listens = 0
