"""Writes what each rank prints into a file for each generation and rank, from a thread: a disk that hangs holds up neither the ranks nor
the agent."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from ...resilience.ipc.file_descriptors import appending

FOLDER = "ranks"
"""The folder of these files, in `logs/`."""
_GENERATIONS, _TOTAL_BYTES = 20, 1_000_000_000
"""The most generations whose output is kept on this node, and the most bytes of this output."""
_FREE, _FREE_BYTES = 0.05, 10_000_000_000
"""Nothing is kept while a smaller share of the disk and fewer bytes are free."""
_MOST = 500
"""The most pieces of output that wait for the disk."""


class Log:
    """The file of one rank in one generation, in two halves: when the newer one is full, it replaces the older one."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._name, self._file = most_bytes, Path(), -1

    def begin(self, name: Path) -> None:
        self._name = name
        self._open()

    def write(self, data: bytes) -> bool:
        """Append `data`. Output that cannot be written to the log appears on the terminal only. Return whether the file has just become the
        older half."""
        with suppress(OSError):
            os.write(self._file, data)
            if os.fstat(self._file).st_size > self._most // 2:
                self._name.replace(older(self._name))
                self._open()
                return True
        return False

    def _open(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        with suppress(OSError):
            self._file = appending(self._name)


class RankLogs:
    """The files of all ranks of this node."""

    def __init__(self, folder: Path, ranks: int, most_bytes: int) -> None:
        """most_bytes: for each rank and generation."""
        self._folder, self._now = folder, folder
        self._logs = [Log(min(most_bytes, _TOTAL_BYTES // ranks)) for _ in range(ranks)]
        self._orders: SimpleQueue[tuple[int, bytes] | tuple[int, int] | None] = SimpleQueue()
        self._lock = threading.Lock()  # two threads keep the output of one rank: that of its stdout, and of its stderr
        self._lost = [0] * ranks
        self.thread = threading.Thread(target=self._serve, name="rank logs", daemon=True)

    def begin(self, generation: int, first_rank: int) -> None:
        self._say_lost()
        self._orders.put((generation, first_rank))

    def keep(self, local_rank: int, data: bytes) -> None:
        with self._lock:
            if self._orders.qsize() < _MOST:
                self._orders.put((local_rank, self._notice(local_rank) + data))
            else:
                self._lost[local_rank] += len(data)

    def end(self) -> None:
        self._say_lost()
        self._orders.put(None)

    def _notice(self, local_rank: int) -> bytes:
        """Return the notice that replaces bytes that the disk did not take in time; empty: it took all."""
        lost, self._lost[local_rank] = self._lost[local_rank], 0
        return b"\n[mt-resilient: %d bytes are missing here, because the disk was slow]\n" % lost if lost else b""

    def _say_lost(self) -> None:
        with self._lock:
            for local_rank in range(len(self._logs)):
                if notice := self._notice(local_rank):
                    self._orders.put((local_rank, notice))

    def _serve(self) -> None:
        cut = set[int]()
        while (order := self._orders.get()) is not None:
            number, what = order
            if isinstance(what, int):
                self._begin(number, what)
            elif not _full(self._folder):
                cut.discard(number)
                if self._logs[number].write(what):
                    self._tidy()
            elif number not in cut:
                cut.add(number)
                self._logs[number].write(
                    b"\n[mt-resilient: output is missing here: less than 5 % of the disk and less than 10 GB were free]\n"
                )

    def _begin(self, generation: int, first_rank: int) -> None:
        """Begin the files of a generation. If a folder with this number exists (etcd's data was lost, and numbers restarted), rename that
        folder."""
        self._now = folder = self._folder / f"generation-{generation:04d}"
        with suppress(OSError):
            if folder.exists():
                folder.rename(next(name for at in range(1, 1 << 20) if not (name := Path(f"{folder}.{at}")).exists()))
            folder.mkdir(parents=True)
        self._tidy()
        for local_rank, log in enumerate(self._logs):
            log.begin(folder / f"rank-{first_rank + local_rank:05d}.log")

    def _tidy(self) -> None:
        """Remove the oldest generations, never the present one, until the rest is within both limits."""
        with suppress(OSError):
            sizes = {each: sum(file.stat().st_size for file in each.iterdir()) for each in self._folder.iterdir()}
            oldest = sorted(sizes.keys() - {self._now}, key=lambda each: each.stat().st_mtime)
            while oldest and (len(sizes) > _GENERATIONS or sum(sizes.values()) > _TOTAL_BYTES):
                shutil.rmtree(oldest[0], ignore_errors=True)
                del sizes[oldest.pop(0)]


def older(name: Path) -> Path:
    """Return the path of the older half of a rank's output. The file exists only if the rank has printed enough."""
    return name.with_name(f"{name.name}.1")


def _full(folder: Path) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail < _FREE * disk.f_blocks and disk.f_bavail * disk.f_frsize < _FREE_BYTES
