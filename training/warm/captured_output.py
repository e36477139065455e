"""Captures the output of the warm process during its imports. Each rank prints this output again at its start, as if it had run the imports
itself.

During the imports, stdout goes into memory and stderr into the log. Afterwards both are read, and each rank prints them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...resilience.ipc.shared_memory import memory

_STREAMS = (1, 2)


class Printed:
    """Captures this process's stdout and stderr, from its creation to `end`."""

    def __init__(self, log: int) -> None:
        """log: the file for stderr, so that the output of a process that crashes can be read. `end` adds stdout to it."""
        kept = memory("mt-resilient-printed")
        for number, descriptor in zip(_STREAMS, (kept, log), strict=True):
            os.dup2(descriptor, number, inheritable=True)
        os.close(kept)
        self._begins = sizes()

    def end(self) -> dict[int, bytes]:
        """Return the captured output, by stream. From now on, both streams go to the log."""
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
    """Print `printed`, by stream. If a stream cannot be written to, its output is dropped silently, as `warnings` and `logging` do."""
    for number, text in printed.items():
        with suppress(OSError), open(number, "wb", closefd=False) as stream:
            stream.write(text)
