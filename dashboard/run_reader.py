"""Reads the journals of one job, each time only what is new, and keeps what the page needs of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..agent.cli.explain import latest
from ..agent.run_directory import RunDirectory
from ..resilience.model.incident import Incident

_COURSE = ("at_s", "step", "loss", "step_s")
"""What is kept of every `progress` line; of the newest one, everything is."""
_KINDS = ("start", "end", "progress", "incident", "said")


_decode = msgspec.json.Decoder().decode


class RunReader:
    def __init__(self, directories: Sequence[RunDirectory]) -> None:
        """directories: one, or those of several nodes of the job."""
        self.directories, self.directory = directories, directories[0]
        self._read: dict[Path, int] = {}
        """Bytes of each journal that have been read."""
        self.progress: list[dict[str, Any]] = []
        """The course of the training, from the leaders' `progress` lines, in order of time."""
        self.lives: list[dict[str, Any]] = []
        """One for each start of an agent here: when it began and ended, its exit code, its last `progress` line."""
        self.last: dict[str, dict[str, Any]] = {}
        """The newest line of each kind, and under `bad` the newest sentence that reports trouble."""
        self._incidents: dict[tuple[int, str, float], Incident] = {}

    @property
    def finished(self) -> bool:
        return any(each.finished.exists() for each in self.directories)

    @property
    def alive(self) -> bool:
        """Whether an agent runs in one of the directories."""
        return any(each.agent() is not None for each in self.directories)

    @property
    def job(self) -> str:
        return _job(self.directory)

    @property
    def incidents(self) -> dict[str, Incident]:
        """Return the incidents by the number that `explain` shows."""
        return {str(number): incident for number, incident in enumerate(self._incidents.values(), 1)}

    def look(self) -> None:
        """Take in what the journals have new."""
        lines = [line for each in self.directories for path in each.journals for line in self._new(path)]
        if not lines:
            return
        lines.sort(key=lambda line: line["at_s"])
        self._incidents.update(latest(line for line in lines if line["kind"] == "incident"))
        self.progress += [{name: line.get(name) for name in _COURSE} for line in lines if line["kind"] == "progress"]
        for line in lines:
            self.last[line["kind"]] = line
            if line["kind"] == "said" and line.get("mood") == "bad":
                self.last["bad"] = line
            self._live(line)

    def _live(self, line: dict[str, Any]) -> None:
        life = self.lives[-1] if self.lives else None
        here = line["journal"] == self.directory.journal
        if line["kind"] == "start" and here:
            self.lives.append({"from_s": line["at_s"], "until_s": line["at_s"], "code": None, "spent": {}})
        elif life:
            life["until_s"] = line["at_s"]
            if line["kind"] == "end" and here:
                life["code"] = line.get("code")
            if line["kind"] == "progress":
                life["spent"][str(line["journal"])] = line.get("spent", {})

    def _new(self, path: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
        except OSError:  # not there yet, or the disk does not answer: the next look tries again
            return found
        self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
        for text in whole.splitlines():
            line = _line(text)
            if isinstance(line, dict) and line.get("kind") in _KINDS and isinstance(line.get("at_s"), int | float):
                line["journal"] = path
                found.append(line)
        return found


def _line(text: bytes) -> Any:
    """Return the line's object; None: an agent was killed while writing it."""
    try:
        return _decode(text)
    except msgspec.DecodeError:  # perhaps half a surrogate pair, as in a path that is not UTF-8
        with suppress(ValueError):
            return json.loads(text)
    return None


def by_job(roots: Sequence[Path]) -> list[RunReader]:
    """Return a reader for each job. roots: run directories. Those of several nodes of one job go together."""
    found: dict[str, list[RunDirectory]] = {}
    for directory in map(RunDirectory, roots):
        found.setdefault(_job(directory) if directory.several else str(directory.root), []).append(directory)
    return [RunReader(directories) for directories in found.values()]


def _job(directory: RunDirectory) -> str:
    return str((directory.published() or {}).get("job", directory.root.name))
