"""Nodes that start together measure their links: bandwidth and clock differences. Each node measures its link to one partner node, and then
to another. `rules` judges the results.

    store: presence of each node ──▶ the roster (list of these nodes) ──▶ a link per pair of the first pairing ──▶ of the second
    pair:  the node whose name sorts first connects to the other, which answers any node

Each pair uses one TCP stream, as the cluster's own sockets do, so the test does not cover InfiniBand or NVLink. A node that joins when the
others already train has no partner to measure with, so its links pass the check.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from ...resilience.clock import monotonic_s, sleep, wall_s
from ...resilience.store.codec import dumps, loads
from ...resilience.store.protocol import CreatedAt, Delete, first_put
from ...resilience.store.seat import Seat
from .rules import Link, PreflightPolicy, first_pairs, second_pairs

_BLOCK = b"\0" * (1 << 20)
_TIMES = 8
"""How many times a node requests the other node's time; the shortest round trip counts."""
_ANSWER_S = 10.0
"""Seconds that a socket may be silent. A pair that has to wait for a busy node is served after one or two measurements."""
_POLL_S, _READS_PER_S, _LISTS_PER_S = 0.05, 500, 100
"""Three limits. The least seconds between two polls of etcd by a node; and, for all nodes together, the most reads of the roster and the
most listings of keys per second. A listing has an entry per node."""
_TIME, _SEND, _TAKE = b"t", b"s", b"r"
_DOUBLE = struct.Struct("!d")


@dataclass(frozen=True, kw_only=True)
class Present:
    node: str
    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The nodes that measure each other in this start."""

    session: str
    nodes: tuple[Present, ...]


class Listener:
    """Answers other nodes one at a time, until it is closed: simultaneous measurements would halve each other's result."""

    def __init__(self, address: str, seconds: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=16)
        self._seconds = seconds
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="links", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with closing(peer), suppress(OSError):
                peer.settimeout(_ANSWER_S)
                self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        while question := peer.recv(1):
            if question == _TIME:
                peer.sendall(_DOUBLE.pack(wall_s()))
            elif question == _SEND:
                _send(peer, self._seconds)
                return
            elif question == _TAKE:
                peer.sendall(_DOUBLE.pack(_take(peer)))
                return


def measure(one: str, other: Present, seconds: float) -> Link:
    """Measure the link from this node, `one`, to `other`: first the other's clock, then each direction for `seconds`."""
    place = (other.address, other.port)
    try:
        with closing(socket.create_connection(place, _ANSWER_S)) as peer:
            within_s, ahead_s = min(_ask_time(peer) for _ in range(_TIMES))
        with closing(socket.create_connection(place, _ANSWER_S)) as peer:
            peer.sendall(_SEND)
            inward = _take(peer)
        with closing(socket.create_connection(place, _ANSWER_S)) as peer:
            peer.sendall(_TAKE)
            _send(peer, seconds)
            peer.shutdown(socket.SHUT_WR)
            outward = _DOUBLE.unpack(_exactly(peer, _DOUBLE.size))[0]
    except OSError as error:
        return Link(one=one, other=other.node, error=error.strerror or str(error))
    return Link(one=one, other=other.node, mb_per_s=min(inward, outward), ahead_s=ahead_s, within_s=within_s)


def _ask_time(peer: socket.socket) -> tuple[float, float]:
    """Return half of the round trip, and how far the other's clock is ahead, both in seconds. The method is Cristian's (Distributed
    Computing 3, 1989)."""
    began, asked = monotonic_s(), wall_s()  # in this order, `half` contains a pause between the two
    peer.sendall(_TIME)
    told = _DOUBLE.unpack(_exactly(peer, _DOUBLE.size))[0]
    half = (monotonic_s() - began) / 2
    return half, told - (asked + half)


def _send(peer: socket.socket, seconds: float) -> None:
    ends = monotonic_s() + seconds
    while monotonic_s() < ends:
        peer.sendall(_BLOCK)


def _take(peer: socket.socket) -> float:
    """Receive until the end, and return the rate in 10⁶ bytes per second. The timing starts after the first bytes."""
    peer.settimeout(_ANSWER_S)
    buffer = bytearray(len(_BLOCK))
    total, began = peer.recv_into(buffer), monotonic_s()
    count = 0
    while got := peer.recv_into(buffer):
        count += got
    return (count or total) / 1e6 / max(monotonic_s() - began, 1e-9)


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        data += part
    return data


class Meeting:
    """One node's part in the measurement. Every call may raise StoreUnavailable."""

    def __init__(self, seat: Seat, address: str, policy: PreflightPolicy) -> None:
        """address: the address at which other nodes reach this node."""
        self._store, self._keys, self._node = seat.store, seat.keys, seat.node
        self._address, self._policy = address, policy

    def links(self, expected: int, session: str) -> tuple[Link, ...]:
        """Return all links that the nodes of the roster have measured; empty if this node has no partner. Wait at most `wait_s` for the
        other nodes. expected: number of nodes that start together. session: a text unique to this start of the agent."""
        lease = self._store.grant(int(10 * self._policy.wait_s) + 60)  # keys that a killed agent leaves behind expire
        key = self._keys.met(self._node)
        with closing(Listener(self._address, self._policy.link_s)) as listener:
            me = Present(node=self._node, address=self._address, port=listener.port)
            self._store.put(key, dumps(me), lease)
            roster, written = self._roster(me, expected, session, lease)
            try:
                if me not in roster.nodes or len(roster.nodes) < 2:
                    return ()
                names = [each.node for each in roster.nodes]
                first = self._round(roster, 1, first_pairs(names), lease)
                return (*first, *self._round(roster, 2, second_pairs(names, first), lease))
            finally:
                self._store.delete(key)
                # The last node deletes the roster: until then, another node may not have read it.
                if not set(roster.nodes) & set(self._here()):
                    self._store.transact([CreatedAt(self._keys.roster, written)], [Delete(self._keys.roster)])

    def _here(self) -> tuple[Present, ...]:
        return tuple(loads(Present, each.value) for each in self._store.range(self._keys.meeting).values())

    def _roster(self, me: Present, expected: int, session: str, lease: int) -> tuple[Roster, int]:
        """Return the roster, and the etcd revision that created it. The first node that sees all nodes, or has waited for `wait_s`, writes
        it. A roster that names an earlier agent of this node comes from killed agents: it is deleted when none of its agents is present."""
        ends = monotonic_s() + self._policy.wait_s
        list_s = 0.0
        while True:
            over = monotonic_s() >= ends
            if over or monotonic_s() >= list_s:  # the last node to arrive sees all nodes in its first listing
                here, list_s = self._here(), monotonic_s() + expected / _LISTS_PER_S
            entry = self._store.get(self._keys.roster)
            if entry is None and (len(here) >= expected or over):
                roster = Roster(session=session, nodes=here)
                entry = first_put(self._store, self._keys.roster, dumps(roster), lease)
            if entry:
                roster = loads(Roster, entry.value)
                known = {each.node: each for each in roster.nodes}
                if over or known.get(me.node, me) == me:
                    return roster, entry.create_revision
                if not {*known.values()} & {*here}:
                    self._store.transact(
                        [CreatedAt(self._keys.roster, entry.create_revision)], [Delete(self._keys.roster)]
                    )
            sleep(max(_POLL_S, min(expected / _READS_PER_S, ends - monotonic_s())))

    def _round(self, roster: Roster, number: int, pairs: Sequence[tuple[str, str]], lease: int) -> tuple[Link, ...]:
        """Measure this node's link if it is the first of a pair, and wait for the other pairs' results. Return the links that arrived in
        time."""
        prefix = self._keys.links(roster.session, number)
        by_name = {each.node: each for each in roster.nodes}
        for one, other in pairs:
            if one == self._node:
                link = measure(one, by_name[other], self._policy.link_s)
                self._store.put(f"{prefix}{one}", dumps(link), lease)
        ends = monotonic_s() + 3 * _ANSWER_S + 4 * self._policy.link_s
        while len(found := self._store.range(prefix)) < len(pairs) and monotonic_s() < ends:
            sleep(max(_POLL_S, min(2 * len(pairs) / _LISTS_PER_S, ends - monotonic_s())))
        return tuple(loads(Link, each.value) for each in found.values())
