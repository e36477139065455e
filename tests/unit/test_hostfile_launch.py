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


@pytest.mark.parametrize("folder", ["lr=3e-4", "a b+c", "größe", "gpt-2.1_x"])
def test_a_job_is_called_by_its_folder_whatever_that_is_called(folder: str) -> None:
    name = named_after(folder, "0a1b2c3d")
    assert name.endswith("-0a1b2c3d")
    assert len(name) == len(folder) + 9
    ControlPolicy(job=name)


def test_a_name_that_may_be_stays_as_it_is() -> None:
    assert named_after("gpt-2.1_x", "0a1b2c3d") == "gpt-2.1_x-0a1b2c3d"


@pytest.mark.parametrize(
    ("before", "now", "begun"),
    [(0, 0, False), (0, 1, True), (4, 4, False), (4, 5, True), (0, None, True), (None, 0, True), (None, None, True)],
)
def test_a_job_has_begun_when_there_is_another_generation(before: int | None, now: int | None, begun: bool) -> None:
    """None: the store does not answer, and who knows."""
    numbers = iter([before, now])

    def last() -> GenerationRecord | None:
        number = next(numbers)
        if number is None:
            raise StoreUnavailable("it does not answer")
        return GenerationRecord(number=Generation(number), phase=Phase.RUN, members={}) if number else None

    assert Begun(last)() is begun
