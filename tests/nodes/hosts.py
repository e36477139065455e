"""Hosts on one machine: network namespaces on a bridge, each with an agent and its ranks, or a member of etcd. Root is wanted.

    tester ── 254 ─┐
    etcd-1 ── 101 ─┤ br0, in a namespace of its own ├─ 11 ── n1: mt-resilient run …
    etcd-2 ── 102 ─┘                                └─ 12 ── n2: …

A host is killed with all its processes, or its link is cut: the others see neither farewell nor reset, as with a machine that has lost its
power, or a cable.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mt_resilient.agent.etcd_binary import find_server
from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.etcd import EtcdStore
from mt_resilient.resilience.journal import Journal
from mt_resilient.resilience.keys import Keys
from mt_resilient.resilience.orders import Incident
from mt_resilient.resilience.signals import NodeId
from mt_resilient.resilience.wire import loads
from mt_resilient.resilience.world import World, read_world

from ..harness import BIN, MINIMAL, digest_of, environment

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
        self._in(self.bridge, "ip", "link", "add", "br0", "type", "bridge")
        self._in(self.bridge, "ip", "link", "set", "br0", "up")
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

    def close(self) -> None:
        for name in self.names:
            self.kill(name)
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
            self._start_agent(name)

    def start_etcd(self, name: str) -> None:
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

    def _start_agent(self, name: str) -> None:
        options = ["--job", "netns", "--node", name, "--nodes", self.nodes, "--etcd", ",".join(self.endpoints)]
        options += ["--run-dir", str(self.place / "runs" / name), "--snapshots", str(self.place / "shared")]
        options += ["--metrics-port", "0", "--snapshot-every", "1", "--set", "agent.lease_ttl_s=3", *self.options]
        command = ["torchrun", f"--nproc-per-node={self.ranks}", *self.script]
        self._spawn(name, [str(BIN / "mt-resilient"), "run", *options, "--", *command])

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        (self.place / "runs").mkdir(exist_ok=True)
        with (self.place / f"{name}.out").open("ab") as out, (self.place / f"{name}.err").open("ab") as err:
            env = environment(GLOO_SOCKET_IFNAME="eth0")
            words = [*self.net.inside(name), *command]
            self.processes[name] = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    # -- looking --------------------------------------------------------------------------------------------------------

    def world(self) -> World | None:
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

    def kill_rank(self, name: str) -> None:
        world = self.world()
        assert world
        os.kill(next(s for n, s in world.status.items() if n == name).pids[0], signal.SIGKILL)

    def finish(self, *names: str, deadline_s: float = 120) -> list[int]:
        """Wait for these agents to end; their exit codes."""
        end = time.monotonic() + deadline_s
        for name in names:
            with suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(max(0.1, end - time.monotonic()))
        codes = [self.processes[name].poll() for name in names]
        assert None not in codes, f"did not end: {dict(zip(names, codes, strict=True))}\n{self.said()}"
        return [code for code in codes if code is not None]

    def printed(self) -> str:
        return "\n".join(
            (self.place / f"{name}.out").read_text() for name in self.hosts if (self.place / f"{name}.out").exists()
        )

    def said(self) -> str:
        files = [self.place / f"{name}.err" for name in self.hosts]
        return "\n".join(f"== {file.stem}\n{file.read_text()[-2500:]}" for file in files if file.exists())

    def digest(self) -> str:
        return digest_of(self.printed())

    def incidents(self) -> list[Incident]:
        """Of all journals: whoever led has told."""
        found: dict[tuple[int, str], Incident] = {}
        for name in self.hosts:
            for line in Journal(self.place / "runs" / name / "journal.jsonl").read():
                if line["kind"] == "incident":
                    told = loads(Incident, json.dumps(line["incident"]))
                    found[told.generation, told.id] = told
        return [found[key] for key in sorted(found)]

    def close(self) -> None:
        self.store.close()
        self.net.close()
        for process in self.processes.values():
            process.wait()


def train(steps: int, delay_s: float) -> list[str]:
    return [str(MINIMAL), "--steps", str(steps), "--step-delay", str(delay_s)]
