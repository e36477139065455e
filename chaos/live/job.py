"""The job with faults: its nodes' agents, and the etcd of a job of several nodes. Starts it, looks at it, and knows its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ...resilience.clock import monotonic_s, sleep, wall_s
from ...resilience.errors import MachineError
from ...resilience.ipc.board_layout import Page
from ..judgement.history import Seen
from ..settings import patience_s
from .agent import Agent, NotThere
from .cluster import Cluster

_LOOK_S = 0.02
_END_S, _DIE_S = 120.0, 20.0
"""Seconds that an agent may take to end in order, and that ranks may live on after it was killed."""
_REFUSED_S = 3.0
"""Seconds after the end of a disk's fault within which an agent may still end because of it."""
_MARKS = {"attached": "attached_ns", "built": "built_ns", "restored": "restored_ns", "stepped": "stepped_ns"}


class Job:
    def __init__(self, root: Path, agents: Sequence[Agent], cluster: Cluster, ranks: int, start_s: float = 0.0) -> None:
        """root: of the run's files. ranks: of all nodes that train. start_s: how long the run without faults took to its first step."""
        self.agents, self.cluster, self._start_s = agents, cluster, start_s
        self.orders = root / "orders"
        """The folder of orders to the injector in the ranks."""
        self._ranks = ranks
        self.journal: list[dict[str, Any]] = []
        self.record: dict[str, Any] | None = None
        """The newest generation record."""
        self._newest: dict[str, int] = {}
        """By tier: the newest step that the whole job can restore, as a journal has told since the last start of an agent."""
        self._finished: dict[tuple[str, int], tuple[int, int]] = {}
        """By node and place on its board: generation and step, as they were seen last."""
        self._stepped = 0
        """The newest generation in which a rank has finished a step."""
        self._disk_until_s = 0.0
        """When the last fault of the disk is over."""
        self.unexpected: list[str] = []
        """Ends that no fault explains."""
        self.forgot = False
        """Whether etcd has lost its data and no step was made since, so that the job cannot know that its script could ever start."""
        self.meanwhile: Callable[[], object] = bool
        """`until` calls it again and again while it waits: it ends the faults whose time is over."""
        self.seen: list[Seen] = []
        """What was seen, a new entry for each change."""
        self.snapshots = cluster.storage(root) / "snapshots"
        self.began_s, self.began_wall_s = monotonic_s(), wall_s()

    def now_s(self) -> float:
        """Return the seconds since the job's first start."""
        return monotonic_s() - self.began_s

    def patience_s(self, least_s: float) -> float:
        """Return for how long to wait for something that a start of the ranks may come before."""
        return patience_s(least_s, self._start_s)

    def goes_on(self) -> bool:
        """Return whether an agent runs, or is to be started again. Agents that the disk has refused are started again when it is well."""
        runs = any(agent.running for agent in self.agents)  # first: an agent that ends meanwhile is looked at next time
        self._give_refused_commands_again()
        return runs or any(agent.running or agent.away for agent in self.agents)

    @property
    def failed(self) -> int:
        """The exit code of an agent that has failed, for which the others may wait; 0: none has."""
        return failed(agent.process for agent in self.agents if not agent.away)

    def agent(self, node: int) -> Agent:
        """Return the agent of a node, counted from 1. Raises NotThere if it has ended."""
        agent = self.agents[max(0, node - 1)]
        if not agent.running:
            raise NotThere(f"{agent} has ended")
        return agent

    # -- looking --------------------------------------------------------------------------------------------------------

    def look(self) -> Seen:
        for agent in self.agents:
            for line in agent.journal():
                self._read(line)
        boards = {agent: agent.pages() for agent in self.agents}
        pages = [page for found in boards.values() for page in found]
        generation = max((page.generation for page in pages), default=0)
        steps = [page.step for page in pages if page.generation == generation]  # a spare has no ranks
        steps += [-1] * (self._ranks - len(steps))
        overlap = self._overlap(boards)
        seen = Seen(
            at_s=self.now_s(),
            generation=generation,
            steps=tuple(steps),
            memory_step=self._newest.get("memory", -1),
            copied_step=self._newest.get("other node", -1),
            disk_step=max(self.on_disk().values(), default=-1),
            overlap=overlap,
        )
        self.forgot &= not any(page.stepped_ns for page in pages)
        last = self.seen[-1] if self.seen else None
        if last is None or (last.generation, last.steps, last.overlap) != (generation, seen.steps, overlap):
            self.seen.append(seen)
        return seen

    def _read(self, line: dict[str, Any]) -> None:
        self.journal.append(line)
        if line["kind"] == "generation":
            if self.record is None or line["record"]["number"] >= self.record["number"] or len(self.agents) == 1:
                self.record = line["record"]
        elif line["kind"] == "progress":
            self._newest = {tier: step for tier, (step, _) in line["snapshots"].items()}

    @property
    def disk_is_well(self) -> bool:
        return self.now_s() >= self._disk_until_s

    def disk_fails(self, for_s: float) -> None:
        """A fault of the disk begins, and lasts for so many seconds. An agent that is started meanwhile may refuse to."""
        self._disk_until_s = max(self._disk_until_s, self.now_s() + for_s + _REFUSED_S)

    def _give_refused_commands_again(self) -> None:
        """Start the agents that refused to start because of the disk, as a user does when the disk is well again."""
        for agent in self.agents:
            if agent.process.poll() == MachineError.exit_code and not agent.trained:
                if not self.disk_is_well:
                    agent.away = True
                elif agent.away:
                    self.start(agent)

    def _overlap(self, boards: Mapping[Agent, Sequence[Page]]) -> str:
        """Return the process of an earlier generation that lives while a later one makes steps on its node, or that makes steps itself
        while a later one does on another node."""
        found = ""
        for agent, pages in boards.items():
            found = found or agent.overlap(pages)
            for at, page in enumerate(pages):
                before = self._finished.get((agent.name, at))
                if before and page.generation == before[0] < self._stepped and page.step > before[1]:
                    made = f"rank {page.rank} of generation {before[0]} made step {page.step} on {agent.name}"
                    found = found or f"{made}, while generation {self._stepped} makes steps"
                self._finished[agent.name, at] = (page.generation, page.step)
        for pages in boards.values():
            self._stepped = max([self._stepped, *(page.generation for page in pages if page.stepped_ns)])
        return found

    def marks(self) -> dict[str, bool]:
        """Return, for each mark of a start, whether all ranks have come so far."""
        members = (self.record or {}).get("members", ())
        pages = [agent.pages() for agent in self.agents if not agent.name or agent.name in members]
        return {
            name: all(found and all(getattr(page, field) for page in found) for found in pages)
            for name, field in _MARKS.items()
        }

    def on_disk(self) -> dict[str, int]:
        """Return the committed snapshots on disk: name → step."""
        found = {}
        with suppress(OSError):
            for name in os.listdir(self.snapshots):
                if (self.snapshots / name / "COMMIT").exists() and not (self.snapshots / name / "REJECTED").exists():
                    found[name] = int(name.partition("-")[0])
        return found

    def committed_s(self, snapshot: str) -> float:
        """Return the wall-clock time when a snapshot on disk was completed; 0: it is not there any more."""
        with suppress(OSError):
            return (self.snapshots / snapshot / "COMMIT").stat().st_mtime
        return 0.0

    # -- its processes --------------------------------------------------------------------------------------------------

    def place_of(self, rank: int) -> tuple[Agent, int]:
        """Return the agent of a rank, and the rank's place on its node. Raises NotThere."""
        places = [(page, agent, at) for agent in self.agents for at, page in enumerate(agent.pages()) if page.pid]
        newest = max((page.generation for page, _, _ in places), default=0)
        for page, agent, at in places:
            if page.rank == rank and page.generation == newest:
                return agent, at
        raise NotThere(f"rank {rank} has no process")

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank. Raises NotThere."""
        agent, at = self.place_of(number)
        with suppress(psutil.Error):
            process = psutil.Process(agent.pages()[at].pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                return process
        raise NotThere(f"rank {number} has no process")

    def restart(
        self,
        number: signal.Signals,
        expected: int,
        meanwhile: Callable[[], object] = bool,
        only: Agent | None = None,
    ) -> None:
        """End the agents with this signal, which should make them exit with the code `expected`. Then start them again, as their user
        would, unless the training is over. meanwhile: called before the start. only: this agent alone. Those that are away stay so."""
        agents = [only] if only else [agent for agent in self.agents if not agent.away]
        for agent in agents:
            agent.told_to_end(number)
        for agent in agents:
            if not self.until(lambda agent=agent: not agent.running, _END_S):  # type: ignore[misc]
                self.unexpected.append(f"{agent} did not end within {_END_S:.0f} s of {number.name}")
                return
            code = agent.process.returncode
            early = code == -number and not agent.trained  # Python itself was still starting, and no handler was set
            if code not in (expected, 0) and not early:
                self.unexpected.append(f"{agent} ended with exit code {code} after {number.name}, not with {expected}")
            self.unexpected += agent.outlived(lambda gone: self.until(gone, _DIE_S))
        meanwhile()
        for agent in agents:
            if agent.process.returncode != 0:
                self.start(agent)

    def start(self, agent: Agent) -> None:
        """Start an agent again. What was told of snapshots in memory may hold no longer."""
        self._newest = {}
        agent.start()

    def until(self, what: Callable[[], object], limit_s: float) -> bool:
        """Look at the job until `what` holds. Return whether it did within `limit_s` seconds."""
        end_s = monotonic_s() + limit_s
        while monotonic_s() < end_s:
            if what():
                return True
            self.meanwhile()
            self.look()
            sleep(_LOOK_S)
        return False


def failed(processes: Iterable[subprocess.Popen[bytes]]) -> int:
    """Return the exit code of a process that has failed; 0: none has."""
    return next(filter(None, (process.poll() for process in processes)), 0)


def incidents(journal: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the last form of each incident, in order of time."""
    found: dict[str, dict[str, Any]] = {}
    for line in journal:
        if line["kind"] == "incident":
            incident = line["incident"]
            found[json.dumps([incident["generation"], incident["id"], incident["at_s"]])] = incident
    return sorted(found.values(), key=lambda incident: incident["at_s"])


def left_out(journal: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the data that the ranks have left out, as `--skip-data` takes it."""
    windows = [incident["window"] for incident in incidents(journal) if incident["window"]]
    return [f"{window['start']}:{window['stop']}" for window in windows]
