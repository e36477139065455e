"""Writes the terminal output and the journal in separate threads. So a reader that has stopped (a pager, Ctrl-S) or a hanging disk delays
nothing else."""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from queue import SimpleQueue

from ...resilience.report.journal import Journal

_MOST = 100_000
"""The most lines that wait for a reader, or for the disk."""
LAST_S = 2.0
"""Seconds that `finish` waits for the last lines to be written."""


class Printing(io.TextIOBase):
    """Writes whole lines to one file descriptor, from a thread. An object of this class has the interface of a text file."""

    def __init__(self, fd: int, most: int = _MOST) -> None:
        """most: the most lines that may wait. Beyond that, new lines are dropped until fewer than half of this number are waiting."""
        self._fd, self._most, self._left_out = fd, most, 0
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self.thread = threading.Thread(target=self._print, daemon=True)
        """The writing thread, which ends after it has written all lines that came before the call of `end`."""
        self.thread.start()

    def show(self, line: bytes) -> None:
        if self._lines.qsize() >= (self._most // 2 if self._left_out else self._most):
            self._left_out += 1
        else:
            self._tell_gap()
            self._lines.put(line)

    def end(self) -> None:
        """Mark the end of the output. The thread exits after the waiting lines."""
        self._tell_gap()
        self._lines.put(b"")

    def write(self, text: str, /) -> int:
        self.show(text.encode(errors="replace"))
        return len(text)

    def finish(self) -> None:
        """Mark the end of the output, and wait up to LAST_S seconds until the waiting lines are written."""
        self.end()
        self.thread.join(LAST_S)

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def _tell_gap(self) -> None:
        if self._left_out:
            self._lines.put(
                f"mt-resilient: {self._left_out} lines are missing here, because nothing read the output\n".encode()
            )
            self._left_out = 0

    def _print(self) -> None:
        for line in iter(self._lines.get, b""):
            rest = line
            with suppress(OSError):  # the reader is gone: the job continues without it
                while rest:
                    rest = rest[os.write(self._fd, rest) :]


class Notebook(Journal):
    """The journal of a running agent, which a separate thread writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def _append(self, line: bytes) -> None:
        if self._lines.qsize() < _MOST:
            self._lines.put(line)
        else:
            self.lost += 1

    def finish(self) -> None:
        """End the journal, and wait up to LAST_S seconds until the waiting lines are written."""
        self._lines.put(b"")
        self._thread.join(LAST_S)

    def _write(self) -> None:
        for line in iter(self._lines.get, b""):
            super()._append(line)


@contextmanager
def unhurried() -> Iterator[None]:
    """Write stderr from a thread within the block, so that a slow reader does not delay the caller. At the end, wait up to LAST_S seconds
    for the last lines."""
    printing = Printing(2)
    try:
        with redirect_stderr(printing):
            yield
    finally:
        printing.finish()


LONGEST = 1 << 16
"""The most bytes that wait for the end of their line."""
_END = re.compile(rb"(\r?\n|\r(?=[^\n]))")
"""A carriage return ends a line, too, because progress bars print no other end. The last byte does not tell yet whether it is one."""


def cut(text: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete lines with their ends, and the rest. A longer rest than LONGEST counts as a line."""
    *parts, rest = _END.split(text)
    lines = [line + end for line, end in zip(parts[::2], parts[1::2], strict=True)]
    return ([*lines, rest + b"\n"], b"") if len(rest) > LONGEST else (lines, rest)
