"""Examines a rank from outside: the stacks that the rank writes on request, and the kernel's information about its process."""

from __future__ import annotations

import linecache
import os
import platform
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ...resilience.detect import flight_recorder
from ...resilience.detect.hang_rules import Look
from ...resilience.detect.stack_traces import Frame, Spot, locate, parse
from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.shared_memory import memory
from ...resilience.model.signals import Place
from ..ranks.exit_codes import send
from ..ranks.worker_group import Watched

_KEPT = 20
"""Number of files with stacks that are kept in the run directory."""
_MOST_BYTES = 1 << 20
"""The most bytes of stacks that are read, enough for 100 threads of 100 frames. A script may write to the same file."""
_WRITES = {"x86_64": ("1", "20"), "aarch64": ("64", "66")}
"""Numbers of the system calls `write` and `writev`."""
_READS = {"x86_64": ("0", "23", "270"), "aarch64": ("63", "72")}
"""Numbers of the system calls `read`, `select` and `pselect6`. The latter two get the highest descriptor plus 1."""
_STATES = {
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_RUNNING: "R",
}


class Witness:
    def __init__(self, ranks: int, logs: Path) -> None:
        """logs: the directory for the files with stacks."""
        self._logs = logs
        # The files are in memory, because the ranks may be waiting for the disk.
        self._files = [memory(f"mt-resilient-stacks-{n}", seals=0) for n in range(ranks)]
        self._texts = [""] * ranks

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths with which ranks open their files for stacks."""
        return tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in self._files)

    def ask(self, local_rank: int, page: Page, process: Watched) -> None:
        """Signal the rank to write its stacks, if it certainly handles the signal. The signal kills a process that does not handle it."""
        os.ftruncate(self._files[local_rank], 0)
        if not page.pid or process.pidfd < 0 or not page.listens or not _catches(process.pid, page.listens):
            return
        send(process.pid, process.pidfd, page.listens)

    def take(self, local_rank: int, page: Page, process: Watched, now_s: float) -> Look:
        """Return the stacks that the rank has written since the request, and its process state. process: the rank's process, or the
        launcher's before the rank has started. now_s: monotonic."""
        self._texts[local_rank] = os.pread(self._files[local_rank], _MOST_BYTES, 0).decode(errors="replace")
        stack = parse(self._texts[local_rank]).get(page.main_thread)
        try:
            seen = psutil.Process(process.pid)
            state = _STATES.get(seen.status(), "S")
            family = seen, *seen.children(recursive=True)
        except psutil.Error:
            return Look(at_s=now_s, state="", spot=Spot(place=Place.HALTED, words="gone"))
        calls = flight_recorder.read(self._texts[local_rank])
        device_waits = bool(page.device_since_ns) and page.device_queued != page.device_reached
        queued = device_waits or not calls or any(each.open for each in calls)
        spot = _spot(state, stack, queued)
        spot = spot if page.pid else Spot(place=Place.HALTED, words="still starting its interpreter")
        return Look(
            at_s=now_s,
            state=state,
            cpu_s=sum(map(_cpu_s, family)),
            io_bytes=sum(map(_io_bytes, family)),
            stack=stack,
            spot=spot,
            person=_waits_for_a_person(process.pid),
            device_done=page.device_reached if page.device_queued or page.device_reached else None,
            device_waits=device_waits,
            device_still_s=max(0.0, now_s - page.device_since_ns / 1e9) if page.device_since_ns else 0.0,
            device_answers=page.device_called == page.device_answered,
            calls=calls,
        )

    def keep(self, name: str, looks: Mapping[int, Look]) -> str:
        """Write the newest stacks of all ranks to a file in the run directory, and return its path. looks: by local rank."""
        path = self._logs / f"stacks-{name}.txt"
        parts = [
            f"local rank {n}: {look.spot.words}; state {look.state or 'none'}\n\n{self._texts[n] or 'It has not answered.'}\n"
            for n, look in looks.items()
        ]
        _soon(lambda: self._write(path, "\n".join(parts)))
        return str(path)

    def _write(self, path: Path, text: str) -> str:
        with suppress(OSError):
            path.write_text(text, "utf-8", "backslashreplace")
            for old in sorted(self._logs.glob("stacks-*.txt"), key=os.path.getmtime)[:-_KEPT]:
                old.unlink(missing_ok=True)
        return ""


def _spot(state: str, stack: Sequence[Frame] | None, queued: bool) -> Spot:
    if state == "T":
        return Spot(place=Place.HALTED, words="stopped by a signal")
    if stack is None and state == "D":
        return Spot(place=Place.HALTED, words="stuck in the kernel (state D: a disk, or a driver)")
    if stack is None:
        return Spot(place=Place.PERHAPS, words="at a place that it does not report")
    return locate(stack, _soon(lambda: _line(stack[0])) if stack else "", queued=queued)


def _line(at: Frame) -> str:
    return linecache.getline(at.file, at.line) if os.path.isfile(at.file) else ""


_reading: list[threading.Thread] = []
"""The last thread of `_soon`."""


def _soon(what: Callable[[], str]) -> str:
    """Return the result of `what`; an empty text if it takes more than half a second. `what` may block, because the disk may be the cause
    of the hang. While an earlier call is blocked, return at once: the looks at many ranks must not take longer than the agent's lease."""
    if any(thread.is_alive() for thread in _reading):
        return ""
    given: list[str] = []
    thread = threading.Thread(target=lambda: given.append(what()), daemon=True)
    _reading[:] = [thread]
    thread.start()
    thread.join(0.5)
    return given[0] if given else ""


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return float(sum(process.cpu_times()[:4]))  # user and system time, its own and its reaped children's
    return 0.0


def _io_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        io = process.io_counters()
        return int(io.read_chars + io.write_chars)
    return 0


def _waits_for_a_person(pid: int) -> str:
    """Return what the main thread of `pid` waits for, if it writes stdout or stderr to a terminal or a pipe, or reads stdin from a
    terminal. Otherwise return an empty text."""
    with suppress(OSError, ValueError):
        call, first, *_ = Path(f"/proc/{pid}/syscall").read_text(encoding="utf-8").split()
        number, machine = int(first, 16), platform.machine()
        if call in _WRITES.get(machine, ()) and number in (1, 2):
            mode = os.stat(f"/proc/{pid}/fd/{number}").st_mode
            return "it waits until its output is read" if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) else ""
        reads = _READS.get(machine, ())
        if call in reads and number == (0 if call == reads[0] else 1):
            mode = os.stat(f"/proc/{pid}/fd/0").st_mode
            return "it waits for input from a terminal" if stat.S_ISCHR(mode) else ""
    return ""


def _catches(pid: int, number: int) -> bool:
    """Return whether the kernel reports that the process handles this signal and does not block it. (After an exec, a process has no
    handlers.)"""
    masks = dict(_masks(pid))
    bit = 1 << (number - 1)
    return bool(masks.get("SigCgt", 0) & bit) and not masks.get("SigBlk", 0) & bit


def _masks(pid: int) -> Iterator[tuple[str, int]]:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name in ("SigCgt", "SigBlk"):
                yield name, int(value, 16)
