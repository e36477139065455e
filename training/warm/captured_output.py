"""What the warm process prints while it imports, for each rank to print at its start, where it would have imported the same.

Imports → memory for stdout, the log for stderr → both are read → stdout and stderr of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...resilience.ipc.shared_memory import memory

_STREAMS = (1, 2)


class Printed:
    """Takes stdout and stderr from now on, until it is told to end."""

    def __init__(self, log: int) -> None:
        """log: where stderr goes, so that the words of a process that crashes can be read, and stdout once it ends."""
        kept = memory("mt-resilient-printed")
        for number, descriptor in zip(_STREAMS, (kept, log), strict=True):
            os.dup2(descriptor, number, inheritable=True)
        os.close(kept)
        self._begins = sizes()

    def end(self) -> dict[int, bytes]:
        """What was printed, by stream. Both go to the log from now on."""
        found = {
            number: Path(f"/proc/self/fd/{number}").read_bytes()[begins:]
            for number, begins in zip(_STREAMS, self._begins, strict=True)
        }
        os.dup2(2, 1, inheritable=True)
        os.write(1, found[1])
        return found


def sizes() -> list[int]:
    return [os.fstat(stream).st_size for stream in _STREAMS]


def print_again(printed: Mapping[int, bytes]) -> None:
    """Where nobody takes it, as `warnings` and `logging` do: without a word."""
    for number, text in printed.items():
        with suppress(OSError), open(number, "wb", closefd=False) as stream:
            stream.write(text)
