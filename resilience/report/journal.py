"""The journal: one JSON line for each event, in the run directory. The journal remains when etcd's data is gone, and `explain` reads it
when no agent is running."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InternalError
from ..store.codec import loads


class Journal:
    """Appends events to the file `path`. If the disk is full, lines are lost, but the job continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0

    def write(self, kind: str, at_s: float, **fields: Any) -> None:
        """Append one event at wall-clock time `at_s`."""
        line = json.dumps({"at_s": round(at_s, 3), "kind": kind, **fields}, separators=(",", ":"))
        self._append(line.encode(errors="backslashreplace"))

    def _append(self, line: bytes) -> None:
        try:
            with self.path.open("ab+") as file:
                # An agent was killed while writing if the last line has no end.
                torn = file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
                file.write(b"\n" * bool(torn) + line + b"\n")
        except OSError:
            self.lost += 1

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the events of all whole lines, oldest first. An incomplete last line, and lines that are no event, are skipped."""
        if not self.path.is_file():  # reading a pipe would block
            return
        for line in self.path.read_bytes().splitlines():
            if found := event(line):
                yield found


class Tail:
    """Reads what is appended to the journal `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = 0
        """How many bytes have been read."""
        self._inode = 0

    @property
    def replaced(self) -> bool:
        """Whether the journal is another file than the one that was read, or has become shorter."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        return bool(self._inode) and (now.st_ino != self._inode or now.st_size < self.read)

    def new(self) -> list[dict[str, Any]]:
        """Return the events of the whole lines that are new. While the file is not there, or cannot be read, return none."""
        try:
            with self.path.open("rb") as file:
                self._inode = self._inode or os.fstat(file.fileno()).st_ino
                file.seek(self.read)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        self.read += len(whole) + bool(whole)
        return [found for line in whole.splitlines() if (found := event(line))]


def event(line: bytes) -> dict[str, Any] | None:
    """Return the event of one line. None: the line is no event, because an agent was killed while it wrote the line, or other bytes are
    there."""
    try:
        found: dict[str, Any] = loads(dict, line)
    except (InternalError, RecursionError):
        return None
    whole = isinstance(found.get("kind"), str) and isinstance(found.get("at_s"), int | float)
    return found if whole else None
