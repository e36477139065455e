"""One node of the job with faults: its agent, `mt-resilient run`, in a run directory of its own, and the processes that descend from it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...agent.run_directory import RunDirectory
from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.die_with_parent import spawn
from ...resilience.report.journal import Tail
from .board_reader import BoardReader


class NotThere(Exception):
    """The fault has nothing to strike now; the message says what is missing."""


@dataclass(frozen=True)
class Place:
    """Where one run of the user's command keeps its files."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def errors(self) -> Path:
        return self.root / "errors"

    @property
    def clock(self) -> Path:
        """Where a fault sets the clock of the processes."""
        return self.root / "clock"

    def lines(self) -> tuple[str, ...]:
        return tuple(self.output.read_text(errors="backslashreplace").splitlines())

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start `command` with its output in this place. It dies with this process. Ctrl-C at the terminal does not reach it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as output, self.errors.open("ab") as errors:
            return spawn(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )


class Agent:
    def __init__(self, name: str, place: Place, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """name: of the node; empty: the job has one node. command: `mt-resilient run …`."""
        self.name, self.place = name, place
        self.directory = RunDirectory(place.run)
        self.away = False
        """Whether the agent is to be started again later."""
        self.trained = False
        """Whether the agent's ranks have attached since its start."""
        self._command, self._environ = command, environ
        self._board, self._journal = BoardReader(), Tail(place.run / "journal.jsonl")
        self._ranks: dict[int, tuple[int, psutil.Process]] = {}
        """Pid → generation and process, of all ranks that have attached."""
        self.start()

    def __str__(self) -> str:
        return f"the agent of {self.name}" if self.name else "the agent"

    def start(self) -> None:
        """Give the command, as a user gives it again after its agent has died."""
        self.process, self.away, self.trained = self.place.start(self._command, self._environ), False, False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return not self.away and self.process.poll() is None

    def pages(self) -> list[Page]:
        """Return the page of each of its ranks, and note their processes."""
        pages = self._board.pages(self.pid)
        self.trained |= any(page.pid for page in pages)
        for page in pages:
            if page.pid and page.pid not in self._ranks:
                with suppress(psutil.Error):
                    self._ranks[page.pid] = (page.generation, psutil.Process(page.pid))
        return pages

    def journal(self) -> list[dict[str, Any]]:
        """Return the new lines of its journal."""
        return [{**line, "of": self.name} for line in self._journal.new()]

    def overlap(self, pages: Sequence[Page]) -> str:
        """Return the process of an earlier generation that is alive while all ranks of this node make steps of a later one."""
        generation = max((page.generation for page in pages), default=0)
        if not pages or not all(page.stepped_ns for page in pages):
            return ""
        for pid, (older, process) in list(self._ranks.items()):
            if older < generation:
                if not _gone(process):
                    return f"process {pid} of generation {older} is alive while generation {generation} makes steps"
                del self._ranks[pid]
        return ""

    # -- its processes --------------------------------------------------------------------------------------------------

    def helper(self, words: str, name: str) -> psutil.Process:
        """Return the agent's newest child that is called `words`, or whose arguments name a module `….words`. Raises NotThere. name: what
        people call it."""
        found = []
        with suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                with suppress(psutil.Error):
                    if words == child.name() or any(word.endswith(f".{words}") for word in child.cmdline()):
                        found.append(child)
        if not found:
            raise NotThere(f"there is no {name}")
        return found[-1]

    def everyone(self) -> list[psutil.Process]:
        """Return the agent and all that descends from it. Raises NotThere."""
        if not self.running:
            raise NotThere(f"{self} has ended")
        agent = psutil.Process(self.pid)
        return [agent, *agent.children(recursive=True)]

    def kill_everyone(self) -> int:
        """Kill the agent and all that descends from it. Return their number. Raises NotThere."""
        everyone = self.everyone()
        for process in everyone:
            with suppress(psutil.Error):
                process.kill()
        return len(everyone)

    def told_to_end(self, number: signal.Signals) -> None:
        if self.running:
            self.process.send_signal(number)

    def outlived(self, until: Callable[[Callable[[], object]], bool]) -> list[str]:
        """Return the ranks' processes that outlive their agent. until: waits for something, and returns whether it came."""
        left = [pid for pid, (_, process) in self._ranks.items() if not until(lambda process=process: _gone(process))]  # type: ignore[misc]
        self._ranks.clear()
        return [f"rank process {pid} outlived {self}" for pid in left]

    def cut_journal(self, nbytes: int) -> None:
        """Take the last bytes of the journal away, while no agent runs."""
        self._journal.read = max(0, self._journal.path.stat().st_size - nbytes)
        os.truncate(self._journal.path, self._journal.read)


def _gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
