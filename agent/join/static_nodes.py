"""Several nodes without a given etcd, whose torchrun commands name a master: `torchrun --nnodes 2 --node-rank 0 --master-addr gpu-01
--master-port 29500 …`.

The master's agent runs the etcd, on the port after torchrun's. All other names follow from torchrun's options, which are the same on all
nodes except for the rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from ...resilience.clock import monotonic_s, sleep, wall_s
from ...resilience.errors import MachineError, UsageError
from ...resilience.membership.rank_assignment import NodesPolicy, sizes
from ...resilience.store.etcd.access import Access
from ..etcd.server import EmbeddedEtcd, started
from ..launch.ports import is_free, names_loopback
from ..launch.scheduler_env import allowed
from ..launch.torchrun import Launch, understand
from ..output.terminal import Terminal
from ..run_directory import RunDirectory
from .identity import ControlPolicy, address, answered, placed
from .patient_store import AGAIN_S

WAIT_S = 300.0
"""Seconds that a node of a running job waits for the master's etcd once no rank runs on it."""
_JOIN_S = 900.0
"""Seconds that a node that starts waits for the master's etcd if `--rdzv-conf` gives no `timeout`, as torchrun waits for its store
(`LaunchConfig`, torch 2.13)."""
_ELSEWHERE = "192.0.2.1:9"
"""An address of no machine (RFC 5737), in the direction of which the kernel knows this machine's address. No packet is sent."""
_LOOPBACK = "127.0.0.1"
_QUIET_S = 5.0
"""The nodes of a job rarely start in the same second, so a node that waits for the master for less than this says nothing."""


@dataclass(frozen=True)
class Static:
    control: ControlPolicy
    """The options, completed with etcd, the job's name and this node's name."""
    host: str
    port: int
    """Address of the master's etcd."""
    serves: bool
    """This node is the master."""
    wait_s: float = _JOIN_S
    """How long this node waits for that etcd when it starts."""

    @property
    def below(self) -> str:
        """Return this node's folder in the job's run directory, which all nodes may share."""
        return f"nodes/{self.control.node}"


def static(launch: Launch, control: ControlPolicy, nodes: NodesPolicy) -> Static | None:
    """Return what torchrun's options say about the nodes. None: there is one node, or the user names an etcd, or torchrun's options name no
    master. Raises UsageError if the host that they name cannot be a master for this."""
    several = max(sizes(nodes.number or "1")) > 1 or nodes.spares > 0
    if control.etcd or not several or not launch.master:
        return None
    if launch.rdzv_backend.startswith("etcd"):
        raise UsageError(
            f"the nodes of this torchrun meet in an etcd (--rdzv-backend {launch.rdzv_backend}), and their agents need its name too; "
            f"nothing was started. Add --etcd {launch.master}:{launch.endpoint_port or 2379}, with --job and --snapshots"
        )
    if _only_ipv6(launch.master):
        raise UsageError(
            f"the master {launch.master} has only an IPv6 address, and an etcd that an agent starts has an IPv4 address; nothing was "
            "started. Name an etcd with --etcd, or an IPv4 address of the master"
        )
    host, port = launch.master, launch.etcd_port
    rank = launch.node_rank
    wide = len(str(max(sizes(nodes.number or "1")) - 1))
    node = f"{int(rank):0{wide}}-{control.node}" if rank.isdecimal() else control.node
    job = control.job or allowed(launch.name)
    serves = int(rank) == 0 if rank.isdecimal() else _is_here(host)
    return Static(
        replace(control, etcd=f"{host}:{port}", job=job, node=node), host, port, serves, launch.timeout_s or _JOIN_S
    )


def _is_here(host: str) -> bool:
    """Return whether the master is this machine. Its name may not be in the network yet, as that of a pod that has just started."""
    try:
        socket.gethostbyname(host)
    except OSError:
        return host.partition(".")[0] == socket.gethostname().partition(".")[0]
    return is_free(0, host)  # no port is free at another machine's address


def _only_ipv6(host: str) -> bool:
    """Return whether a master has an IPv6 address and no IPv4 address. A name that does not resolve yet may have one later."""
    try:
        families = {family for family, *_ in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    return families == {socket.AF_INET6}


@dataclass(frozen=True)
class Placed:
    """A launch, and this node's place in it."""

    launch: Launch
    control: ControlPolicy
    nodes: NodesPolicy
    found: Static | None
    invocation: str = ""
    """Names the start of the script that has started this torchrun; empty: no wrapped script did."""

    @property
    def below(self) -> str:
        """Return this node's folder in the job's run directory."""
        return self.found.below if self.found else ""


def place(
    command: Sequence[str], policies: Mapping[str, Any], invocation: str = "", *, hostfile: bool = False
) -> Placed:
    """Return the launch of a torchrun command, and what its options, a scheduler and our options say about the nodes. hostfile: a hostfile
    names the nodes, and so the etcd. Raises UsageError."""
    launch = understand(command, os.environ)
    control, nodes = placed(launch, policies["control"], policies["nodes"])
    found = None if hostfile else static(launch, control, nodes)
    return Placed(launch, found.control if found else control, nodes, found, invocation)


def serve(
    found: Static, run: RunDirectory, access: Access, terminal: Terminal, closing: ExitStack
) -> tuple[EmbeddedEtcd | None, list[str]]:
    """Start the etcd if this node is the master, else wait for it. Return the server and its endpoint. Raises MachineError, and
    StoreUnavailable if no etcd answers within `wait_s` seconds."""
    if found.serves:
        own, everywhere = reachable(found.host, found.wait_s, terminal)
        server, endpoint = started(run, terminal, closing, own, found.port, everywhere=everywhere)
        terminal.say(f"this node runs the etcd of all nodes, at {endpoint}", wall_s())
        return server, [endpoint]
    given = [found.control.etcd]
    answered(given, access, found.control.deadline_s, found.wait_s, terminal, quiet_s=_QUIET_S)
    return None, given


def reachable(host: str, wait_s: float, terminal: Terminal) -> tuple[str, bool]:
    """Return an IPv4 address of the master, which this machine is, and whether etcd must listen at all of its addresses. That is so if the
    name means a loopback address here (`localhost`, Debian's 127.0.1.1), or another machine's (a Service of Kubernetes, NAT): this machine
    then does not know which address the other nodes use. A loopback address itself (127.0.0.1) says that all nodes are on this machine.
    Wait for `wait_s` seconds if the name does not resolve yet. Raises MachineError."""
    if host.startswith("127."):
        return host, False
    found = _resolved(host, wait_s, terminal)
    if not names_loopback(found) and is_free(0, found):
        return found, False
    with suppress(MachineError):  # without a route to other networks
        return address([_ELSEWHERE]), True
    return _LOOPBACK, True


def _resolved(host: str, wait_s: float, terminal: Terminal) -> str:
    began_s, told = monotonic_s(), False
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            what, waited_s = f"--master-addr {host}: {error.strerror}", monotonic_s() - began_s
            if waited_s >= wait_s:
                raise MachineError(f"{what}; nothing was started") from error
            if not told and waited_s >= _QUIET_S:
                told = True
                terminal.say(f"{what}. Waiting for the name, for at most {wait_s:.0f} s", wall_s(), "warn")
        sleep(AGAIN_S)
