"""Hosts on one machine: network namespaces on a bridge, each with an agent and its ranks, or a member of etcd. Root is wanted.

    tester ── 254 ─┐
    etcd-1 ── 101 ─┤ br0, in a namespace of its own ├─ 11 ── n1: mt-resilient run …
    etcd-2 ── 102 ─┘                                └─ 12 ── n2: …

A host's processes are all killed, or it loses its power: then its link is cut first, and the others see neither farewell nor reset. The
network is cut in two by putting hosts onto another bridge, br1.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from mt_resilient.agent.etcd.binary import find_server
from mt_resilient.agent.run_directory import RunDirectory
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
_PORT = 2379


def sh(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


class Net:
    """The bridge, and the namespaces on it; gone with `close`."""

    def __init__(self) -> None:
        self.tag = f"mr{os.getpid() % 100000}"
        self.subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.bridge = f"{self.tag}-sw"
        self.names: list[str] = []
        sh("ip", "netns", "add", self.bridge)
        for switch in ("br0", "br1"):
            self._in(self.bridge, "ip", "link", "add", switch, "type", "bridge")
            self._in(self.bridge, "ip", "link", "set", switch, "up")
        sh("ip", "link", "add", self.tag, "type", "veth", "peer", "name", "tester", "netns", self.bridge)
        sh("ip", "addr", "add", f"{self.subnet}.254/24", "dev", self.tag)
        sh("ip", "link", "set", self.tag, "up")
        self._in(self.bridge, "ip", "link", "set", "tester", "master", "br0", "up")

    def add(self, name: str, number: int) -> str:
        """A host; its address."""
        space = self.space(name)
        sh("ip", "netns", "add", space)
        self.names.append(name)
        sh("ip", "-n", self.bridge, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._in(space, "ip", "addr", "add", f"{self.subnet}.{number}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            self._in(space, "ip", "link", "set", link, "up")
        self._in(self.bridge, "ip", "link", "set", name, "master", "br0", "up")
        return f"{self.subnet}.{number}"

    def space(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def link(self, name: str, up: bool) -> None:
        self._in(self.bridge, "ip", "link", "set", name, "up" if up else "down")

    def apart(self, *names: str) -> None:
        """These reach each other and nobody else, until somebody else is put apart; none: all reach all."""
        for name in self.names:
            self._in(self.bridge, "ip", "link", "set", name, "master", "br1" if name in names else "br0")

    def shape(self, name: str, rate: str) -> None:
        """Make its link so slow, both ways; with some 50 ms of queue."""
        for space, device in ((self.space(name), "eth0"), (self.bridge, name)):
            limit = ["rate", rate, "burst", "256kb", "latency", "50ms"]
            self._in(space, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def inside(self, name: str) -> list[str]:
        """The words that start something there."""
        return ["ip", "netns", "exec", self.space(name)]

    def pids(self, name: str) -> list[int]:
        return [int(word) for word in sh("ip", "netns", "pids", self.space(name), check=False).split()]

    def kill(self, name: str) -> None:
        """All that runs there, at once."""
        while pids := self.pids(name):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def off(self, name: str) -> None:
        """As without power: nobody hears of it."""
        self.link(name, up=False)
        self.kill(name)

    def close(self) -> None:
        for name in self.names:
            self.kill(name)
        for name in self.names:
            sh("ip", "netns", "del", self.space(name), check=False)
        sh("ip", "link", "del", self.tag, check=False)
        sh("ip", "netns", "del", self.bridge, check=False)

    def _in(self, space: str, *words: str) -> None:
        sh("ip", "netns", "exec", space, *words)


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
        self.net = Net()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.etcds = [f"e{i}" for i in range(1, etcds + 1)]
        self.hosts = [f"n{i}" for i in range(1, hosts + 1)]
        self._address = {name: self.net.add(name, 100 + i) for i, name in enumerate(self.etcds, 1)}
        self._address |= {name: self.net.add(name, 10 + i) for i, name in enumerate(self.hosts, 1)}
        self.endpoints = [f"{self._address[name]}:{_PORT}" for name in self.etcds]
        for name in self.etcds:
            self.start_etcd(name)
        self.store = EtcdStore(self.endpoints, deadline_s=2.0)
        self.until(lambda: self.store.get("/") is None, 20, "etcd answers")

    def start(self, *names: str) -> None:
        """The agents of these hosts, or of all."""
        for name in names or self.hosts:
            self.net.link(name, up=True)
            self._spawn(name, self.command(name))

    def start_etcd(self, name: str) -> None:
        if before := self.processes.get(name):  # a thread of one that was killed may hold its ports for some time
            before.wait(30)

        def url(host: str, port: int) -> str:
            return f"http://{self._address[host]}:{port}"

        flags = {
            "name": name,
            "data-dir": str(self.place / name),
            "listen-client-urls": url(name, _PORT),
            "advertise-client-urls": url(name, _PORT),
            "listen-peer-urls": url(name, _PORT + 1),
            "initial-advertise-peer-urls": url(name, _PORT + 1),
            "initial-cluster": ",".join(f"{each}={url(each, _PORT + 1)}" for each in self.etcds),
        }
        self._spawn(name, [str(find_server().path), *(f"--{key}={value}" for key, value in flags.items())])

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
        world = self.world()
        return world.record.number if world and world.record else 0

    def after(self, act: Callable[[], object], deadline_s: float = 20) -> None:
        """Do `act`, and wait for the next generation that it brings about."""
        before = self.number()
        act()
        self.until(lambda: self.number() > before, deadline_s, f"a generation after {before}")

    def goes_on(self, steps: int = 10, deadline_s: float = 60) -> None:
        """Until the present generation has done so many steps."""
        world = self.world()
        assert world
        assert world.record
        self.until_step(max(world.record.resume_step, world.record.replay_until) + steps, deadline_s)

    def members(self) -> list[str]:
        world = self.world()
        return [*world.members] if world else []

    def leader(self) -> str:
        """The host whose agent leads."""
        entry, world = self.store.get(KEYS.leader), self.world()
        assert entry
        assert world
        return next(name for name, node in world.nodes.items() if node.instance == entry.value.decode())

    def agent(self, name: str) -> int:
        """Its process."""
        world = self.world()
        assert world
        return world.nodes[NodeId(name)].pid

    def there(self) -> list[NodeId]:
        """Nodes whose agents live."""
        world = self.world()
        return [*world.nodes] if world else []

    def at_work(self) -> bool:
        """Whether all ranks of the present generation are in their loop."""
        world = self.world()
        told = world.statuses() if world else []
        return bool(world and told) and len(told) == len(world.members) and all(s.stepped_s for s in told)

    def began(self) -> int:
        """The step that the present generation has gone on from."""
        world = self.world()
        assert world
        assert world.record
        return world.record.resume_step

    def status(self, name: str) -> NodeStatus | None:
        """What its agent has said last."""
        world = self.world()
        return world.status.get(NodeId(name)) if world else None

    def kill_rank(self, name: str, local: int = 0) -> None:
        said = self.status(name)
        assert said
        os.kill(said.pids[local], signal.SIGKILL)

    def kill_drain(self, name: str) -> None:
        children = psutil.Process(self.agent(name)).children()
        next(child for child in children if "drain_process" in " ".join(child.cmdline())).kill()

    def tell_all(self, number: signal.Signals) -> None:
        """All agents, at once."""
        for pid in [self.agent(name) for name in self.there()]:
            os.kill(pid, number)

    def finish(self, *names: str, deadline_s: float = 120) -> list[int]:
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
        self.net.close()
        for process in self.processes.values():
            process.wait()


class Clocks:
    """Of all hosts: the time of day that what is started on them sees, set while it runs (`clock.c`)."""

    def __init__(self, job: Cluster) -> None:
        """Before anything is started. Skips the test where nothing can be compiled."""
        compiler = shutil.which("cc")
        if compiler is None or platform.machine() != "x86_64":
            pytest.skip("a compiler is wanted for the clocks, and a system call of this machine")
        self._place = job.place
        library = job.place / "clock.so"
        sh(
            compiler,
            "-O1",
            "-shared",
            "-fPIC",
            "-o",
            str(library),
            str(Path(__file__).with_name("clock.c")),
            "-lm",
            "-ldl",
        )
        for name in job.hosts:
            job.extra[name] = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._place / f"{name}.clock")}
            self.set(name, 0)

    def set(self, name: str, ahead_s: float) -> None:
        with (self._place / f"{name}.clock").open("r+b" if (self._place / f"{name}.clock").exists() else "wb") as file:
            file.write(struct.pack("d", ahead_s))


def train(steps: int, delay_s: float, ballast_mib: int = 0) -> list[str]:
    return [str(PLAIN), "--steps", str(steps), "--step-delay", str(delay_s), "--ballast", str(ballast_mib)]
