"""What is written by threads of their own: a terminal whose reader has stopped (a pager, Ctrl-S), or a disk that hangs, holds up nothing
else."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from queue import SimpleQueue

from ...resilience.report.journal import Journal

_MOST = 100_000
"""Lines that wait for a reader, or the disk."""
LAST_S = 2.0
"""How long the last of them are waited for."""


class Printing(io.TextIOBase):
    """One descriptor; also a text file, to which whole lines are written."""

    def __init__(self, fd: int, most: int = _MOST) -> None:
        """most: lines that wait; further ones are left out, until half of them have been read."""
        self._fd, self._most, self._left_out = fd, most, 0
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self.thread = threading.Thread(target=self._print, daemon=True)
        """Over when all is printed, once that was the end."""
        self.thread.start()

    def show(self, line: bytes) -> None:
        if self._lines.qsize() >= (self._most // 2 if self._left_out else self._most):
            self._left_out += 1
        else:
            self._tell_gap()
            self._lines.put(line)

    def end(self) -> None:
        """Nothing more is to come."""
        self._tell_gap()
        self._lines.put(b"")

    def write(self, text: str, /) -> int:
        self.show(text.encode(errors="replace"))
        return len(text)

    def finish(self) -> None:
        """Nothing more is to come, and what waits is given LAST_S."""
        self.end()
        self.thread.join(LAST_S)

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def _tell_gap(self) -> None:
        if self._left_out:
            self._lines.put(f"mt-resilient: {self._left_out} lines are left out here, for nobody has read\n".encode())
            self._left_out = 0

    def _print(self) -> None:
        for line in iter(self._lines.get, b""):
            rest = line
            with suppress(OSError):  # nobody reads: the job is more than its output
                while rest:
                    rest = rest[os.write(self._fd, rest) :]


class Notebook(Journal):
    """The journal of a running agent."""

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
        """As above."""
        self._lines.put(b"")
        self._thread.join(LAST_S)

    def _write(self) -> None:
        for line in iter(self._lines.get, b""):
            super()._append(line)


@contextmanager
def unhurried() -> Iterator[None]:
    """What goes to stderr within waits for no reader, and for LAST_S at the end."""
    printing = Printing(2)
    try:
        with redirect_stderr(printing):
            yield
    finally:
        printing.finish()
