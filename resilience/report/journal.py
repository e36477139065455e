"""The journal: one JSON line for each event, in the run directory. It remains when etcd's data is gone, and `explain` reads it when no
agent is running."""

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


def event(line: bytes) -> dict[str, Any] | None:
    """Return the event of one line. None: the line is no event, because an agent was killed while it wrote the line, or other bytes are
    there."""
    try:
        found: dict[str, Any] = loads(dict, line)
    except (InternalError, RecursionError):
        return None
    whole = isinstance(found.get("kind"), str) and isinstance(found.get("at_s"), int | float)
    return found if whole else None
