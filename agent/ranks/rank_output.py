"""Keeps what each rank prints, in a file for each generation and rank, and passes it on to where the rank would have printed it.

    rank ──▶ pipe, or pseudo-terminal ──▶ thread of the agent ──▶ the agent's own stdout or stderr, the same bytes
                                              └──▶ another thread ──▶ logs/ranks/generation-0002/rank-00005.log

At its start, a rank puts the pipe in place of its stdout or stderr, where that is the agent's own (`training/attach/output.py`). What
torchrun redirects stays as torchrun has it. If the agent's stream is a terminal, the rank gets a terminal, too. If stdout and stderr are
one file, they get one pipe, so their lines keep their order. A reader that has stopped holds up the ranks, as without this program.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

from ...resilience.clock import monotonic_s, sleep
from ...resilience.ipc.file_descriptors import appending, high
from ...resilience.ipc.handoff import Output
from .worker_group import WorkerGroup

FOLDER = "ranks"
"""In `logs/`."""
_GENERATIONS = 20
"""Number of generations whose output is kept."""
_CHUNK, _LAST = 1 << 16, 4096
_MOST = 500
"""The most pieces of output that wait for the disk."""
_LINES, _SHOWN = 10, 1500
"""The most lines and characters that an incident shows."""
LAST_S = 2.0  # that `finish` waits until the last output is written
_SETTLE_S = 0.1
"""The most seconds for which the agent waits until the last output of ranks that are gone is passed on: a reader may have stopped."""
_LOOK_S, _POLL_MS = 0.002, 1000


class Log:
    """The file of one rank in one generation, in two halves: when the newer one is full, it replaces the older one."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._name, self._file = most_bytes, Path(), -1
        self.lost = 0
        """Number of bytes that are missing at this place, because the disk did not take them in time."""

    def begin(self, name: Path) -> None:
        self._name = name
        self._open()

    def write(self, data: bytes) -> None:
        """Append. What cannot be written is on the terminal alone."""
        if self.lost:
            data = b"\n[mt-resilient: %d bytes are missing here, because the disk was slow]\n%b" % (self.lost, data)
            self.lost = 0
        with suppress(OSError):
            os.write(self._file, data)
            if os.fstat(self._file).st_size > self._most // 2:
                self._name.replace(older(self._name))
                self._open()

    def _open(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        with suppress(OSError):
            self._file = appending(self._name)


class Files:
    """Writes the files of all ranks of this node, from a thread: a disk that hangs holds up neither the ranks nor the agent."""

    def __init__(self, folder: Path, ranks: int, most_bytes: int) -> None:
        self._folder, self._logs = folder, [Log(most_bytes) for _ in range(ranks)]
        self._orders: SimpleQueue[tuple[int, bytes] | tuple[int, int] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="rank logs", daemon=True)

    def begin(self, generation: int, first_rank: int) -> None:
        self._orders.put((generation, first_rank))

    def keep(self, local_rank: int, data: bytes) -> None:
        if self._orders.qsize() < _MOST:
            self._orders.put((local_rank, data))
        else:
            self._logs[local_rank].lost += len(data)

    def end(self) -> None:
        self._orders.put(None)

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            number, what = order
            if isinstance(what, bytes):
                self._logs[number].write(what)
            else:
                self._begin(number, what)

    def _begin(self, generation: int, first_rank: int) -> None:
        folder = self._folder / f"generation-{generation:04d}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for old in sorted(self._folder.iterdir(), key=lambda each: (len(each.name), each.name))[:-_GENERATIONS]:
                shutil.rmtree(old, ignore_errors=True)
        for local_rank, log in enumerate(self._logs):
            log.begin(folder / f"rank-{first_rank + local_rank:05d}.log")


class Channel:
    """One rank's pipe or pseudo-terminal."""

    def __init__(self, target: int, keep: Callable[[bytes], None]) -> None:
        if os.isatty(target):
            reading, writing = os.openpty()
            _like(target, writing)
        else:
            reading, writing = os.pipe2(os.O_CLOEXEC)
        self.target, self._keep = target, keep
        self.reading, self.writing = high(reading), high(writing)
        self.path = f"/proc/{os.getpid()}/fd/{self.writing}"
        self.last = b""
        """The newest output of this generation."""
        self._part = b""
        """The beginning of a line whose end has not come."""
        self.busy = False
        with suppress(OSError):
            self.resize()

    def pass_on(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.target, rest) :]
            except BlockingIOError:  # another program has set it so
                select.select([], [self.target], [], 1.0)
            except OSError:  # the reader is gone: the job goes on without it
                break
        self.last = (self.last + data)[-_LAST:]
        self._part += data
        whole = max(self._part.rfind(b"\n"), self._part.rfind(b"\r")) + 1
        if whole or len(self._part) > _CHUNK:
            self._keep(self._part[: whole or None])
            self._part = self._part[whole:] if whole else b""

    def flush(self) -> None:
        """Keep the beginning of a line, too. It had waited for its end, so as not to stand amid a line of the other stream."""
        if self._part:
            self._keep(self._part)
            self._part = b""

    def unread(self) -> bool:
        (waiting,) = struct.unpack("i", fcntl.ioctl(self.reading, termios.FIONREAD, b"\0" * 4))
        return self.busy or waiting > 0

    def resize(self) -> None:
        """Give the rank's terminal the size of the agent's."""
        if os.isatty(self.target):
            size = fcntl.ioctl(self.target, termios.TIOCGWINSZ, b"\0" * 8)
            if size != fcntl.ioctl(self.writing, termios.TIOCGWINSZ, b"\0" * 8):
                fcntl.ioctl(self.writing, termios.TIOCSWINSZ, size)


class RankOutput:
    """The output of all ranks of this node."""

    def __init__(self, logs: Path, ranks: int, most_mb: float) -> None:
        """most_mb: the most that is kept of a rank's output in a generation; 0: nothing is kept, and the ranks print directly."""
        self._ranks = ranks
        self._files = Files(logs / FOLDER, ranks, int(most_mb * 1e6))
        targets = {_identity(number): number for number in (2, 1)} if most_mb else {}
        channels: dict[int, list[Channel]] = {}
        try:
            for target in targets.values():
                channels[target] = [Channel(target, partial(self._files.keep, at)) for at in range(ranks)]
        except OSError:  # no terminal or descriptor is free: the ranks print directly
            targets, channels = {}, {}
        self.handed = tuple(
            Output(device=device, inode=inode, paths=tuple(each.path for each in channels[target]))
            for (device, inode), target in targets.items()
        )
        self._by_rank = [[channels[target][at] for target in sorted(channels, reverse=True)] for at in range(ranks)]
        """By local rank, stderr first."""
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(each,), name="rank output", daemon=True)
            for each in channels.values()
        ]
        for thread in (*self._threads, self._files.thread) if channels else ():
            thread.start()

    @property
    def _channels(self) -> Iterator[Channel]:
        return chain(*self._by_rank)

    @property
    def paths(self) -> list[str]:
        return [channel.path for channel in self._channels]

    def begin(self, generation: int, node_rank: int) -> None:
        """Begin the files of a generation, whose ranks have not started."""
        if not self._threads:
            return
        self._settle(_SETTLE_S)
        for channel in self._channels:
            channel.flush()
        self._files.begin(generation, node_rank * self._ranks)
        for channel in self._channels:
            channel.last = b""

    def tell(self, group: WorkerGroup) -> None:
        """Note the last lines of ranks that have just ended."""
        self._settle(_SETTLE_S)
        for local_rank, process in group.ranks.items():
            if process.ended_s and not process.last_lines:
                last = next((each.last for each in self._by_rank[local_rank] if each.last), b"")
                lines = last.decode(errors="backslashreplace").splitlines()[-_LINES:]
                process.last_lines = "\n".join(lines)[-_SHOWN:]

    def finish(self) -> None:
        """Pass on what is left. If the script has left processes running that print, or the reader has stopped, `cat` goes on with that."""
        if not self._threads:
            return
        for channel in self._channels:
            os.close(channel.writing)
        until = monotonic_s() + LAST_S
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic_s()))
        self._ended.set()
        for thread in self._threads:
            thread.join(_POLL_MS / 1000 + 0.1)
        for channel in self._channels:
            channel.flush()
        self._files.end()
        self._files.thread.join(LAST_S)
        for channel in self._channels:
            if channel.unread() or not _over(channel.reading):
                with suppress(OSError):
                    streams = {"stdin": channel.reading, "stdout": channel.target, "stderr": subprocess.DEVNULL}
                    subprocess.Popen(["cat"], **streams, start_new_session=True)  # type: ignore[call-overload]

    def _settle(self, seconds: float) -> None:
        """Wait until all output is passed on, at most `seconds`: its reader may have stopped."""
        until = monotonic_s() + seconds
        while any(each.unread() for each in self._channels) and monotonic_s() < until:
            sleep(_LOOK_S)

    def _serve(self, channels: Sequence[Channel]) -> None:
        by_fd, poller = {channel.reading: channel for channel in channels}, select.poll()
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        while by_fd and not self._ended.is_set():
            found = poller.poll(_POLL_MS)
            for fd, _ in found:
                channel, data = by_fd[fd], b""
                channel.busy = True
                with suppress(OSError):  # no process has this terminal open any more
                    data = os.read(fd, _CHUNK)
                if data:
                    channel.pass_on(data)
                else:
                    poller.unregister(fd)
                    del by_fd[fd]
                channel.busy = False
            for channel in by_fd.values():
                if not found:
                    channel.flush()
                with suppress(OSError):
                    channel.resize()


def older(name: Path) -> Path:
    """Return where the older half of a rank's output is, if there is so much."""
    return name.with_name(f"{name.name}.1")


def _identity(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_dev, status.st_ino


def _over(reading: int) -> bool:
    """Whether no process can write there any more."""
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def _like(terminal: int, ours: int) -> None:
    """Make `ours` like the agent's terminal, except that it changes no byte: the agent's terminal does that."""
    with suppress(termios.error):
        settings = termios.tcgetattr(terminal)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(ours, termios.TCSANOW, settings)
