"""Runs a training script whose rank 1 goes mad once, before its 25th step: it writes at random into every descriptor that it has, but its
standard streams, and over its page of the board.

`torchrun … scribbling.py DESCRIPTORS SCRIPT ARGUMENTS…`: what it had open is in the file DESCRIPTORS then.
"""

import ctypes
import json
import os
import runpy
import sys
import time
from pathlib import Path

MAD_AT = 25
_sleep = time.sleep
_slept = 0
_found = Path(sys.argv[1])


def go_mad() -> None:
    open_ones = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            open_ones[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one of that folder
            continue
    _found.write_text(json.dumps(open_ones))
    for fd in open_ones:
        if fd > 2:
            try:
                os.set_blocking(fd, False)
                os.write(fd, os.urandom(8192))
            except OSError:
                continue
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "mt-resilient-board" in line and " rw" in line:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            ctypes.memmove(begin, os.urandom(end - begin), end - begin)


def sleep(seconds: float) -> None:
    global _slept
    _slept += 1
    if _slept == MAD_AT and os.environ["RANK"] == "1" and not _found.exists():
        go_mad()
    _sleep(seconds)


if __name__ == "__main__":
    time.sleep = sleep
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
