"""The store that agents and the controller agree through: a small, revisioned key-value space with leases.

Data flow: agents put their node's facts, the controller swaps the generation record, everybody ranges over the prefix. `Store` is
what the rest of the program sees; `MemoryStore` here serves the simulator and the tests, `etcd.EtcdStore` a cluster, and
tests/contract_store.py holds both to the same behaviour.

The rules are etcd's: every accepted write raises one revision counter for the whole store, an entry remembers the revision that
created it and the one that last changed it, and an entry bound to a lease is deleted when that lease ends.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from .errors import InternalError, StoreUnavailable


@dataclass(frozen=True, kw_only=True)
class Entry:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int
    """The lease that the entry lives and dies with; 0: none."""


@dataclass(frozen=True)
class KeyAbsent:
    """Holds when nobody has written `key`, or it was deleted since."""

    key: str


@dataclass(frozen=True)
class CreatedAt:
    """Holds while `key` is the entry that `revision` created: overwriting keeps it true, deleting and creating anew does not."""

    key: str
    revision: int


@dataclass(frozen=True)
class ModifiedAt:
    """Holds while nobody has written `key` since `revision`: compare-and-swap."""

    key: str
    revision: int


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    key: str


Compare = KeyAbsent | CreatedAt | ModifiedAt
Operation = Put | Delete


class LeaseGone(StoreUnavailable):
    """A put named a lease that has ended. The put was not made: grant a new lease first."""


class Store(Protocol):
    """Safe to share between threads. Every method raises `StoreUnavailable` when the store does not answer in time; a write may then
    have been made all the same, so read again before deciding again. Nothing retries in here: level-triggered loops do."""

    def range(self, prefix: str) -> dict[str, Entry]:
        """Every entry whose key starts with `prefix`, ordered by key, all of one and the same revision."""
        ...

    def get(self, key: str) -> Entry | None: ...

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Write `key`, bound to `lease` alone from now on. Raises LeaseGone."""
        ...

    def delete(self, key: str) -> bool:
        """Whether there was something to delete."""
        ...

    def delete_prefix(self, prefix: str) -> int:
        """How many entries were deleted."""
        ...

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        """Make all `operations` in one revision if all `compares` hold, else none and return False. Raises LeaseGone.

        A key may be named by one operation only.
        """
        ...

    def grant(self, ttl_s: int) -> int:
        """A new lease that ends `ttl_s` seconds after its last keepalive. (etcd lengthens very short ones to its own minimum.)"""
        ...

    def keepalive(self, lease: int) -> float:
        """Renew `lease`; the seconds it now has left, 0.0 when it is gone for good."""
        ...

    def revoke(self, lease: int) -> None:
        """End `lease` now and delete what is bound to it; nothing happens if it has ended already."""
        ...

    def close(self) -> None: ...


def check_distinct_keys(operations: Sequence[Operation]) -> None:
    """Raises InternalError where etcd would refuse the transaction."""
    if len({operation.key for operation in operations}) < len(operations):
        raise InternalError(f"a transaction names a key twice: {operations}")


@dataclass
class _Lease:
    ttl_s: int
    ends_s: float


class MemoryStore:
    """A store inside one process, whose leases follow `now`, a clock in seconds that the caller moves."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._granted = 0
        self._revision = 1
        # No lease ends before this: spares a simulated cluster of 10,000 nodes a walk over all leases on every call.
        self._next_end_s = math.inf

    def range(self, prefix: str) -> dict[str, Entry]:
        with self._settled():
            return {key: self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)}

    def get(self, key: str) -> Entry | None:
        with self._settled():
            return self._entries.get(key)

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        self.transact([], [Put(key, value, lease)])

    def delete(self, key: str) -> bool:
        with self._settled():
            return self._apply([Delete(key)]) == 1

    def delete_prefix(self, prefix: str) -> int:
        with self._settled():
            return self._apply([Delete(key) for key in self._entries if key.startswith(prefix)])

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        check_distinct_keys(operations)
        with self._settled():
            if not all(self._holds(compare) for compare in compares):
                return False
            for operation in operations:
                if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                    raise LeaseGone(
                        f"lease {operation.lease:x} has ended, {operation.key} was not written; grant a new one"
                    )
            self._apply(operations)
            return True

    def grant(self, ttl_s: int) -> int:
        with self._settled() as now:
            self._granted += 1
            self._leases[self._granted] = _Lease(ttl_s, now + ttl_s)
            self._next_end_s = min(self._next_end_s, now + ttl_s)
            return self._granted

    def keepalive(self, lease: int) -> float:
        with self._settled() as now:
            if lease not in self._leases:
                return 0.0
            held = self._leases[lease]
            held.ends_s = now + held.ttl_s
            return float(held.ttl_s)

    def revoke(self, lease: int) -> None:
        with self._settled():
            self._end(lease)

    def close(self) -> None:
        """Nothing: others in this process go on using the store."""

    @contextmanager
    def _settled(self) -> Iterator[float]:
        """Hold the lock, with the leases ended that are due; yields the time."""
        with self._lock:
            now = self._now()
            if now >= self._next_end_s:
                for lease in [lease for lease, held in self._leases.items() if held.ends_s <= now]:
                    self._end(lease)
                self._next_end_s = min((held.ends_s for held in self._leases.values()), default=math.inf)
            yield now

    def _end(self, lease: int) -> None:
        if self._leases.pop(lease, None):
            self._apply([Delete(key) for key, entry in self._entries.items() if entry.lease == lease])

    def _holds(self, compare: Compare) -> bool:
        entry = self._entries.get(compare.key)
        match compare:
            case KeyAbsent():
                return entry is None
            case CreatedAt(_, revision):
                return (entry.create_revision if entry else 0) == revision
            case ModifiedAt(_, revision):
                return (entry.mod_revision if entry else 0) == revision

    def _apply(self, operations: Sequence[Operation]) -> int:
        """Make the operations in one new revision; how many of them changed something."""
        revision, changed = self._revision + 1, 0
        for operation in operations:
            old = self._entries.get(operation.key)
            match operation:
                case Put(key, value, lease):
                    self._entries[key] = Entry(
                        key=key,
                        value=value,
                        create_revision=old.create_revision if old else revision,
                        mod_revision=revision,
                        lease=lease,
                    )
                case Delete(key):
                    if old is None:
                        continue
                    del self._entries[key]
            changed += 1
        if changed:
            self._revision = revision
        return changed
