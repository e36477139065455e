"""The connection to the next agent, on loopback."""

import errno
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from mt_resilient.agent.peers.liveness_link import AGAIN_S, Neighbour
from mt_resilient.resilience.model.node import NodeRecord
from mt_resilient.resilience.model.types import NodeId

B = NodeId("b")


@pytest.fixture
def mine() -> Iterator[Neighbour]:
    with closing(Neighbour()) as neighbour:
        yield neighbour


def record(port: int, instance: str = "one") -> NodeRecord:
    return NodeRecord(instance=instance, host="b", pid=4, ranks=1, port=port)


def looks(mine: Neighbour, now_s: float, times: int = 20) -> tuple[NodeId, str] | None:
    for _ in range(times):
        found = mine.look(now_s)
        if found:
            return found
    return None


def test_an_agent_is_dead_if_its_connection_breaks_and_the_next_is_refused(mine: Neighbour) -> None:
    theirs = Neighbour()
    mine.watch(B, record(theirs.port))
    assert looks(mine, 0.0) is None
    theirs.look(0.0)
    theirs.close()
    assert looks(mine, 0.0) == (B, "one")
    assert looks(mine, 10.0) is None  # told once


def test_an_agent_that_was_never_reached_does_not_count_as_dead(mine: Neighbour) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    mine.watch(B, record(port))
    assert looks(mine, 0.0) is None
    assert looks(mine, AGAIN_S) is None


def test_an_agent_that_accepts_a_new_connection_is_alive(mine: Neighbour) -> None:
    with socket.create_server(("", 0)) as server:
        mine.watch(B, record(server.getsockname()[1]))
        looks(mine, 0.0)
        first, _ = server.accept()
        first.close()
        assert looks(mine, 0.0) is None
        second, _ = server.accept()
        second.close()
    assert looks(mine, AGAIN_S) == (B, "one")


def test_a_new_neighbour_replaces_the_old_one(mine: Neighbour) -> None:
    old, new = Neighbour(), Neighbour()
    mine.watch(B, record(old.port))
    looks(mine, 0.0)
    mine.watch(B, record(new.port, "two"))
    looks(mine, 0.0)
    old.close()
    assert looks(mine, AGAIN_S) is None
    new.close()
    assert looks(mine, 2 * AGAIN_S) == (B, "two")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_listener_accepts_ipv4_and_ipv6(mine: Neighbour, address: str) -> None:
    if address == "::1" and not (socket.has_dualstack_ipv6() and _here(address)):
        pytest.skip("this machine has no IPv6")
    socket.create_connection((address, mine.port)).close()


def _here(address: str) -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex((address, 9)) != errno.EADDRNOTAVAIL


def test_an_established_connection_wakes_the_loop(mine: Neighbour) -> None:
    theirs = Neighbour()
    mine.watch(B, record(theirs.port))
    assert len(mine.fds()) == 1
    looks(mine, 0.0)
    assert len(mine.fds()) == 2
    theirs.close()
