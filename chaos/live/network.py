"""Hosts on one machine: network namespaces on a bridge, whose links are cut, slowed and made to lose frames. It takes root and iproute2.

    this process ── 254 ─┐
    e1 ── 101 ───────────┤ br0, in a namespace of its own ├─ 11 ── n1: mt-resilient run …
    e2 ── 102 ───────────┘                                └─ 12 ── n2: …

The network is cut in two by putting hosts onto another bridge, br1. Without root, `Loopback` gives all hosts the loopback address.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from functools import cache

from ...resilience.clock import sleep
from ...resilience.errors import MachineError

_PASS, _DROP = 0xFFFFFFFF, 2
"""Verdicts of a classifier in tc: TC_ACT_UNSPEC, TC_ACT_SHOT."""
_RANDOM = 0xFFFFF000 + 56
"""Where a classic BPF program loads a random word from: SKF_AD_OFF + SKF_AD_RANDOM."""
_LOAD, _JUMP_IF_GREATER, _RETURN = 0x20, 0x35, 6


def sh(*words: str, check: bool = True) -> str:
    """Run a command and return its output. Raises MachineError if it fails and `check` is set."""
    done = subprocess.run(words, text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if check and done.returncode:
        raise MachineError(f"{' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout


@cache
def possible() -> bool:
    """Return whether this process may make the network, which in a container even root may not."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return False
    try:
        Network().close()
    except MachineError:
        return False
    return True


def delays() -> bool:
    """Return whether the kernel can delay frames (netem)."""
    space = f"mr{os.getpid() % 100000}-netem"
    sh("ip", "netns", "add", space)
    try:
        known = sh("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "lo", "root", "netem", check=False)
        return not known and "netem" in sh("ip", "netns", "exec", space, "tc", "qdisc", "show", "dev", "lo")
    finally:
        sh("ip", "netns", "del", space, check=False)


class Loopback:
    """Hosts that differ only in their names: all use the loopback interface."""

    interface = "lo"

    def add(self, name: str, number: int) -> str:
        return "127.0.0.1"

    def inside(self, name: str) -> list[str]:
        return []

    def close(self) -> None:
        pass


class Network:
    """The bridges, and the namespaces on them; gone with `close`. No route leads out of the namespaces."""

    interface = "eth0"
    """The name of each host's own link."""

    def __init__(self) -> None:
        self.tag = f"mr{os.getpid() % 100000}"
        self.subnet = f"198.{18 + os.getpid() // 256 % 2}.{os.getpid() % 256}"  # of 198.18.0.0/15: for tests (RFC 2544)
        self.bridge = f"{self.tag}-sw"
        self.names: list[str] = []
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        """Make the bridges, and join this process's own network to them."""
        sh("ip", "netns", "add", self.bridge)
        for switch in ("br0", "br1"):
            self._in(self.bridge, "ip", "link", "add", switch, "type", "bridge")
            self._in(self.bridge, "ip", "link", "set", switch, "up")
        sh("ip", "link", "add", self.tag, "type", "veth", "peer", "name", "outside", "netns", self.bridge)
        sh("ip", "addr", "add", f"{self.subnet}.254/24", "dev", self.tag)
        sh("ip", "link", "set", self.tag, "up")
        self._in(self.bridge, "ip", "link", "set", "outside", "master", "br0", "up")

    def add(self, name: str, number: int) -> str:
        """Add a host, and return its address."""
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

    def inside(self, name: str) -> list[str]:
        """Return the words that start a command on that host."""
        return ["ip", "netns", "exec", self.space(name)]

    # -- its links ------------------------------------------------------------------------------------------------------

    def link(self, name: str, up: bool) -> None:
        self._in(self.bridge, "ip", "link", "set", name, "up" if up else "down")

    def apart(self, *names: str) -> None:
        """Cut the network in two: these hosts reach each other, and the rest reach each other. No names: all reach all."""
        for name in self.names:
            self._in(self.bridge, "ip", "link", "set", name, "master", "br1" if name in names else "br0")

    def shape(self, name: str, rate: str) -> None:
        """Give its link this rate both ways, with some 50 ms of queue."""
        self._queue(name, "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")

    def delay(self, name: str, seconds: float) -> None:
        """Let each frame come later by that much, both ways. Takes a kernel with netem."""
        self._queue(name, "netem", "delay", f"{1000 * seconds:g}ms", "limit", "100000")

    def even(self, name: str) -> None:
        """Take rate and delay away, if it has any."""
        for space, device in self._ends(name):
            sh("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root", check=False)

    def lose(self, name: str, share: float, received: bool = True) -> None:
        """Drop this share of the frames that the host sends, and, if `received`, of the frames that it receives. share: from 0 (drop none)
        to 1."""
        for space, device in self._ends(name):
            sh("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "clsact", check=False)
        for space, device in self._ends(name)[: 1 + received]:
            if share:
                self._in(space, "tc", "qdisc", "add", "dev", device, "clsact")
                drop = ["filter", "add", "dev", device, "ingress", "bpf", "da", "bytecode", _losing(share)]
                self._in(space, "tc", *drop)

    def _ends(self, name: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return namespace and device of both ends of its link: what comes in at the first one, the host has sent."""
        return (self.bridge, name), (self.space(name), "eth0")

    def _queue(self, name: str, *words: str) -> None:
        for space, device in self._ends(name):
            self._in(space, "tc", "qdisc", "replace", "dev", device, "root", *words)

    # -- its processes --------------------------------------------------------------------------------------------------

    def pids(self, name: str) -> list[int]:
        return [int(word) for word in sh("ip", "netns", "pids", self.space(name), check=False).split()]

    def kill(self, name: str) -> None:
        """Kill all processes of that host at once."""
        while pids := self.pids(name):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            sleep(0.01)

    def off(self, name: str) -> None:
        """Take its power: no other host sees a farewell or a reset."""
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


def _losing(share: float) -> str:
    """Return a classic BPF program, as tc takes it, that drops this share of the frames."""
    least = min(int(share * 2**32), 2**32 - 1)
    program = [(_LOAD, 0, 0, _RANDOM), (_JUMP_IF_GREATER, 1, 0, least), (_RETURN, 0, 0, _DROP), (_RETURN, 0, 0, _PASS)]
    return f"{len(program)}," + ",".join(" ".join(map(str, line)) for line in program)
