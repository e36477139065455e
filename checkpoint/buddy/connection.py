"""A TCP connection between two drain processes that have proved to each other that they know the job's token.

The connection carries whole frames and raw bytes, and every wait has a limit. The connection's methods raise `Lost` or `Refused` if the
other end is a stranger, hangs or has vanished.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from ...resilience import clock
from ...resilience.errors import SiteError
from ...resilience.store.poll import readable
from . import protocol
from .protocol import Strange, Word

Address: TypeAlias = tuple[str, int]
_T = TypeVar("_T")

HANDSHAKE_S = 5.0
"""The most seconds for the whole handshake. A stranger cannot extend it by sending a byte now and then."""
BLOCK_BYTES = 4 << 20
"""Bytes per system call. The kernel copies them out of the slot. `sendfile` avoids that copy, but was 0.65 times as fast on loopback
(measured)."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""Seconds until the first probe, seconds between probes, number of probes: a vanished node is detected after 11 s even without traffic."""


class Lost(SiteError):
    """The process at the other end of the connection has ended, hangs, or does not speak this protocol."""


class Refused(SiteError):
    """One end's proof of the token is not valid."""


class Connection:
    """A socket on which both ends have proved that they know the token. Only one thread may use a Connection at a time, except for `close`.

    Every method raises Lost. A deadline `until_s`, in monotonic seconds, applies to the whole call.
    """

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        """stall_s: if a transfer moves no bytes for this many seconds, the other end counts as lost."""
        self._socket, self._stall_s = sock, stall_s
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * stall_s))
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, from any thread. A thread that waits on it gets Lost."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end has closed the connection first
        self._socket.close()

    def say(self, word: Word, body: bytes = b"", until_s: float = math.inf) -> None:
        self.write(memoryview(protocol.pack(word, body)), until_s)

    def hear(self, *expected: Word, until_s: float = math.inf, idle: bool = False) -> tuple[Word, bytes]:
        """Return the next frame. idle: the wait for its first byte has no limit."""
        start = memoryview(bytearray(protocol.PREFIX_BYTES))
        if idle:
            self._calling(readable, [self._socket.fileno()], math.inf)
        self.read(start, until_s)
        try:
            word, length = protocol.prefix(bytes(start), *expected)
        except Strange as error:
            raise Lost(f"it violates the protocol: {error}") from error
        body = bytearray(length)
        self.read(memoryview(body), until_s)
        return word, bytes(body)

    def write(self, data: memoryview, until_s: float = math.inf) -> None:
        while data:
            sent = self._calling(self._socket.send, data[:BLOCK_BYTES], until_s=until_s)
            data = data[sent:]

    def read(self, into: memoryview, until_s: float = math.inf) -> None:
        """Read until `into` is full."""
        while into:
            come = self._calling(self._socket.recv_into, into[:BLOCK_BYTES], 0, socket.MSG_WAITALL, until_s=until_s)
            if not come:
                raise Lost("it has closed the connection")
            into = into[come:]

    def idle(self, seconds: float) -> None:
        """Wait `seconds` during which the peer should send nothing. If anything arrives, raise Lost."""
        if self._calling(readable, [self._socket.fileno()], seconds):
            raise Lost("it has closed the connection")

    def _calling(self, call: Callable[..., _T], *arguments: object, until_s: float = math.inf) -> _T:
        left_s = until_s - clock.monotonic_s()
        if left_s <= 0:
            raise Lost("it took longer than its time limit")
        patience_s = min(self._stall_s, left_s)
        try:
            # With `settimeout`, each call would move only the bytes at hand: a copy took 1.05 times as long (measured).
            limit = struct.pack("ll", *divmod(math.ceil(1e6 * patience_s), 1_000_000))
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, direction, limit)
            return call(*arguments)
        except BlockingIOError as error:
            raise Lost(f"nothing has moved for {patience_s:.1f} s") from error
        except (OSError, ValueError) as error:  # ValueError: closed by another thread
            raise Lost(f"the connection is lost: {getattr(error, 'strerror', None) or error}") from error


def call(address: Address, token: bytes, stall_s: float) -> Connection:
    """Connect, prove knowledge of the token, and check the listener's proof. Raises Lost or Refused."""
    until_s = clock.monotonic_s() + HANDSHAKE_S
    try:
        connection = Connection(socket.create_connection(address, min(HANDSHAKE_S, stall_s)), stall_s)
    except OSError as error:
        raise Lost(f"{address[0]}:{address[1]} does not answer: {error.strerror or error}") from error
    try:
        _, theirs = connection.hear(Word.HELLO, until_s=until_s)
        ours = os.urandom(protocol.NONCE_BYTES)
        connection.say(Word.PROOF, ours + protocol.proof(token, b"caller", theirs, ours), until_s)
        word, body = connection.hear(Word.PROOF, Word.NO, until_s=until_s)
        if word is Word.NO:
            raise Refused(f"{address[0]}:{address[1]} refuses: {protocol.said(body)}")
        if not protocol.proves(token, b"listener", theirs, ours, body):
            raise Refused(f"{address[0]}:{address[1]} does not know this job's token: nothing was sent to it")
    except BaseException:
        connection.close()
        raise
    return connection


def answer(connection: Connection, token: bytes) -> None:
    """Do the listener's part of the handshake in `call`. Raises Lost or Refused; then the caller has received only a nonce and an error
    sentence."""
    until_s = clock.monotonic_s() + HANDSHAKE_S
    ours = os.urandom(protocol.NONCE_BYTES)
    connection.say(Word.HELLO, ours, until_s)
    _, body = connection.hear(Word.PROOF, until_s=until_s)
    theirs, found = body[: protocol.NONCE_BYTES], body[protocol.NONCE_BYTES :]
    if not protocol.proves(token, b"caller", ours, theirs, found):
        why = "the caller does not know this job's token"
        connection.say(Word.NO, protocol.sentence(why), until_s)
        raise Refused(why)
    connection.say(Word.PROOF, protocol.proof(token, b"listener", ours, theirs), until_s)
