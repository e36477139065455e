"""How many of a hostfile's hosts train, and how many wait."""

import re
from pathlib import Path

import pytest

from mt_resilient.agent.hostfile_job import Wanted, seats
from mt_resilient.agent.launch import understand
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.etcd_access import Papers

HERE = understand(["torchrun", __file__], {})


def wanted(nodes: str, spares: int) -> Wanted:
    return Wanted(hostfile=Path("hosts"), papers=Papers(), nodes=nodes, spares=spares, ending_s=1.0)


@pytest.mark.parametrize(
    ("nodes", "spares", "hosts", "found"),
    [
        ("", 1, 3, ("2", 1)),
        ("2", 0, 3, ("2", 1)),
        ("2", 1, 3, ("2", 1)),
        ("1:4", 2, 3, ("1:4", 2)),
    ],
)
def test_who_trains_and_who_waits(nodes: str, spares: int, hosts: int, found: tuple[str, int]) -> None:
    assert seats(wanted(nodes, spares), HERE, hosts) == found


@pytest.mark.parametrize(
    ("nodes", "spares", "said"),
    [
        ("4", 0, "--nodes 4: the hostfile has 3 hosts; nothing was started. Name more hosts in it"),
        ("2", 5, "--nodes 2 and --spares 5: the hostfile has 3 hosts; nothing was started. Name more hosts in it, or ask for fewer spares"),
        ("", 3, "--spares 3: the hostfile has 3 nodes, so that none is left to train"),
    ],
)  # fmt: skip
def test_hosts_that_are_not_there(nodes: str, spares: int, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        seats(wanted(nodes, spares), HERE, 3)
