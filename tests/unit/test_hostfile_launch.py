"""How many of a hostfile's hosts train, and how many wait."""

import re
from pathlib import Path

import pytest

from mt_resilient.agent.join.identity import ControlPolicy
from mt_resilient.agent.launch.torchrun import understand
from mt_resilient.agent.ssh.hostfile_launch import Begun, Wanted, named_after, seats
from mt_resilient.resilience.errors import StoreUnavailable, UsageError
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation
from mt_resilient.resilience.store.etcd.access import Papers

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
def test_hosts_beyond_the_number_of_nodes_are_spares(
    nodes: str, spares: int, hosts: int, found: tuple[str, int]
) -> None:
    assert seats(wanted(nodes, spares), HERE, hosts) == found


@pytest.mark.parametrize(
    ("nodes", "spares", "said"),
    [
        ("4", 0, "--nodes 4: the hostfile has 3 hosts; nothing was started. Name more hosts in it"),
        ("2", 5, "--nodes 2 and --spares 5: the hostfile has 3 hosts; nothing was started. Name more hosts in it, or ask for fewer spares"),
        ("", 3, "--spares 3: the hostfile has 3 nodes, so that none is left to train"),
    ],
)  # fmt: skip
def test_more_nodes_than_hosts_are_refused(nodes: str, spares: int, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        seats(wanted(nodes, spares), HERE, 3)


@pytest.mark.parametrize("folder", ["lr=3e-4", "a b+c", "größe", "gpt-2.1_x"])
def test_any_folder_name_gives_a_valid_name_of_a_job(folder: str) -> None:
    name = named_after(folder, "0a1b2c3d")
    assert name.endswith("-0a1b2c3d")
    assert len(name) == len(folder) + 9
    assert (name == f"{folder}-0a1b2c3d") is (folder == "gpt-2.1_x")  # a valid name stays as it is
    ControlPolicy(job=name)


@pytest.mark.parametrize(
    ("before", "now", "begun"),
    [(0, 0, False), (0, 1, True), (4, 4, False), (4, 5, True), (0, None, True), (None, 0, True), (None, None, True)],
)
def test_a_job_has_begun_if_there_is_a_new_generation_or_etcd_does_not_answer(
    before: int | None, now: int | None, begun: bool
) -> None:
    """None: etcd does not answer, so the job may have begun."""
    numbers = iter([before, now])

    def last() -> GenerationRecord | None:
        number = next(numbers)
        if number is None:
            raise StoreUnavailable("it does not answer")
        return GenerationRecord(number=Generation(number), phase=Phase.RUN, members={}) if number else None

    assert Begun(last)() is begun
