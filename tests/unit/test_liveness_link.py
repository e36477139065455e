"""The connection to the next agent, on loopback."""

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext

import pytest

from mt_resilient.agent.peers.liveness_link import AGAIN_S, Neighbour
from mt_resilient.resilience.model.node import NodeRecord
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.store.poll import readable

from ..etcd_cluster import eventually
from ..open_files import numbers_beyond_select

B = NodeId("b")


@pytest.fixture
def mine() -> Iterator[Neighbour]:
    with closing(Neighbour()) as neighbour:
        yield neighbour


def record(port: int, instance: str = "one") -> NodeRecord:
    return NodeRecord(instance=instance, host="b", pid=4, ranks=1, port=port)


def looks(mine: Neighbour, now_s: float, times: int = 20, pause_s: float = 0.0) -> tuple[NodeId, str] | None:
    for _ in range(times):
        if dead := mine.look(now_s):
            return dead
        time.sleep(pause_s)
    return None


def found(mine: Neighbour, now_s: float) -> tuple[NodeId, str] | None:
    """Look for as long as the kernel may take to tell it."""
    return looks(mine, now_s, 500, 0.01)


def up(mine: Neighbour) -> None:
    eventually(lambda: looks(mine, 0.0) is None and len(mine.fds()) == 2)


@pytest.mark.parametrize("crowded", [False, True])
def test_an_agent_is_dead_if_its_connection_breaks_and_the_next_is_refused(mine: Neighbour, crowded: bool) -> None:
    with numbers_beyond_select() if crowded else nullcontext():
        theirs = Neighbour()
        mine.watch(B, record(theirs.port))
        up(mine)
        theirs.look(0.0)
        theirs.close()
        assert found(mine, 0.0) == (B, "one")
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
        up(mine)
        first, _ = server.accept()
        first.close()
        eventually(lambda: looks(mine, 0.0) is None and readable([server.fileno()]) == [server.fileno()])
        second, _ = server.accept()
        second.close()
    assert found(mine, AGAIN_S) == (B, "one")


def test_a_new_neighbour_replaces_the_old_one(mine: Neighbour) -> None:
    old, new = Neighbour(), Neighbour()
    mine.watch(B, record(old.port))
    up(mine)
    mine.watch(B, record(new.port, "two"))
    up(mine)
    old.close()
    assert looks(mine, AGAIN_S) is None
    new.close()
    assert found(mine, 2 * AGAIN_S) == (B, "two")


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
    up(mine)
    theirs.close()
