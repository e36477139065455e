"""Reads the journals of one job, and keeps what the web page needs of them. Each look at a journal reads only its new lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...resilience.model.incident import Incident
from ...resilience.report.journal import Tail
from ...resilience.report.overview import Overview, State
from ...resilience.report.page_view import Seen
from ..run_directory import RunDirectory
from .explain import latest

_COURSE = ("at_s", "step", "loss", "step_s")
"""The fields that are kept of every `progress` line. The newest line is kept whole."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The fields of a `start` line that are read. A line that does not fit these types was damaged, and is skipped. The classes below do
    the same for the other kinds of lines."""

    at_s: float
    command: list[str] = field(default_factory=list)
    again: str = ""
    configuration: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class End:
    at_s: float
    code: int


@dataclass(frozen=True, kw_only=True)
class Told(Overview):
    at_s: float
    total: int = 0
    loss: float | None = None
    step_s: float | None = None
    etcd_s: float | None = None
    snapshots: dict[str, tuple[int, float]] = field(default_factory=dict)  # type: ignore[assignment]
    spent: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Said:
    at_s: float
    sentence: str
    mood: str


@dataclass(frozen=True, kw_only=True)
class DrainEvent:
    event: str
    step: int = -1
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Drain:
    at_s: float
    event: DrainEvent


_KINDS = {"start": Start, "end": End, "progress": Told, "said": Said, "drain": Drain, "incident": dict}
"""The kinds of lines that are read. A line of a journal must fit the type that is given here for its kind."""


class RunReader:
    def __init__(self, directories: Sequence[RunDirectory]) -> None:
        """directories: the job's run directory, or those of several of its nodes."""
        self.directories, self.directory = directories, directories[0]
        self._forget()

    def _forget(self) -> None:
        self._tails: dict[Path, Tail] = {}
        self.progress: list[dict[str, Any]] = []
        """The course of the training, from the leaders' `progress` lines, in order of time."""
        self.written: list[dict[str, Any]] = []
        """The drain processes' events: snapshots that were written to disk, or could not be."""
        self._lives: dict[Path, list[dict[str, Any]]] = {}
        """For each journal, one entry per start of its agent: the time of the start, the time of its last line, and how its time was
        spent."""
        self.last: dict[str, dict[str, Any]] = {}
        """The newest line of each kind; under `bad` the newest sentence that reports trouble, and under `written` the newest event
        about a snapshot that was written to disk, or could not be."""
        self._ended_s: dict[Path, float] = {}
        """For each journal: when its agent ended."""
        self.stepped_s = 0.0
        """When the ranks last made a step, or last had a reason to make none."""
        self.launched = False
        """Whether this machine started the agents with a hostfile. Every agent's `start` line has a field `several`; a hostfile launcher's
        has none."""
        self._incidents: dict[tuple[int, str, float], Incident] = {}

    @property
    def finished(self) -> bool:
        return any(each.finished.exists() for each in self.directories)

    @property
    def alive(self) -> bool:
        """Whether an agent runs in one of the directories."""
        return any(each.agent() is not None for each in self.directories)

    @property
    def gone(self) -> bool:
        """Whether the job's agent was killed on this machine. False if agents run elsewhere (those of a hostfile have journals below)."""
        return all(each.gone and len(each.below) == 1 for each in self.directories)

    @property
    def over(self) -> bool:
        """Whether the agent that led last has ended, and no agent has started since. If only another agent has ended, such as that of a
        drained node, the job continues."""
        led, began = self.last.get("progress"), self.last.get("start")
        ended_s = self._ended_s.get(led["journal"], -math.inf) if led else -math.inf
        if led and ended_s < led["at_s"]:
            return False
        return not began or max(ended_s, self._ended_s.get(began["journal"], -math.inf)) >= began["at_s"]

    @property
    def lives(self) -> list[dict[str, Any]]:
        """Return the starts of the job's agents, in order of time."""
        return sorted((life for lives in self._lives.values() for life in lives), key=lambda life: life["from_s"])

    @property
    def job(self) -> str:
        return _job(self.directory)

    @property
    def incidents(self) -> dict[str, Incident]:
        """Return the incidents by the number that `explain` shows."""
        return {str(number): incident for number, incident in enumerate(self._incidents.values(), 1)}

    def seen(self) -> Seen:
        """Return what is known of the job now."""
        last = {kind: line for kind, line in self.last.items() if kind != "end" or self.over}
        return Seen(
            directory=str(self.directory.root),
            finished=self.finished,
            alive=self.alive,
            gone=self.gone,
            launched=self.launched,
            stepped_s=self.stepped_s,
            last=last,
            incidents=self.incidents,
        )

    def look(self) -> None:
        """Read the new lines of the journals."""
        if any(tail.replaced for tail in self._tails.values()):
            self._forget()
        paths = [one.journal for each in self.directories for one in each.below]
        tails = [self._tails.setdefault(path, Tail(path)) for path in paths]
        lines = [{**line, "journal": tail.path} for tail in tails for line in tail.new() if _sound(line)]
        lines.sort(key=lambda line: line["at_s"])
        self._incidents.update(latest(line for line in lines if line["kind"] == "incident"))
        self.progress += [{name: line.get(name) for name in _COURSE} for line in lines if line["kind"] == "progress"]
        for line in lines:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        kind, at_s, journal = line["kind"], line["at_s"], line["journal"]
        lives = self._lives.setdefault(journal, [])
        if kind == "start" or not lives:
            lives.append({"from_s": at_s, "spent": {}})
        lives[-1]["until_s"] = at_s
        match kind:
            case "start":
                self.stepped_s = at_s
                self.launched |= "several" not in line
                if self.last.get("bad", {}).get("journal") == journal:
                    del self.last["bad"]
            case "drain" if line["event"]["event"] in ("durable", "failed"):
                self.written.append(line["event"])
                self.last["written"] = line
            case "end":
                self._ended_s[journal] = at_s
            case "progress":
                lives[-1]["spent"] = line.get("spent", {})
                if _moves(line, self.last.get("progress", {})):
                    self.stepped_s = at_s
                if line.get("step", -1) < 0:  # ranks that restart have no step yet
                    line["step"] = self.last.get("progress", {}).get("step", -1)
            case "said" if line.get("mood") == "bad":
                self.last["bad"] = line
        self.last[kind] = line


def _sound(line: dict[str, Any]) -> bool:
    try:
        msgspec.convert(line, _KINDS[line["kind"]])
    except (KeyError, msgspec.ValidationError):
        return False
    return math.isfinite(line["at_s"])


def _moves(line: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether the ranks have made a step since the line `before`, or need not make any."""
    state, step = line.get("state"), line.get("step")
    made = state == State.TRAINING and (state, step) != (before.get("state"), before.get("step"))
    return made or state in (State.PAUSED, State.WAITING)


def by_job(roots: Sequence[Path]) -> list[RunReader]:
    """Return a reader for each job. roots: run directories. Run directories of several nodes of one job get one reader."""
    found: dict[str, list[RunDirectory]] = {}
    for directory in map(RunDirectory, roots):
        found.setdefault(_job(directory) if directory.several else str(directory.root), []).append(directory)
    return [RunReader(directories) for directories in found.values()]


def _job(directory: RunDirectory) -> str:
    return str((directory.published() or {}).get("job", directory.root.name))
