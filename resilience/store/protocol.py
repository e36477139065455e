"""The store through which agents and the controller agree: a small, revisioned key-value space with leases.

Data flow: agents put their node's facts, the controller swaps the generation record, and each agent watches what concerns it
(`watch_cache.py`). The rest of the program sees `Store`. `memory.MemoryStore` serves the simulator and the tests, `client.EtcdStore`
a cluster, and tests/contract_store.py holds both to the same behaviour.

The rules are etcd's. Every accepted write raises one revision counter for the whole store. An entry remembers the revision that
created it and the one that last changed it. An entry bound to a lease is deleted when that lease ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import InternalError, StoreUnavailable


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int
    """The lease to which the entry is bound; 0: none."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Everything under a prefix, at one revision of the store."""

    revision: int
    entries: dict[str, Entry]
    """Ordered by key."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key was written, or deleted, at `revision`."""

    key: str
    revision: int
    entry: Entry | None
    """None: deleted."""


@dataclass(frozen=True)
class KeyAbsent:
    """Holds if `key` was never written, or was deleted since."""

    key: str


@dataclass(frozen=True)
class CreatedAt:
    """Holds while `key` is the entry that `revision` created: overwriting keeps it true, deleting and creating anew does not."""

    key: str
    revision: int


@dataclass(frozen=True)
class ModifiedAt:
    """Holds while `key` has not been written since `revision`: compare-and-swap."""

    key: str
    revision: int


@dataclass(frozen=True)
class UnchangedSince:
    """Holds while every entry whose key starts with `prefix` was last written at `revision` or before. (Deleting does not count.)"""

    prefix: str
    revision: int


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    key: str


Compare = KeyAbsent | CreatedAt | ModifiedAt | UnchangedSince
Operation = Put | Delete


class LeaseGone(StoreUnavailable):
    """A put named a lease that has ended. The put was not made: grant a new lease first."""


class HistoryGone(StoreUnavailable):
    """The store no longer has the changes from which a watch must go on. List again, and watch from there."""


class Watch(Protocol):
    """The changes under one prefix from a revision on: in order, and each exactly once, until `HistoryGone`.

    When a member or the connection fails, it goes on by itself from the last change that has arrived. Only one thread takes the changes."""

    owed: int
    """Revision of the newest write under the prefix that was made through the same `Store`: `take` has returned it, or will."""
    doubtful: bool
    """Since this was last set to False, a write through the same `Store` got no answer. It may have been made, or still be made."""

    def fileno(self) -> int:
        """Becomes readable when `take` has something, for poll."""
        ...

    def take(self) -> list[Change]:
        """Return the changes since the last call; all changes of one revision come together. Raises HistoryGone, then at each call."""
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """A store that threads may share. Every method raises `StoreUnavailable` when the store does not answer in time. A write may then
    have been made all the same, so read again before deciding again. No method retries: level-triggered loops do."""

    def range(self, prefix: str, limit: int = 0) -> dict[str, Entry]:
        """Return every entry whose key starts with `prefix`, or the first `limit` of them: ordered by key, and all of one revision."""
        ...

    def listing(self, prefix: str) -> Listing:
        """Return the same entries with their revision. They include every write for which any client has got an answer."""
        ...

    def watch(self, prefix: str, since: int) -> Watch:
        """Return a watch of the changes under `prefix` after revision `since`. Never raises: the watch tries again, or `take` raises."""
        ...

    def get(self, key: str) -> Entry | None: ...

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Write `key`, bound to `lease` alone from now on. Raises LeaseGone."""
        ...

    def delete(self, key: str) -> bool:
        """Delete `key`. Return whether it was there."""
        ...

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with `prefix`. Return how many there were."""
        ...

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        """Make all `operations` in one revision if all `compares` hold, else none and return False. Raises LeaseGone.

        Only one operation may name a key, and there are `MOST_OPERATIONS` at the most.
        """
        ...

    def grant(self, ttl_s: int) -> int:
        """Return a new lease that ends `ttl_s` seconds after its last keepalive. (etcd lengthens very short ones to its own minimum.)"""
        ...

    def keepalive(self, lease: int) -> float:
        """Renew `lease`. Return the seconds that it has left now; 0.0: it is gone for good."""
        ...

    def revoke(self, lease: int) -> None:
        """End `lease` now and delete what is bound to it; nothing happens if it has ended already."""
        ...

    def close(self) -> None: ...


def first_put(store: Store, key: str, value: bytes, lease: int = 0) -> Entry:
    """Put `value` at `key` unless an entry is there already. Return the entry at `key`. Raises StoreUnavailable, LeaseGone."""
    while (entry := store.get(key)) is None:
        store.transact([KeyAbsent(key)], [Put(key, value, lease)])
    return entry


MOST_OPERATIONS = 100
"""In one transaction. etcd's own limit is 128 by default."""


def check_operations(operations: Sequence[Operation]) -> None:
    """Raise InternalError if etcd would refuse the transaction."""
    if len(operations) > MOST_OPERATIONS:
        raise InternalError(f"a transaction has {len(operations)} operations; {MOST_OPERATIONS} are the most")
    if len({operation.key for operation in operations}) < len(operations):
        raise InternalError(f"a transaction names a key twice: {operations}")
