"""Ends a process that depends on the clock of the day when somebody sets that clock back. Its parent starts another one."""

from __future__ import annotations

import math
import os
import sys
import threading

from .. import clock
from ..errors import MachineError

SET_BACK_S = 1.0
"""A clock that is set back by more than this ends the process."""
LOOK_S = 0.5
"""Seconds between two looks at the clock."""


def start() -> None:
    """Follow the clock of the day from now on, in a thread of its own: the process may be amid a call that waits for the clock."""
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    most_ahead_s = -math.inf
    while True:
        began_s = clock.monotonic_s()
        ahead_s = clock.wall_s() - began_s
        if clock.monotonic_s() - began_s > SET_BACK_S / 2:  # the process was stopped between the two
            continue
        most_ahead_s = max(most_ahead_s, ahead_s)
        if most_ahead_s - ahead_s > SET_BACK_S:
            words = f"the clock was set back by {most_ahead_s - ahead_s:.0f} s; a new process continues"
            print(words, file=sys.stderr, flush=True)
            os._exit(MachineError.exit_code)
        clock.sleep(LOOK_S)
