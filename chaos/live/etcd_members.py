"""A cluster of etcd for a job of several nodes: its members, each on a host of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from ...agent.etcd.binary import clean_environment, find_server
from ...agent.launch.ports import free_ports
from ...resilience.clock import monotonic_s, sleep
from ...resilience.errors import MachineError, StoreUnavailable
from ...resilience.ipc.die_with_parent import spawn
from ...resilience.store.etcd.client import EtcdStore
from .network import Loopback, Network

_ANSWERS_S, _ENDS_S = 90.0, 30.0
_FIRST = 100
"""The members' addresses begin after this number."""


class Members:
    def __init__(self, place: Path, hosts: Loopback | Network, count: int) -> None:
        """Start e1, e2 …, each with a folder in `place`."""
        self._place, self._hosts = place, hosts
        self.names = [f"e{number}" for number in range(1, count + 1)]
        self._address = {name: hosts.add(name, _FIRST + number) for number, name in enumerate(self.names, 1)}
        alike = len({*self._address.values()}) < count
        ports = free_ports(2 * count) if alike else [2379, 2380]
        self._ports = {name: ports[2 * at : 2 * at + 2] if alike else ports for at, name in enumerate(self.names)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start(*self.names)

    @property
    def endpoints(self) -> list[str]:
        return [f"{self._address[name]}:{self._ports[name][0]}" for name in self.names]

    def await_answer(self) -> None:
        """Wait until the cluster answers. Raises MachineError."""
        end_s = monotonic_s() + _ANSWERS_S
        with closing(EtcdStore(self.endpoints, deadline_s=2.0)) as store:
            while monotonic_s() < end_s:
                with suppress(StoreUnavailable):
                    store.get("/")
                    return
                sleep(0.05)
        raise MachineError(f"etcd did not answer within {_ANSWERS_S:.0f} s; its output is in {self._place}")

    def start(self, *names: str) -> None:
        for name in names:
            if before := self.processes.get(name):  # a thread of one that was killed may hold its ports for some time
                before.wait(_ENDS_S)
            words = [*self._hosts.inside(name), str(find_server().path), *self._flags(name)]
            self._place.mkdir(parents=True, exist_ok=True)
            with (self._place / f"{name}.log").open("ab") as log:
                self.processes[name] = spawn(
                    words, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes[name].wait(_ENDS_S)

    def forget(self, names: Sequence[str]) -> None:
        """Delete their data."""
        for name in names:
            shutil.rmtree(self._place / name, ignore_errors=True)

    def close(self) -> None:
        self.kill(*self.processes)

    def _flags(self, name: str) -> list[str]:
        def url(member: str, at: int) -> str:
            return f"http://{self._address[member]}:{self._ports[member][at]}"

        flags = {
            "name": name,
            "data-dir": str(self._place / name),
            "listen-client-urls": url(name, 0),
            "advertise-client-urls": url(name, 0),
            "listen-peer-urls": url(name, 1),
            "initial-advertise-peer-urls": url(name, 1),
            "initial-cluster": ",".join(f"{each}={url(each, 1)}" for each in self.names),
        }
        return [f"--{key}={value}" for key, value in flags.items()]
