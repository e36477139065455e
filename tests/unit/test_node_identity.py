"""The address at which other nodes reach this one."""

import json
import socket
import urllib.request
from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.agent.join import identity
from mt_resilient.agent.launch.torchrun import Launch
from mt_resilient.resilience.errors import MachineError, UsageError
from mt_resilient.resilience.membership.rank_assignment import NodesPolicy
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.report.metrics import Metrics
from mt_resilient.resilience.store.codec import dumps
from mt_resilient.resilience.store.keys import Keys

from ..memory_store import MemoryStore
from .worlds import node


def own() -> str:
    """An address of this machine that others may know."""
    return identity.address(["192.0.2.1:2379"])


@pytest.mark.parametrize(
    ("launch", "control", "nodes", "alone"),
    [
        ({"alone": True}, {}, {}, True),
        ({}, {}, {}, False),
        ({"alone": True}, {"etcd": "etcd-1:2379"}, {}, False),
        ({"alone": True}, {}, {"number": "4"}, False),
        ({"alone": True}, {}, {"spares": 1}, False),
    ],
)
def test_own_options_for_several_nodes_precede_a_torchrun_for_one(
    launch: dict[str, Any], control: dict[str, Any], nodes: dict[str, Any], alone: bool
) -> None:
    torchrun = Launch(program=("torchrun",), python="python", options=(), ranks=8, script=("train.py",), **launch)
    assert identity.alone(torchrun, identity.ControlPolicy(**control), NodesPolicy(**nodes)) is alone


def test_a_host_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    there = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", (own(), 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [there])
    assert identity.named("gpu-07.cluster") == own()


def test_a_name_of_the_loopback_interface_stays_a_name() -> None:
    assert identity.named("localhost") == "localhost"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(MachineError, match=r"--address 192\.0\.2\.1"):
        identity.named("192.0.2.1")


def test_an_etcd_member_whose_name_does_not_resolve_is_left_out() -> None:
    """It is down, and Kubernetes' DNS has forgotten it."""
    assert identity.address(["no.such.invalid:2379", "127.0.0.1:2379"]) == "127.0.0.1"
    with pytest.raises(MachineError, match="name it with --address"):
        identity.address(["no.such.invalid:2379"])


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "239.1.2.3", "ff02::1"])
def test_an_address_of_no_single_machine_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=f"--address {address} does not name one machine"):
        identity.named(address)


def test_the_metrics_of_all_nodes_are_found_in_etcd() -> None:
    store, keys = MemoryStore(lambda: 0.0), Keys("gpt")
    for name, address, port in (
        ("a", "10.0.0.1", 9464),
        ("b", "10.0.0.2", 9465),
        ("c", "fd00::3", 9464),
        ("old", "10.0.0.4", 0),
    ):
        store.put(keys.node(NodeId(name)), dumps(replace(node(name), address=address, metrics_port=port)))
    found = {"a": "10.0.0.1:9464", "b": "10.0.0.2:9465", "c": "[fd00::3]:9464"}
    assert identity.metrics_of_nodes(store, keys) == found
    metrics = Metrics("gpt", "a")
    port, own = metrics.serve(0), []
    for known in (found, {**found, "a": "127.0.0.1:9464"}, {}):
        metrics.nodes = dict(known).copy
        for host in ("127.0.0.1", "localhost"):
            with urllib.request.urlopen(f"http://{host}:{port}/sd") as answer:
                own.append({each["labels"]["node"]: each["targets"][0] for each in json.load(answer)}["a"])
    assert own[:2] == ["10.0.0.1:9464"] * 2, "whomever Prometheus asks, an agent is named once"
    assert own[2:] == [f"127.0.0.1:{port}", f"localhost:{port}"] * 2
