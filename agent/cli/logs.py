"""`mt-resilient logs`: prints what the ranks have printed, from the files in the run directory (`agent/ranks/rank_logs.py`)."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...resilience.clock import sleep
from ...resilience.errors import UsageError
from ...resilience.text.formatting import printable
from ..ranks.rank_logs import FOLDER, older
from ..run_directory import RunDirectory
from .explain import incidents, look

_LOOK_S = 0.3
_LONG = 4000
"""A longer line is cut at this many characters on a terminal."""
_NAME = re.compile(r"generation-(\d+)/rank-(\d+)\.log")


@dataclass(frozen=True, order=True)
class RankLog:
    generation: int
    rank: int
    path: Path

    @property
    def heading(self) -> str:
        return f"==> generation {self.generation}, rank {self.rank} <=="


def logs(directory: RunDirectory, rank: int | None, incident: str | None, lines: int, follow: bool) -> int:
    """Print the last `lines` lines (0: all) of each chosen rank. rank: None: every rank. incident: its number; the output is of the
    generation that it struck. None: the newest generation. follow: afterwards, print new lines until the job ends."""
    found = _logs(directory)
    if not found:
        raise UsageError(
            f"{directory.root} contains no output of ranks. To keep it from the next start on, give mt-resilient run the option "
            "--set agent.rank_log_mb=64, or give torchrun --log-dir and --redirects 3"
        )
    generation = _generation(directory, incident) if incident else max(found, key=_changed_ns).generation
    chosen = [log for log in found if log.generation == generation and rank in (None, log.rank)]
    if not chosen:
        raise UsageError(f"{_missing(found, generation, rank)} in {directory.root}")
    for log in chosen:
        _show(log, _newest(log, lines))
    if follow and not incident:
        _follow(directory, rank, chosen)
    return 0


def _changed_ns(log: RankLog) -> int:
    """Return when the log last changed, which tells which of two logs is newer; 0: the agent has removed it. The generation's number does
    not tell it: numbers restart at 1 if etcd's data is lost."""
    with suppress(FileNotFoundError):
        return log.path.stat().st_mtime_ns
    return 0


def _logs(directory: RunDirectory) -> list[RankLog]:
    """Return the files of all ranks whose nodes have their run directory here, in order of generation and rank."""
    roots = [each.root for each in directory.nodes]
    found = []
    for path in (path for root in roots for path in (root / "logs" / FOLDER).glob("generation-*/rank-*.log")):
        if named := _NAME.fullmatch(f"{path.parent.name}/{path.name}"):
            found.append(RankLog(int(named[1]), int(named[2]), path))
    return sorted(found)


def _generation(directory: RunDirectory, incident: str) -> int:
    told = incidents(directory, look(directory))
    if (number := incident.lstrip("0")) not in told:
        raise UsageError(f"there is no incident {incident} in {directory.root}; see: mt-resilient explain")
    return told[number].generation


def _missing(found: Iterable[RankLog], generation: int, rank: int | None) -> str:
    ranks = [log.rank for log in found if log.generation == generation]
    if ranks:
        return f"there is no output of rank {rank}; known are ranks {min(ranks)} to {max(ranks)}"
    return f"the output of generation {generation} is not kept (or not on this node)"


def _newest(log: RankLog, lines: int) -> Iterable[bytes]:
    kept: deque[bytes] = deque(maxlen=lines or None)
    for path in (older(log.path), log.path):
        with suppress(FileNotFoundError), path.open("rb") as file:
            kept.extend(file)
    return kept


def _show(log: RankLog, lines: Iterable[bytes]) -> None:
    print(log.heading, flush=True)
    line = b"\n"
    for line in lines:
        _write(line)
    if not line.endswith(b"\n") and not sys.stdout.isatty():
        _write(b"\n")
    sys.stdout.flush()


def _write(line: bytes) -> None:
    """Write the line to stdout. A program at the other end gets its bytes. A terminal gets text without control characters, and only the
    last state of a progress bar."""
    if not sys.stdout.isatty():
        sys.stdout.flush()
        sys.stdout.buffer.write(line)
        return
    text = line.decode(errors="backslashreplace").rstrip("\r\n").rpartition("\r")[2].expandtabs()
    more = len(text) - _LONG
    print(printable(text[:_LONG]) + (f" … and {more:,} characters" if more > 0 else ""))


def _follow(directory: RunDirectory, rank: int | None, chosen: list[RankLog]) -> None:
    """Print new lines of the chosen ranks, also of later generations, until no agent runs."""
    since_ns = min((at_ns for at_ns in map(_changed_ns, chosen) if at_ns), default=0)
    places: dict[RankLog, tuple[int, int]] = {}
    for log in chosen:
        with suppress(FileNotFoundError):
            now = log.path.stat()
            places[log] = now.st_ino, now.st_size
    shown: RankLog | None = chosen[-1]
    while True:
        over = directory.agent() is None
        fresh = [log for log in _logs(directory) if _changed_ns(log) > since_ns and rank in (None, log.rank)]
        for log in sorted({*places, *fresh}):
            lines = _appended(log, places)
            if lines and log != shown:
                print(log.heading)
                shown = log
            for line in lines:
                _write(line)
        sys.stdout.flush()
        if over:
            return
        sleep(_LOOK_S)


def _appended(log: RankLog, places: dict[RankLog, tuple[int, int]]) -> list[bytes]:
    """Return the new complete lines. If the log has been rotated since the last look, the rest of the rotated file comes first."""
    inode, read = places.get(log, (0, 0))
    found: list[bytes] = []
    for path in (older(log.path), log.path):
        try:
            with path.open("rb") as file:
                now = os.fstat(file.fileno()).st_ino
                if path != log.path and now != inode:
                    continue
                file.seek(read if now == inode else 0)
                text = file.read()
        except OSError:
            continue
        whole = text.rpartition(b"\n")[0]
        whole = whole + b"\n" if whole or text[:1] == b"\n" else b""
        found += whole.splitlines(keepends=True)
        if path == log.path:
            places[log] = now, (read if now == inode else 0) + len(whole)
    return found
