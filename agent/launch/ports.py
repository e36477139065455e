"""Finds this machine's addresses, and free ports below the kernel's ephemeral range, so that no outgoing connection occupies a port between
the check and its use."""

from __future__ import annotations

import random
import re
import socket
from ipaddress import ip_address
from pathlib import Path

from ...resilience.errors import MachineError

_TRIES = 200


def free_port(host: str = "", wished: int = 0) -> int:
    """Return a TCP port of `host` on which no process listens: `wished`, if that port is free. host: an address of this node; empty: all
    its addresses. Raises MachineError if no free port is found."""
    if wished and is_free(wished, host):
        return wished
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    low, high = (first_ephemeral - 10_000, first_ephemeral) if first_ephemeral > 12_000 else (20_000, 30_000)
    for _ in range(_TRIES):
        port = random.randrange(low, high)
        if is_free(port, host):
            return port
    raise MachineError(f"no free port from {low} to {high} on this node; see what listens there with: ss -lt")


def free_ports(count: int, host: str = "") -> list[int]:
    """Return `count` different ports, each as `free_port` finds it."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port(host))
    return list(found)


def is_free(port: int, host: str = "") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lingering connections do not matter
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def names_loopback(host: str) -> bool:
    """Return whether `host` means the machine on which it is read: `localhost`, a loopback address, 0.0.0.0. No name is resolved."""
    try:
        found = ip_address(host.strip("[]"))
        return found.is_loopback or found.is_unspecified
    except ValueError:
        return re.fullmatch(r"(?:ip6-)?(?:localhost|loopback)(?:\..*)?", host) is not None


def address_towards(host: str, port: int, family: int = socket.AF_UNSPEC) -> str:
    """Return this machine's address on the route to `host`, which the kernel knows. No packet is sent. Raises OSError."""
    family, *_, place = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
