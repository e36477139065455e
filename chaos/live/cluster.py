"""What the nodes of a job share on this machine: their network, their etcd, their snapshots on disk. One node needs none of these."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import closing
from pathlib import Path

from ...resilience.errors import StoreUnavailable
from ...resilience.model.node import NodeRecord
from ...resilience.store.codec import loads
from ...resilience.store.etcd.client import EtcdStore
from ...resilience.store.keys import Keys
from . import small_disk
from .agent import NotThere
from .etcd_members import Members
from .network import Loopback, Network

_JOB = "chaos"
_MEMBERS = 3
_FIRST = 10
"""The nodes' addresses begin after this number."""


class Cluster:
    def __init__(
        self,
        root: Path,
        training: int,
        spares: int = 0,
        *,
        namespaces: bool,
        disk: Path | None = None,
        etcd_disk: Path | None = None,
    ) -> None:
        """Start what so many nodes need that train, and that stand by. root: of the run's files. disk: a file system for the snapshots, if
        the plan wants one of its own. etcd_disk: that for etcd's data, which is `etcd_place`. Raises MachineError."""
        self.training, self.spares, self.disk, self.etcd_disk = training, spares, disk, etcd_disk
        nodes = training + spares
        self.slowing: subprocess.Popen[bytes] | None = None
        """What makes etcd's disk slow."""
        self.names = [f"n{number}" for number in range(1, nodes + 1)] if nodes > 1 else [""]
        self.hosts: Network | Loopback = Network() if nodes > 1 and namespaces else Loopback()
        self.etcd: Members | None = None
        try:
            self._address = {name: self.hosts.add(name, _FIRST + at) for at, name in enumerate(self.names, 1)}
            if nodes > 1:
                self.etcd = Members(etcd_place(root, nodes), self.hosts, _MEMBERS)
                self.etcd.await_answer()
        except BaseException:
            self.close()
            raise

    @property
    def network(self) -> Network:
        """Return the network. Raises NotThere."""
        if isinstance(self.hosts, Network):
            return self.hosts
        raise NotThere("the nodes have no network of their own")

    @property
    def members(self) -> Members:
        """Return the members of etcd. Raises NotThere."""
        if self.etcd:
            return self.etcd
        raise NotThere("the job has one node, whose agent starts etcd")

    def storage(self, root: Path) -> Path:
        """Return the directory of the snapshots on disk, as `--snapshots` names it."""
        return self.disk or root / ("shared" if self.etcd else "run")

    def options(self, root: Path, name: str) -> list[str]:
        """Return the options of `mt-resilient run` on a node."""
        found = ["--run-dir", str(root / name / "run"), "--metrics-port", "0"]
        if self.disk or self.etcd:
            found += ["--snapshots", str(self.storage(root))]
        if self.etcd:
            found += ["--job", _JOB, "--node", name, "--nodes", str(self.training), "--address", self._address[name]]
            found += ["--spares", str(self.spares)] if self.spares else []
            found += ["--etcd", ",".join(self.etcd.endpoints)]
        return found

    def environment(self, name: str) -> dict[str, str]:
        """Return further variables of a node's processes."""
        if len(self.names) == 1:
            return {}
        return {"GLOO_SOCKET_IFNAME": self.hosts.interface, "NCCL_SOCKET_IFNAME": self.hosts.interface}

    def leader(self) -> str:
        """Return the name of the node whose agent leads. Raises NotThere."""
        keys = Keys(_JOB)
        try:
            with closing(EtcdStore(self.members.endpoints, deadline_s=1.0)) as store:
                found = store.get(keys.leader)
                nodes = {key: loads(NodeRecord, entry.value.decode()) for key, entry in store.range(keys.nodes).items()}
        except StoreUnavailable as error:
            raise NotThere(f"etcd does not tell which agent leads ({error})") from None
        for key, node in nodes.items():
            if found and node.instance == found.value.decode():
                return key.removeprefix(keys.nodes)
        raise NotThere("no agent leads")

    def thaw(self) -> None:
        """Let writes go on to the disks that a fault has frozen."""
        if self.slowing and self.slowing.poll() is None:
            os.killpg(self.slowing.pid, signal.SIGKILL)
            self.slowing.wait()
        for disk in filter(None, (self.disk, self.etcd_disk)):
            small_disk.thaw(disk)

    def stop_etcd(self) -> None:
        if self.etcd:
            self.etcd.close()

    def close(self) -> None:
        self.stop_etcd()
        self.hosts.close()


def etcd_place(root: Path, nodes: int) -> Path:
    """Return the folder of etcd's data: of all members, or of the one that the agent of the only node starts."""
    return root / "etcd" if nodes > 1 else root / "run" / "etcd"
