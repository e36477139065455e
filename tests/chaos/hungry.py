"""Runs a training script that sleeps before each step, and lets rank 1 take more memory than its control group may, once.

`torchrun … hungry.py SCRIPT ARGUMENTS…`, with GROUP the directory of a control group with a limit (version 1 or 2), and MARKER: a file that
says that it has happened.
"""

import os
import runpy
import sys
import time
from pathlib import Path

_sleep = time.sleep
_slept = 0


def sleep_or_eat(seconds: float) -> None:
    global _slept
    _slept += 1
    _sleep(seconds)
    marker = Path(os.environ["MARKER"])
    if os.environ["RANK"] == "1" and _slept == 12 and not marker.exists():
        marker.touch()
        (Path(os.environ["GROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
        eaten = []
        while True:
            eaten.append(b"x" * (16 << 20))


if __name__ == "__main__":
    time.sleep = sleep_or_eat
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
