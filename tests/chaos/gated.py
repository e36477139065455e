"""Runs a training script that sleeps before each step, and holds it at a step until the test opens the gate.

`torchrun … gated.py SCRIPT ARGUMENTS…`: after GATE_AFTER steps of this process the next one waits for the file GATE. So a test may
take its time to hurt the run, however slow the machine is, and the run cannot be over before.
"""

import os
import runpy
import sys
import time

import torch  # noqa: F401  (in the opening, so that ranks can be forked from it)

import mt_resilient  # noqa: F401

_sleep = time.sleep
_slept = 0


def sleep_at_the_gate(seconds: float) -> None:
    global _slept
    _slept += 1
    _sleep(seconds)
    while _slept > int(os.environ["GATE_AFTER"]) and not os.path.exists(os.environ["GATE"]):
        _sleep(0.02)


def main() -> None:
    """With the script and its arguments in `sys.argv`."""
    time.sleep = sleep_at_the_gate
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
