"""Runs a training script that sleeps before each step, and hangs one rank of it, once.

`torchrun … hanging.py SCRIPT ARGUMENTS…`, with HANG="HOW:RANK:STEP:MARKER": after STEP steps of its process (0: before the script
begins) RANK does HOW, unless the file MARKER is there, which it makes.
"""

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset

_sleep = time.sleep
_slept = 0
HOW, RANK, STEP, MARKER = os.environ["HANG"].split(":")


class Blocking(Dataset):
    """One item, which never comes."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        sleeps_for_ever()
        return index


def sleeps_for_ever() -> None:
    while True:
        signal.pause()


def keeps_the_gil() -> None:
    """A deadlock in C: locks twice, through a library that does not let go of the GIL."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def waits_for_its_loader() -> None:
    for _ in DataLoader(Blocking(), num_workers=1):
        pass


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_busy() -> None:
    """Computes for as long as BUSY_S says, which is long for a step."""
    end = time.monotonic() + float(os.environ["BUSY_S"])
    while time.monotonic() < end:
        sum(range(100_000))


def calls_another_collective() -> None:
    distributed.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1))


WAYS = {
    "collective": calls_another_collective,
    "sleep": sleeps_for_ever,
    "gil": keeps_the_gil,
    "loader": waits_for_its_loader,
    "stop": is_stopped,
    "busy": is_busy,
}


def perhaps() -> None:
    if os.environ["RANK"] == RANK and str(_slept) == STEP and not Path(MARKER).exists():
        Path(MARKER).touch()
        WAYS[HOW]()


def sleep_or_hang(seconds: float) -> None:
    global _slept
    _slept += 1
    _sleep(seconds)
    perhaps()


if __name__ == "__main__":
    before = time.sleep  # another wrapper's, perhaps
    _sleep = before
    time.sleep = sleep_or_hang
    perhaps()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
