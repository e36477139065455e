"""The job with faults: `mt-resilient run` in a run directory of its own. Starts it, looks at it, and knows its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ...agent.run_directory import RunDirectory
from ...resilience.clock import monotonic_s, sleep, wall_s
from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.die_with_parent import spawn
from ...resilience.report.journal import event
from ..judgement.history import Seen
from .board_reader import BoardReader

_LOOK_S = 0.02
_END_S, _DIE_S = 120.0, 20.0
"""Seconds that an agent may take to end in order, and that ranks may live on after it was killed."""
_MARKS = {"attached": "attached_ns", "built": "built_ns", "restored": "restored_ns", "stepped": "stepped_ns"}


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


class Job:
    def __init__(self, place: Place, command: Sequence[str], environ: Mapping[str, str], orders: Path) -> None:
        """command: `mt-resilient run …`. orders: the folder of orders to the injector in the ranks."""
        self.place, self.orders = place, orders
        self.directory = RunDirectory(place.run)
        self._command, self._environ = command, environ
        self._board, self._journal = BoardReader(), _Tail(place.run / "journal.jsonl")
        self.journal: list[dict[str, Any]] = []
        self.record: dict[str, Any] | None = None
        """The newest generation record."""
        self._memory_step = -1
        self.unexpected: list[str] = []
        """Ends that no fault explains."""
        self.seen: list[Seen] = []
        """What was seen, a new entry for each change."""
        self._ranks: dict[int, tuple[int, psutil.Process]] = {}
        """Pid → generation and process, of all ranks that have attached."""
        self.disk: Path | None = None
        """The small file system that holds the snapshots, if the plan wants one."""
        self.began_s, self.began_wall_s = monotonic_s(), wall_s()
        self.start()

    def start(self) -> None:
        """Give the command, as a user gives it again after its agent has died."""
        self._memory_step = -1
        self.agent = self.place.start(self._command, self._environ)

    def now_s(self) -> float:
        """Return the seconds since the job's first start."""
        return monotonic_s() - self.began_s

    # -- looking --------------------------------------------------------------------------------------------------------

    def pages(self) -> list[Page]:
        return self._board.pages(self.agent.pid)

    def look(self) -> Seen:
        for line in self._journal.new():
            self.journal.append(line)
            if line["kind"] == "generation":
                self.record = line["record"]
            elif line["kind"] == "progress":
                self._memory_step = line["snapshots"]["memory"][0]
        pages = self.pages()
        generation = max((page.generation for page in pages), default=0)
        for page in pages:
            if page.pid and page.pid not in self._ranks:
                with suppress(psutil.Error):
                    self._ranks[page.pid] = (page.generation, psutil.Process(page.pid))
        steps = tuple(page.step if page.generation == generation else -1 for page in pages)
        overlap = self._overlap(generation) if pages and all(page.stepped_ns for page in pages) else ""
        seen = Seen(
            at_s=self.now_s(),
            generation=generation,
            steps=steps,
            memory_step=self._memory_step,
            disk_step=max(self.on_disk().values(), default=-1),
            overlap=overlap,
        )
        last = self.seen[-1] if self.seen else None
        if last is None or (last.generation, last.steps, last.overlap) != (generation, steps, overlap):
            self.seen.append(seen)
        return seen

    def _overlap(self, generation: int) -> str:
        for pid, (older, process) in list(self._ranks.items()):
            if older < generation:
                if not _gone(process):
                    return f"process {pid} of generation {older} is alive while generation {generation} makes steps"
                del self._ranks[pid]
        return ""

    def marks(self) -> dict[str, bool]:
        """Return, for each mark of a start, whether all ranks have come so far."""
        pages = self.pages()
        return {name: bool(pages) and all(getattr(page, field) for page in pages) for name, field in _MARKS.items()}

    def snapshots(self) -> Path:
        return (self.disk or self.place.run) / "snapshots"

    def on_disk(self) -> dict[str, int]:
        """Return the committed snapshots on disk: name → step."""
        found = {}
        with suppress(OSError):
            for name in os.listdir(self.snapshots()):
                if (self.snapshots() / name / "COMMIT").exists() and not (
                    self.snapshots() / name / "REJECTED"
                ).exists():
                    found[name] = int(name.partition("-")[0])
        return found

    # -- its processes --------------------------------------------------------------------------------------------------

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank. Raises NotThere."""
        pages = self.pages()
        if number < len(pages) and pages[number].pid:
            with suppress(psutil.Error):
                process = psutil.Process(pages[number].pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    return process
        raise NotThere(f"rank {number} has no process")

    def helper(self, words: str, name: str) -> psutil.Process:
        """Return the agent's newest child that is called `words`, or whose arguments name a module `….words`. Raises NotThere. name: what
        people call it."""
        found = []
        with suppress(psutil.Error):
            for child in psutil.Process(self.agent.pid).children():
                with suppress(psutil.Error):
                    if words == child.name() or any(word.endswith(f".{words}") for word in child.cmdline()):
                        found.append(child)
        if not found:
            raise NotThere(f"there is no {name}")
        return found[-1]

    def everyone(self) -> list[psutil.Process]:
        """Return the agent and all that descends from it."""
        agent = psutil.Process(self.agent.pid)
        return [agent, *agent.children(recursive=True)]

    def restart(self, number: signal.Signals, expected: int, meanwhile: Callable[[], object] = bool) -> None:
        """End the agent with this signal, which should make it exit with the code `expected`. Then start it again, as its user would,
        unless the training is over. meanwhile: called before the start."""
        if self.agent.poll() is None:
            self.agent.send_signal(number)
        if not self.until(lambda: self.agent.poll() is not None, _END_S):
            self.unexpected.append(f"the agent did not end within {_END_S:.0f} s of {number.name}")
            return
        code = self.agent.returncode
        if code not in (expected, 0):
            self.unexpected.append(f"the agent ended with exit code {code} after {number.name}, not with {expected}")
        left = [pid for pid, (_, process) in self._ranks.items() if not self.until(partial(_gone, process), _DIE_S)]
        self.unexpected += [f"rank process {pid} outlived its agent by {_DIE_S:.0f} s" for pid in left]
        self._ranks.clear()
        meanwhile()
        if code != 0:
            self.start()

    def cut_journal(self, nbytes: int) -> None:
        """Take the last bytes of the journal away, while no agent runs."""
        self._journal.cut(nbytes)

    def until(self, what: Callable[[], object], limit_s: float) -> bool:
        """Look at the job until `what` holds. Return whether it did within `limit_s` seconds."""
        end_s = monotonic_s() + limit_s
        while monotonic_s() < end_s:
            if what():
                return True
            self.look()
            sleep(_LOOK_S)
        return False


class _Tail:
    """The events that are appended to a journal."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                if found := event(line):
                    yield found

    def cut(self, nbytes: int) -> None:
        self._at = max(0, self._path.stat().st_size - nbytes)
        os.truncate(self._path, self._at)


def _gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def incidents(journal: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the last form of each incident, in order of time."""
    found: dict[str, dict[str, Any]] = {}
    for line in journal:
        if line["kind"] == "incident":
            incident = line["incident"]
            found[json.dumps([incident["generation"], incident["id"], incident["at_s"]])] = incident
    return sorted(found.values(), key=lambda incident: incident["at_s"])
