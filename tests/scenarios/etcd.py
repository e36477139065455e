"""The store of the simulated cluster, as each of its clients meets it: away, silent about a write that it made, or late with one.

`MemoryStore` keeps the data. What was accepted is written down with who led at that moment, for whoever checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.protocol import Compare, CreatedAt, Entry, LeaseGone, Operation, Put

from ..memory_store import MemoryStore

NEVER = -1.0


@dataclass(frozen=True)
class Accepted:
    """A write of generation record or incidents that has been made."""

    by: str
    leader: Entry | None
    """When it was made."""
    puts: tuple[Put, ...]
    guarded: bool
    """A controller's."""


class Etcd:
    def __init__(self, inner: MemoryStore, keys: Keys, heard: Callable[[Accepted], None]) -> None:
        """heard: hears of each write of generation record or incidents as it is made."""
        self.inner, self._keys, self._heard = inner, keys, heard
        self.down = False
        self.unanswered: deque[float] = deque()
        """The next writes get no answer: each is made so many seconds later, 0: at once, or NEVER."""
        self.amid: Callable[[], None] | None = None
        """What happens between a controller's reading and its next writing."""
        self._late: list[tuple[float, str, Sequence[Compare], Sequence[Operation]]] = []

    def __getattr__(self, name: str) -> Any:
        if self.down:
            raise StoreUnavailable("etcd does not answer")
        return getattr(self.inner, name)

    def write(self, by: str, compares: Sequence[Compare], operations: Sequence[Operation], now_s: float) -> bool:
        if self.down:
            raise StoreUnavailable("etcd does not answer")
        if self.amid and compares and any(isinstance(o, Put) and self._is_decision(o) for o in operations):
            amid, self.amid = self.amid, None
            amid()
        if not self.unanswered:
            return self._make(by, compares, operations)
        after_s = self.unanswered.popleft()
        if after_s == 0.0:
            self._make(by, compares, operations)
        elif after_s != NEVER:
            self._late.append((now_s + after_s, by, compares, operations))
        raise StoreUnavailable("etcd did not answer in time")

    def settle(self, now_s: float) -> None:
        """What was under way for so long is made now."""
        due = [late for late in self._late if late[0] <= now_s]
        self._late = [late for late in self._late if late[0] > now_s]
        for _, by, compares, operations in due:
            with suppress(LeaseGone):
                self._make(by, compares, operations)

    def _is_decision(self, put: Put) -> bool:
        return put.key == self._keys.generation or put.key.startswith(self._keys.incidents)

    def _make(self, by: str, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        leader = self.inner.get(self._keys.leader)
        made = self.inner.transact(compares, operations)
        told = tuple(o for o in operations if isinstance(o, Put) and self._is_decision(o))
        if made and told:
            led = any(isinstance(compare, CreatedAt) and compare.key == self._keys.leader for compare in compares)
            self._heard(Accepted(by, leader, told, led))
        return made


class Client:
    """One client's connection."""

    def __init__(self, etcd: Etcd, name: str, now: Callable[[], float], cut_off: Callable[[], bool]) -> None:
        """cut_off: whether the network to the store is gone for it."""
        self._etcd, self._name, self._now, self._cut_off = etcd, name, now, cut_off

    def __getattr__(self, name: str) -> Any:
        if self._cut_off():
            raise StoreUnavailable("etcd cannot be reached")
        return getattr(self._etcd, name)

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        self.transact([], [Put(key, value, lease)])

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        if self._cut_off():
            raise StoreUnavailable("etcd cannot be reached")
        return self._etcd.write(self._name, compares, operations, self._now())
