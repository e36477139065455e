"""A job on several hosts of one machine (`chaos/live/network.py`), each with an agent and its ranks, and members of etcd. Root is wanted.

A host's processes are all killed, or it loses its power: then its link is cut first, and the others see neither farewell nor reset.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.chaos.live import clock
from mt_resilient.chaos.live.etcd_members import Members
from mt_resilient.chaos.live.network import Network
from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.node import NodeStatus
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.store.codec import loads
from mt_resilient.resilience.store.etcd.client import EtcdStore
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.state_reader import read_world

from ..harness import BIN, PLAIN, digest_of, environment

KEYS = Keys("netns")


class Cluster:
    """A job on several hosts, and the etcd that it agrees through."""

    def __init__(
        self, place: Path, nodes: str, *options: str, hosts: int, etcds: int = 3, ranks: int = 1, script: Sequence[str]
    ) -> None:
        """hosts: n1, n2 …; nodes: what --nodes is given."""
        self.extra: dict[str, dict[str, str]] = {}
        """Further environment of a host's agent and ranks."""
        (place / "trail").mkdir()
        self.place, self.nodes, self.options, self.ranks, self.script = place, nodes, options, ranks, script
        self.net = Network()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.hosts = [f"n{i}" for i in range(1, hosts + 1)]
        for i, name in enumerate(self.hosts, 1):
            self.net.add(name, 10 + i)
        self.etcd = Members(place, self.net, etcds)
        self.endpoints = self.etcd.endpoints
        self.etcd.await_answer()
        self.store = EtcdStore(self.endpoints, deadline_s=2.0)

    def start(self, *names: str) -> None:
        """The agents of these hosts, or of all."""
        for name in names or self.hosts:
            self.net.link(name, up=True)
            self._spawn(name, self.command(name))

    def command(self, name: str) -> list[str]:
        """What is given on that host."""
        options = ["--job", "netns", "--node", name, "--nodes", self.nodes, "--etcd", ",".join(self.endpoints)]
        options += ["--run-dir", str(self.place / "runs" / name), "--snapshots", str(self.place / "shared")]
        options += ["--metrics-port", "0", "--snapshot-every", "1", "--set", "agent.lease_ttl_s=3", *self.options]
        command = ["torchrun", f"--nproc-per-node={self.ranks}", *self.script]
        return [str(BIN / "mt-resilient"), "run", *options, "--", *command]

    def environment(self, name: str) -> dict[str, str]:
        return environment(GLOO_SOCKET_IFNAME="eth0", TRAIL=str(self.place / "trail"), **self.extra.get(name, {}))

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        (self.place / "runs").mkdir(exist_ok=True)
        with (self.place / f"{name}.out").open("ab") as out, (self.place / f"{name}.err").open("ab") as err:
            words, env = [*self.net.inside(name), *command], self.environment(name)
            self.processes[name] = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    # -- looking --------------------------------------------------------------------------------------------------------

    def world(self) -> World | None:
        """None where etcd does not answer for longer than it takes a client to find the next member."""
        for _ in range(3):
            with suppress(StoreUnavailable):
                return read_world(KEYS, {key: entry.value for key, entry in self.store.range(KEYS.root).items()})
        return None

    def seen(self) -> World:
        """The world, once etcd answers."""
        end = time.monotonic() + 120
        while (world := self.world()) is None:
            assert time.monotonic() < end, f"etcd does not answer\n{self.said()}"
            time.sleep(0.05)
        return world

    def until(self, what: Callable[[], object], deadline_s: float, why: str) -> None:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            with suppress(StoreUnavailable):
                if what():
                    return
            time.sleep(0.05)
        raise AssertionError(f"not within {deadline_s} s: {why}\n{self.said()}")

    def until_step(self, step: int, deadline_s: float = 120) -> World:
        """All members have done that many steps in the present generation."""
        found: list[World] = []

        def there() -> bool:
            world = self.world()
            told = world.statuses() if world else []
            if world and world.members and len(told) == len(world.members) and min(s.min_step for s in told) >= step:
                found.append(world)
            return bool(found)

        self.until(there, deadline_s, f"step {step}")
        return found[-1]

    def number(self) -> int:
        """Of the present generation."""
        record = self.seen().record
        return record.number if record else 0

    def after(self, act: Callable[[], object], deadline_s: float = 120) -> None:
        """Do `act`, and wait for the next generation that it brings about."""
        before = self.number()
        act()
        self.until(lambda: self.number() > before, deadline_s, f"a generation after {before}")

    def goes_on(self, steps: int = 10, deadline_s: float = 120) -> None:
        """Until the present generation has done so many steps."""
        record = self.seen().record
        assert record
        self.until_step(max(record.resume_step, record.replay_until) + steps, deadline_s)

    def members(self) -> list[str]:
        return [*self.seen().members]

    def leader(self) -> str:
        """The host whose agent leads."""
        found: list[str] = []

        def there() -> bool:
            entry, nodes = self.store.get(KEYS.leader), self.seen().nodes
            found.extend(name for name, node in nodes.items() if entry and node.instance == entry.value.decode())
            return bool(found)

        self.until(there, 120, "an agent leads")
        return found[0]

    def agent(self, name: str) -> int:
        """Its process."""
        return self.seen().nodes[NodeId(name)].pid

    def there(self) -> list[NodeId]:
        """Nodes whose agents live."""
        return [*self.seen().nodes]

    def at_work(self) -> bool:
        """Whether all ranks of the present generation are in their loop."""
        world = self.world()
        told = world.statuses() if world else []
        return bool(world and told) and len(told) == len(world.members) and all(s.stepped_s for s in told)

    def began(self) -> int:
        """The step that the present generation has gone on from."""
        record = self.seen().record
        assert record
        return record.resume_step

    def status(self, name: str) -> NodeStatus | None:
        """What its agent has said last."""
        return self.seen().status.get(NodeId(name))

    def kill_rank(self, name: str, local: int = 0) -> None:
        """As soon as all ranks of that host run. A rank that does not run is told as 0, and to kill 0 is to kill these tests."""
        found: list[int] = []

        def there() -> bool:
            said = self.status(name)
            if said and said.pids and all(said.pids):
                found.append(said.pids[local])
            return bool(found)

        self.until(there, 120, f"the ranks of {name} run")
        os.kill(found[0], signal.SIGKILL)

    def drain_process(self, name: str) -> psutil.Process:
        for child in psutil.Process(self.agent(name)).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if "drain_process" in " ".join(child.cmdline()):
                    return child
        raise AssertionError(f"{name} has no drain process")

    def tell_all(self, number: signal.Signals) -> None:
        """All agents, at once."""
        for pid in [self.agent(name) for name in self.there()]:
            os.kill(pid, number)

    def finish(self, *names: str, deadline_s: float = 300) -> list[int]:
        """Wait for these agents to end; their exit codes."""
        end = time.monotonic() + deadline_s
        for name in names:
            with suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(max(0.1, end - time.monotonic()))
        codes = [self.processes[name].poll() for name in names]
        logs = [RunDirectory(run).leaving for run in self.place.glob("runs/*")]
        hung = [log.read_text() for log in logs if log.exists()]
        assert not hung, "\n".join(hung)
        assert None not in codes, f"did not end: {dict(zip(names, codes, strict=True))}\n{self.said()}"
        return [code for code in codes if code is not None]

    def printed(self) -> str:
        return "\n".join(
            (self.place / f"{name}.out").read_text() for name in self.hosts if (self.place / f"{name}.out").exists()
        )

    def steps(self) -> int:
        """Lines of steps printed so far."""
        return sum(line.startswith("step ") for line in self.printed().splitlines())

    def said(self, *names: str) -> str:
        """Without the stacks of torch's C++, which are longer than all else."""
        files = [self.place / f"{name}.err" for name in names or self.hosts]
        lines = {file.stem: file.read_text().splitlines() for file in files if file.exists()}
        words = {name: [line for line in said if not line.startswith("frame #")] for name, said in lines.items()}
        return "\n".join("\n".join([f"== {name}", *said[-100:]]) for name, said in words.items())

    def digest(self) -> str:
        return digest_of(self.printed())

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Lines of all journals, in the order of their times: whoever led has told."""
        return sorted((line for name in self.hosts for line in self.journal(name, kind)), key=lambda line: line["at_s"])

    def journal(self, name: str, kind: str) -> list[dict[str, Any]]:
        place = self.place / "runs" / name / "journal.jsonl"
        return [line for line in Journal(place).read() if line["kind"] == kind]

    def incidents(self) -> list[Incident]:
        """As they were told last."""
        found: dict[tuple[int, str], Incident] = {}
        for line in self.told("incident"):
            incident = loads(Incident, json.dumps(line["incident"]))
            found[incident.generation, incident.id] = incident
        return [found[key] for key in sorted(found)]

    def generations(self) -> dict[int, dict[str, Any]]:
        """Each record's last form."""
        return {line["record"]["number"]: line["record"] for line in self.told("generation")}

    def overlaps(self) -> list[str]:
        """Where two generations were at work at once: never is right. By what leaders have written, and by the ranks' own trail."""
        found = []
        members: dict[int, set[tuple[tuple[str, str], ...]]] = {}
        for name in self.hosts:  # each by itself, for their clocks may differ
            records = [line["record"] for line in self.journal(name, "generation")]
            found += [
                f"{b['number']} after {a['number']}, by {name}"
                for a, b in pairwise(records)
                if b["number"] < a["number"]
            ]
            for record in records:
                members.setdefault(record["number"], set()).add((*record["members"].items(),))
        found += [f"generation {number} had members {who}" for number, who in members.items() if len(who) > 1]
        begun: dict[int, float] = {}
        for number, _, at_s in self.trail("begun"):
            begun[number] = min(at_s, begun.get(number, at_s))
        return found + [
            f"generation {number} finished step {step} {at_s - begun[newer]:.3f} s after {newer} had begun one"
            for number, step, at_s in self.trail("done")
            for newer in begun
            if newer > number and at_s > begun[newer]
        ]

    def trail(self, word: str) -> list[tuple[int, int, float]]:
        """What ranks have begun, or done: generation, step, time of the monotonic clock."""
        found = []
        for file in (self.place / "trail").iterdir():
            number = int(file.name.split("-")[0])
            lines = [line.split() for line in file.read_text().splitlines()]
            found += [(number, int(step), float(at_s)) for said, step, at_s in lines if said == word]
        return found

    def close(self) -> None:
        self.store.close()
        self.etcd.close()
        self.net.close()
        for process in self.processes.values():
            process.wait()


class Clocks:
    """Of all hosts: the time of day that what is started on them sees, set while it runs."""

    def __init__(self, job: Cluster) -> None:
        """Before anything is started."""
        if not clock.possible():
            pytest.skip("the clocks want x86-64 and a C compiler")
        self._place = job.place
        library = clock.built(job.place)
        job.extra |= {name: clock.variables(library, self._file(name)) for name in job.hosts}

    def set(self, name: str, ahead_s: float) -> None:
        clock.put(self._file(name), ahead_s)

    def _file(self, name: str) -> Path:
        return self._place / f"{name}.clock"


def train(steps: int, delay_s: float, ballast_mib: int = 0) -> list[str]:
    return [str(PLAIN), "--steps", str(steps), "--step-delay", str(delay_s), "--ballast", str(ballast_mib)]
