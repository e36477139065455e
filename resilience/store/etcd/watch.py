"""`Watch` on etcd, by one stream. Whenever the stream ends, the watch opens it again at another member, after the last change that has
arrived.

Data flow: stream ─▶ its own thread ─▶ changes, and an eventfd that wakes the caller's poll ─▶ `take`. If a member does not answer one of
the store's calls, the watch also leaves that member, because a stopped member would be silent for ever.

Only changes advance the watch's position, never etcd's progress reports (etcd issue 15220). The watch asks for no fragments, so all changes
of a revision come in one message. If etcd has compacted the position away, or lost its data and never had it, `take` raises `HistoryGone`,
and the caller lists.
"""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from ..protocol import Change, HistoryGone
from .member import Member
from .messages import change_of, interval_fields, method

_PAUSES_S = (0.05, 1.0)
"""Seconds before a stream is opened again: at first, and at most. Up to half is added at random, because thousands reconnect at the same
time."""
_RENEWAL_S = 2.0
# This metadata makes a member that has lost its quorum end the stream; without it, the member would stay silent.
_WANTS_LEADER = ("hasleader", "true")


class EtcdWatch:
    """The changes under one prefix of an etcd cluster (it implements `protocol.Watch`). present: a function that returns the member to use
    now; leave: a function that the watch calls with a member that has failed."""

    owed = 0
    doubtful = False

    def __init__(self, prefix: str, since: int, present: Callable[[], Member], leave: Callable[[Member], None]) -> None:
        self.prefix = prefix
        self._seen = since
        self._present, self._leave = present, leave
        self._came: list[Change] = []
        self._lost = ""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._at: Member | None = None
        self._pause_s = _PAUSES_S[0]
        self._stream: Any = None
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._follow, name="etcd-watch", daemon=True).start()

    def fileno(self) -> int:
        return self._event

    def take(self) -> list[Change]:
        with self._lock:  # so that the descriptor is not readable when no change is left
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
            came, self._came = self._came, []
            if self._lost:
                self._wake()
        if self._lost and not came:
            raise HistoryGone(self._lost)
        return came

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._end_stream()
            if self._event >= 0:
                os.close(self._event)
                self._event = -1

    def left(self, member: Member) -> None:
        """End the stream if it is open at `member`, because a call to that member has failed."""
        with self._lock:
            if member is self._at:
                self._end_stream()

    # -- on the watch's own thread ----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._closed.is_set() and not self._lost:
            self._at = member = self._present()
            try:
                self._read(member)
            # ValueError: the channel is closed. RuntimeError: gRPC gets no thread.
            except (grpc.RpcError, ValueError, RuntimeError) as error:
                self._excuse(member, error)
            if self._closed.is_set() or self._lost:
                break
            if self._at is member:  # otherwise, the caller that ended the stream has already called `_leave`
                self._leave(member)
            self._closed.wait(self._pause_s * random.uniform(1.0, 1.5))
            self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])
        with self._lock:
            self._end_stream()

    def _excuse(self, member: Member, error: Exception) -> None:
        with suppress(grpc.RpcError, ValueError):
            if isinstance(error, grpc.RpcError):
                member.renewed(error, _RENEWAL_S)

    def _read(self, member: Member) -> None:
        """Read changes until the stream ends. Raises grpc.RpcError, ValueError, RuntimeError."""
        member.introduce(_RENEWAL_S)
        stream = self._open(member)
        for answer in stream or ():
            if answer.compact_revision:
                self._forgotten("etcd has compacted changes that the watch has not received")
                break
            if answer.canceled:
                member.renew(_RENEWAL_S)  # etcd gives no other sign if it does not know our token
                break
            if answer.created and answer.header.revision < self._seen:
                self._forgotten("etcd has begun anew")
                break
            changes = [change for change in map(change_of, answer.events) if change.revision > self._seen]
            if changes:
                self._pause_s = _PAUSES_S[0]
                self._seen = changes[-1].revision
                with self._lock:
                    self._came += changes
                    self._wake()

    def _open(self, member: Member) -> Any:
        with self._lock:
            if self._closed.is_set():
                return None
            self._end_stream()
            rpc, self._requests = method("Watch", "Watch"), queue.SimpleQueue()
            wanted = {**interval_fields(self.prefix), "start_revision": self._seen + 1}
            self._requests.put(rpc.request(create_request=wanted))
            self._at = member
            self._stream = member.stream(rpc, iter(self._requests.get, None), _WANTS_LEADER)
            return self._stream

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._requests.put(None)  # ends gRPC's own thread, which waits for the next request
            self._stream.cancel()
            self._stream, self._at = None, None

    def _forgotten(self, why: str) -> None:
        self._lost = f"{why}: what lies under {self.prefix} is listed anew"
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if self._event >= 0:
            os.eventfd_write(self._event, 1)
