"""Several nodes whose torchruns name a master: which of them runs etcd, and what all are called."""

from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.agent.join.identity import ControlPolicy
from mt_resilient.agent.join.static_nodes import static
from mt_resilient.agent.launch.torchrun import Launch
from mt_resilient.resilience.membership.rank_assignment import NodesPolicy

LAUNCH = Launch(program=("torchrun",), python="python", options=(), ranks=8, script=("/x/pretrain_gpt.py",))
MASTER = {"master": "gpu-01", "port": 14388, "node_rank": "0"}
HERE = ControlPolicy(node="host")


@pytest.mark.parametrize(
    ("said", "serves", "node", "etcd"),
    [
        (MASTER, True, "00-host", "gpu-01:14389"),
        ({**MASTER, "node_rank": "7"}, False, "07-host", "gpu-01:14389"),
        ({"master": "127.0.0.1", "endpoint_port": 29400}, True, "host", "127.0.0.1:29401"),
        ({"master": "192.0.2.1"}, False, "host", "192.0.2.1:29501"),
    ],
)
def test_the_first_node_or_the_one_with_the_masters_address_runs_etcd(
    said: dict[str, Any], serves: bool, node: str, etcd: str
) -> None:
    found = static(replace(LAUNCH, **said), HERE, NodesPolicy(number="16"))
    assert found is not None
    control = found.control
    assert (found.serves, control.node, control.etcd, control.job) == (serves, node, etcd, "pretrain_gpt")
    assert found.below == f"nodes/{node}"


@pytest.mark.parametrize(
    ("said", "control", "nodes"),
    [
        (MASTER, HERE, "1"),
        ({}, HERE, "2"),
        (MASTER, replace(HERE, etcd="etcd-1:2379"), "2"),
    ],
)
def test_one_node_an_etcd_that_is_given_and_no_master_are_as_before(
    said: dict[str, Any], control: ControlPolicy, nodes: str
) -> None:
    assert static(replace(LAUNCH, **said), control, NodesPolicy(number=nodes)) is None
