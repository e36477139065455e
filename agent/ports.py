"""Free ports below the kernel's ephemeral range, so that no outgoing connection takes one between our look and its use."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from ..resilience.errors import MachineError

_TRIES = 200


def free_port() -> int:
    """A TCP port on which nothing listens on this node. Raises MachineError when none is found."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(_TRIES):
        port = random.randrange(min(10_000, first_ephemeral - 1_000), first_ephemeral)
        if is_free(port):
            return port
    raise MachineError(f"no free port below {first_ephemeral} on this node; see what listens there with: ss -lt")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
