"""Nodes that measure each other over links of a real network, one of which is slow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mt_resilient.agent.etcd.binary import find_server
from mt_resilient.agent.etcd.server import EmbeddedEtcd
from mt_resilient.chaos.live.network import Network

from ..harness import MINIMAL, environment
from .hosts import Cluster

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("tc"), reason="network namespaces and tc want root, and iproute2"
)
NODE = """
import sys
from mt_resilient.agent.preflight.run import together
from mt_resilient.agent.preflight.rules import PreflightPolicy
from mt_resilient.resilience.store.etcd.client import EtcdStore
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.seat import Seat

node, address, endpoint, count = sys.argv[1:]
policy = PreflightPolicy(enabled=True, link_s=1.0)
check = together(policy, Seat(EtcdStore([endpoint]), Keys("job"), node), address, int(count), node)
print("; ".join(check.reasons) or "fit")
"""


@pytest.fixture
def net() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


@pytest.mark.timing
@pytest.mark.parametrize("slow", ["", "n3"])
def test_a_node_on_a_slow_link_is_named_by_all_and_nobody_else_is(net: Network, slow: str, tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(1, 7)]
    addresses = {name: net.add(name, 10 + number) for number, name in enumerate(names)}
    for name in names:  # all of a kind, but one
        net.shape(name, "20mbit" if name == slow else "200mbit")
    server = EmbeddedEtcd(find_server(), tmp_path / "etcd", tmp_path / "etcd.log", f"{net.subnet}.254")
    endpoint = server.start()
    try:
        nodes = {
            name: subprocess.Popen(
                [*net.inside(name), sys.executable, "-c", NODE, name, addresses[name], endpoint, str(len(names))],
                env=environment(),
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in names
        }
        said = {name: node.communicate(timeout=120)[0].strip() for name, node in nodes.items()}
    finally:
        server.stop()
    assert {name: words for name, words in said.items() if words != "fit"}.keys() == {slow} - {""}, said
    if slow:
        assert said[slow].startswith("its links reach at most "), said


@pytest.mark.variant
def test_a_node_that_is_not_fit_does_not_train(cluster: Callable[..., Cluster]) -> None:
    checks = [
        "--preflight",
        "--set",
        "preflight.device_s=0.1",
        "--set",
        "preflight.disk_mib=1",
        "--set",
        "preflight.wait_s=90",
    ]
    job = cluster("3", "--spares", "1", *checks, hosts=4, etcds=1, script=[str(MINIMAL), "--steps", "20"])
    for name in job.hosts:
        job.net.shape(name, "50mbit" if name == "n2" else "500mbit")
    job.start()
    job.until_step(5)
    assert job.members() == ["n1", "n3", "n4"]
    world = job.world()
    assert world
    assert {name for name, node in world.nodes.items() if node.fit} == {"n2"}
    assert set(job.finish(*job.hosts)) == {0}
    assert "n2 is not fit: its links reach at most" in (job.place / "n2.err").read_text()
