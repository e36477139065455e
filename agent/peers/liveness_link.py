"""One TCP connection to the next node's agent. If the connection breaks and the host refuses a new one, the agent has died, but not its
host.

    this agent ──connection──▶ listener of the next one        broken, then refused ──▶ its instance, for `keys.death`

The expiry of the agent's lease would show the same some seconds later. The connection carries no data. A node that is cut off, or has lost
power, neither breaks a connection nor refuses one: only the expiry of its agent's lease shows the loss.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

from ...resilience.model.node import NodeRecord
from ...resilience.model.types import NodeId
from ...resilience.store.poll import writable

AGAIN_S = 1.0
"""Seconds between two tries to reach a neighbour that does not answer."""


class Neighbour:
    """The watched neighbour (the next node's agent), and the connection to it. The agent's loop calls these methods, so none of them
    blocks."""

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=64, dualstack_ipv6=both)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._held: dict[int, socket.socket] = {}
        """Connections from agents that watch this one; kept open, and no data is expected on them."""
        self._watched: tuple[NodeId, NodeRecord] | None = None
        self._link: socket.socket | None = None
        self._up = False
        """The connection is established."""
        self._broken = False
        """A connection to the watched agent process was established, and has broken."""
        self._again_s = 0.0

    def watch(self, node: NodeId, record: NodeRecord) -> None:
        """Keep a connection to the agent of `record` from now on, and drop the connection to any other agent."""
        if self._watched is None or self._watched[1].instance != record.instance:
            self._drop()
            self._watched, self._broken, self._again_s = (node, record), False, 0.0

    @property
    def watched(self) -> str:
        """Instance of the watched agent; empty: no agent is watched."""
        return self._watched[1].instance if self._watched else ""

    def fds(self) -> list[int]:
        """Return the descriptors that become readable when `look` has work to do."""
        link = [self._link.fileno()] if self._link and self._up else []
        return [self._listener.fileno(), *link]

    def look(self, now_s: float) -> tuple[NodeId, str] | None:
        """Accept new connections, connect to the neighbour, and check it. Return its node and instance if its agent is now known to be
        dead, else None. now_s: monotonic."""
        self._accept()
        if self._watched is None:
            return None
        if self._link is not None and self._up and _gone(self._link):
            self._drop()
            self._broken, self._again_s = True, 0.0
        if self._link is None and now_s >= self._again_s:
            self._call(now_s)
        if self._link is not None and not self._up:
            error = _outcome(self._link)
            if error == 0:
                self._up = True
            elif error is not None or now_s >= self._again_s:
                self._drop()
                if error == errno.ECONNREFUSED and self._broken:
                    node, record = self._watched
                    self._watched = None
                    return node, record.instance
        return None

    def close(self) -> None:
        self._drop()
        for each in (*self._held.values(), self._listener):
            each.close()
        self._held.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                self._held[caller.fileno()] = caller
        for fd in [fd for fd, held in self._held.items() if _gone(held)]:
            self._held.pop(fd).close()

    def _call(self, now_s: float) -> None:
        assert self._watched
        self._again_s = now_s + AGAIN_S
        record = self._watched[1]
        with suppress(OSError):
            family, kind, _, _, place = socket.getaddrinfo(record.address, record.port, type=socket.SOCK_STREAM)[0]
            self._link = socket.socket(family, kind)
            self._link.setblocking(False)
            self._link.connect_ex(place)

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link, self._up = None, False


def _gone(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _outcome(link: socket.socket) -> int | None:
    """Return the result of a pending connect: 0, an errno, or None while the connect is still under way."""
    if not writable([link.fileno()]):
        return None
    return link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
