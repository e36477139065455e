"""Several nodes whose torchruns name a master and no etcd: `torchrun --nnodes 2 --node-rank 0 --master-addr gpu-01 --master-port 29500 …`.

The master's agent runs the etcd, on the port after torchrun's. All other names follow from torchrun's options, which are the same on
all nodes but for the rank.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ...resilience.clock import sleep, wall_s
from ...resilience.errors import MachineError, StoreUnavailable
from ...resilience.membership.rank_assignment import NodesPolicy, sizes
from ...resilience.store.etcd.access import Access
from ..etcd.server import EmbeddedEtcd, probe, started
from ..launch.torchrun import Launch
from ..output.terminal import Terminal
from ..run_directory import RunDirectory
from .identity import ControlPolicy

WAIT_S = 300.0
"""Seconds that a node waits for the master's etcd, as torchrun waits for its store."""
_SAY_S = 5.0


@dataclass(frozen=True)
class Static:
    control: ControlPolicy
    """The options, completed with etcd, the job's name and this node's name."""
    host: str
    port: int
    """Address of the master's etcd."""
    serves: bool
    """This node is the master."""

    @property
    def below(self) -> str:
        """Return this node's folder in the job's run directory, which all nodes may share."""
        return f"nodes/{self.control.node}"


def static(launch: Launch, control: ControlPolicy, nodes: NodesPolicy) -> Static | None:
    """Return what torchrun's options say about the nodes. None: there is one node, an etcd is given, or no master is named."""
    several = max(sizes(nodes.number or "1")) > 1 or nodes.spares > 0
    if control.etcd or not several or not launch.master:
        return None
    host, port = launch.master, launch.etcd_port
    rank = launch.node_rank
    wide = len(str(max(sizes(nodes.number or "1")) - 1))
    node = f"{int(rank):0{wide}}-{control.node}" if rank.isdecimal() else control.node
    job = control.job or Path(launch.script[0]).stem
    serves = int(rank) == 0 if rank.isdecimal() else _is_here(host)
    return Static(replace(control, etcd=f"{host}:{port}", job=job, node=node), host, port, serves)


def _is_here(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
            here.bind((host, 0))
    except OSError:
        return False
    return True


def serve(
    found: Static, run: RunDirectory, access: Access, terminal: Terminal, closing: ExitStack
) -> tuple[EmbeddedEtcd | None, list[str]]:
    """Start the etcd if this node is the master, else wait for it. Return the server and its endpoint. Raises MachineError, and
    StoreUnavailable if no etcd answers within WAIT_S."""
    if found.serves:
        server, endpoint = started(run, terminal, closing, lambda: _resolved(found.host), found.port)
        terminal.say(f"this node runs the etcd of all nodes, at {endpoint}", wall_s())
        return server, [endpoint]
    began_s, told = wall_s(), False
    while True:
        try:
            probe(found.control.etcd, found.control.deadline_s, access)
            return None, [found.control.etcd]
        except StoreUnavailable as error:
            if wall_s() - began_s > WAIT_S:
                raise
            if not told and wall_s() - began_s > _SAY_S:
                told = True
                terminal.say(f"waiting for the etcd of the first node ({error})", wall_s(), "warn")
        sleep(0.5)


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise MachineError(f"--master-addr {host}: {error.strerror}; nothing was started") from error
