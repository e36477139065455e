"""What faults of the network do to datagrams between two hosts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from os import getuid

import pytest

from mt_resilient.chaos.live.network import Network

pytestmark = pytest.mark.skipif(
    getuid() != 0 or not shutil.which("tc"), reason="network namespaces and tc want root, and iproute2"
)
SENT = 400
RECEIVE = f"""
import select, socket, sys
here = socket.socket(type=socket.SOCK_DGRAM)
here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
here.bind(("", 4711)); print("ready", flush=True)
got = 0
while sys.stdin not in select.select([here, sys.stdin], [], [])[0]:  # which ends when the sender has
    here.recv(100); got += 1
here.settimeout(0.6)
try:
    while got < {SENT}:
        here.recv(100); got += 1
except TimeoutError:
    pass
print(got)
"""
SEND = f"""
import socket, sys
out = socket.socket(type=socket.SOCK_DGRAM)
for _ in range({SENT}):
    out.sendto(b"x", (sys.argv[1], 4711))
"""


@pytest.fixture
def net() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


def arrived(net: Network, address: dict[str, str], sender: str, receiver: str) -> int:
    """How many of 400 datagrams from one host reach the other."""
    listening = subprocess.Popen(
        [*net.inside(receiver), sys.executable, "-c", RECEIVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert listening.stdout
    listening.stdout.readline()
    subprocess.run([*net.inside(sender), sys.executable, "-c", SEND, address[receiver]], check=True)
    return int(listening.communicate(timeout=60)[0])


def test_a_link_is_cut_one_way_and_loses_frames(net: Network) -> None:
    address = {name: net.add(name, number) for number, name in enumerate(("n1", "n2"), 11)}
    # A host that is cut off cannot ask for the other's hardware address; and while one asks, few datagrams wait for the answer.
    for host, other in (("n1", "n2"), ("n2", "n1")):
        mac = net_address(net, other)
        subprocess.run(
            [*net.inside(host), "ip", "neigh", "replace", address[other], "lladdr", mac, "dev", "eth0"], check=True
        )
    assert arrived(net, address, "n1", "n2") == arrived(net, address, "n2", "n1") == SENT
    net.lose("n1", 1.0, received=False)
    assert (arrived(net, address, "n1", "n2"), arrived(net, address, "n2", "n1")) == (0, SENT)
    net.lose("n1", 0.25)
    assert all(0.6 * SENT < arrived(net, address, *way) < 0.9 * SENT for way in (("n1", "n2"), ("n2", "n1")))
    net.lose("n1", 0.0)
    assert arrived(net, address, "n1", "n2") == SENT


def net_address(net: Network, name: str) -> str:
    words = [*net.inside(name), "cat", "/sys/class/net/eth0/address"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
