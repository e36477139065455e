"""Keeps what each rank prints, in a file for each generation and rank, and passes it on to where the rank would have printed it.

    rank ──▶ pipe, or pseudo-terminal ──▶ thread of the agent ──▶ the agent's own stdout or stderr, the same bytes
                                              └──▶ another thread ──▶ logs/ranks/generation-0002/rank-00005.log

At its start, a rank puts the pipe in place of its stdout or stderr, where that is the agent's own (`training/attach/attach.py`). A stream
that torchrun redirects stays redirected. If the agent's stream is a terminal, the rank gets a terminal, too. If stdout and stderr are one
file, they get one pipe, so their lines keep their order. A reader that has stopped holds up the ranks, as without this program.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from ...resilience.clock import monotonic_s, sleep
from ...resilience.ipc.file_descriptors import high
from ...resilience.ipc.handoff import Output
from .rank_logs import FOLDER, RankLogs
from .worker_group import WorkerGroup

_CHUNK, _LAST = 1 << 16, 4096
_PIECE = 4096
"""If a pipe takes any bytes, it takes at least this many without blocking."""
_LINES, _SHOWN = 10, 1500
"""The most lines and characters that an incident shows."""
LAST_S = 2.0  # seconds that `finish` waits for the last output to be written
_SETTLE_S = 0.1
"""The most seconds that the agent waits for the last output of ended ranks to be passed on: a reader may have stopped."""
_LOOK_S, _POLL_MS, _WRITE_MS = 0.002, 1000, 100


class Channel:
    """One rank's pipe or pseudo-terminal."""

    def __init__(self, target: int, unblocking: int, keep: Callable[[bytes], None]) -> None:
        """target: the descriptor to which the rank would print. unblocking: a descriptor of the same file for writes that do not block.
        Only the thread of this stream calls `take` and `pass_on`."""
        if os.isatty(target):
            reading, writing = os.openpty()
            _like(target, writing)
        else:
            reading, writing = os.pipe2(os.O_CLOEXEC)
        self.target, self._unblocking, self._keep = target, unblocking, keep
        self.reading, self.writing = high(reading), high(writing)
        self.path = f"/proc/{os.getpid()}/fd/{self.writing}"
        self.last = b""
        """The newest output of this generation."""
        self.rest = b""
        """Ranks' output that the agent has read, but not passed on yet."""
        self._part = b""
        """The beginning of a line whose end has not arrived yet."""
        self._lock = threading.Lock()
        """Guards `last` and `_part`."""
        self.busy = False
        with suppress(OSError):
            self.resize()

    def take(self, data: bytes) -> None:
        self.rest = data
        with self._lock:
            self.last = (self.last + data)[-_LAST:]
            self._part += data
            whole = max(self._part.rfind(b"\n"), self._part.rfind(b"\r")) + 1
            if whole or len(self._part) > _CHUNK:
                self._keep(self._part[: whole or None])
                self._part = self._part[whole:] if whole else b""

    def pass_on(self, ended: threading.Event) -> None:
        """Write `rest` to where the rank would print, in pieces that do not block. When `ended` is set, `rest` keeps the bytes that a
        stopped reader has not taken."""
        poller = select.poll()
        poller.register(self._unblocking, select.POLLOUT)
        while self.rest and not ended.is_set():
            if poller.poll(_WRITE_MS):
                try:
                    self.rest = self.rest[os.write(self._unblocking, self.rest[:_PIECE]) :]
                except BlockingIOError:  # another program has filled the pipe
                    sleep(_LOOK_S)
                except OSError:  # the reader is gone: the job continues without it
                    self.rest = b""

    def begin(self) -> None:
        self.flush()
        with self._lock:
            self.last = b""

    def flush(self) -> None:
        """Write the beginning of an unfinished line to the log, too. An unfinished line is held back so that it does not interrupt a line
        of the other stream (stdout or stderr)."""
        with self._lock:
            if self._part:
                self._keep(self._part)
                self._part = b""

    def hand_over(self) -> None:
        """Start a `cat` that passes on the rest, and what the script's remaining processes will print."""
        rest = os.memfd_create("rest")
        os.write(rest, self.rest)
        words = ["cat", *([f"/proc/self/fd/{rest}"] if self.rest else []), "-"]
        streams = {"stdin": self.reading, "stdout": self.target, "stderr": subprocess.DEVNULL}
        subprocess.Popen(words, pass_fds=[rest], start_new_session=True, **streams)  # type: ignore[call-overload]
        os.close(rest)

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
        """most_mb: how many MB of a rank's output in a generation are kept; 0: none, and the ranks print directly."""
        self._ranks = ranks
        self._logs = RankLogs(logs / FOLDER, ranks, int(most_mb * 1e6))
        targets = {_identity(number): number for number in (2, 1)} if most_mb else {}
        channels: dict[int, list[Channel]] = {}
        try:
            for target in targets.values():
                also = _unblocking(target)
                channels[target] = [Channel(target, also, partial(self._logs.keep, at)) for at in range(ranks)]
        except OSError:  # no terminal or descriptor is free: the ranks print directly
            targets, channels = {}, {}
        self.handed = tuple(
            Output(device=device, inode=inode, paths=tuple(each.path for each in channels[target]))
            for (device, inode), target in targets.items()
        )
        self._by_rank = [[channels[target][at] for target in sorted(channels, reverse=True)] for at in range(ranks)]
        """By local rank, stderr first."""
        self._ended = threading.Event()
        self._threads = {
            threading.Thread(target=self._serve, args=(each,), name="rank output", daemon=True): each
            for each in channels.values()
        }
        for thread in (*self._threads, self._logs.thread) if channels else ():
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
            channel.begin()
        self._logs.begin(generation, node_rank * self._ranks)

    def tell(self, group: WorkerGroup) -> None:
        """Note the last lines of ranks that have just ended."""
        self._settle(_SETTLE_S)
        for local_rank, process in group.ranks.items():
            if process.ended_s and not process.last_lines:
                last = next((each.last for each in self._by_rank[local_rank] if each.last), b"")
                lines = last.decode(errors="backslashreplace").splitlines()[-_LINES:]
                process.last_lines = "\n".join(lines)[-_SHOWN:]

    def finish(self) -> None:
        """Pass on the remaining output. If processes of the script still run and may print, or the reader has stopped, a `cat` takes
        over."""
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
        self._logs.end()
        self._logs.thread.join(LAST_S)
        for thread, channels in self._threads.items():
            for channel in channels if not thread.is_alive() else ():  # a thread that is stuck in a write has the rest
                if channel.unread() or not _over(channel.reading):
                    with suppress(OSError):
                        channel.hand_over()

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
                    channel.take(data)
                    channel.pass_on(self._ended)
                else:
                    poller.unregister(fd)
                    del by_fd[fd]
                channel.busy = bool(channel.rest)
            for channel in by_fd.values():
                if not found:
                    channel.flush()
                with suppress(OSError):
                    channel.resize()


def _identity(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_dev, status.st_ino


def _unblocking(number: int) -> int:
    """Return a descriptor of the same terminal or pipe whose writes never block. For another kind of file, or if the kernel refuses, return
    `number`."""
    if stat.S_ISFIFO(os.fstat(number).st_mode) or os.isatty(number):
        with suppress(OSError):
            return high(os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    return number


def _over(reading: int) -> bool:
    """Return whether no process can write to the other end of `reading` any more."""
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def _like(terminal: int, ours: int) -> None:
    """Make `ours` like the agent's terminal, except that it changes no byte: the agent's terminal does that."""
    with suppress(termios.error):
        settings = termios.tcgetattr(terminal)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(ours, termios.TCSANOW, settings)
