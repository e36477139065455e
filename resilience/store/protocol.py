"""The interface of the store through which agents and the controller agree: a small key-value store with revisions and leases.

Data flow: agents write facts about their nodes, the controller replaces the generation record, and each agent watches the keys that it
needs (`watch_cache.py`). All other code uses `Store`. `etcd/client.py` implements it with etcd, and tests/memory_store.py in memory.
tests/contract_store.py checks that both behave alike.

The rules are etcd's. Every accepted write raises one revision counter for the whole store. An entry remembers the revision that created it
and the revision that last changed it. An entry bound to a lease is deleted when that lease ends.
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
    """All entries under a prefix, at one revision of the store."""

    revision: int
    entries: dict[str, Entry]
    """Sorted by key."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a key: it was written, or deleted, at `revision`."""

    key: str
    revision: int
    entry: Entry | None
    """The new entry; None: the key was deleted."""


@dataclass(frozen=True)
class KeyAbsent:
    """Holds if `key` does not exist: it was never written, or was deleted since."""

    key: str


@dataclass(frozen=True)
class CreatedAt:
    """Holds while `key` is the entry that `revision` created. The compare still holds after `key` is overwritten, but not after `key` is
    deleted and created again."""

    key: str
    revision: int


@dataclass(frozen=True)
class ModifiedAt:
    """Holds while `key` has not been written since `revision`: compare-and-swap."""

    key: str
    revision: int


@dataclass(frozen=True)
class UnchangedSince:
    """Holds while every entry whose key starts with `prefix` was last written at `revision` or before. (Deletions do not count.)"""

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
    """A put named a lease that has ended, so the store did not write the entry. Grant a new lease first."""


class HistoryGone(StoreUnavailable):
    """The store no longer has all changes after the last one that the watch has returned. List the prefix again, and watch from the
    listing's revision."""


class Watch(Protocol):
    """The changes under one prefix after a revision: sorted by revision, and each exactly once, until `HistoryGone`.

    When a member or the connection fails, the watch continues from the last change that has arrived. Only one thread may take the
    changes."""

    owed: int
    """Revision of the newest write under the prefix that was made through the same `Store`. `take` has returned that write, or will return
    it."""
    doubtful: bool
    """Since this was last set to False, a write through the same `Store` got no answer. The store may have made it, or may still make
    it."""

    def fileno(self) -> int:
        """Return a descriptor, for poll, that becomes readable when `take` has changes to return."""
        ...

    def take(self) -> list[Change]:
        """Return the changes since the last call; the changes of one revision come together. Raises HistoryGone, and then again at each
        call."""
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """A store that several threads may share. Every method raises `StoreUnavailable` when the store does not answer in time. A write may
    have been made nevertheless, so read again before you decide again. No method retries, because level-triggered loops do."""

    def range(self, prefix: str, limit: int = 0) -> dict[str, Entry]:
        """Return the entries whose key starts with `prefix`, sorted by key, at one revision: all, or the first `limit` if that is not 0."""
        ...

    def listing(self, prefix: str) -> Listing:
        """Return all entries under `prefix` and their revision. The entries include every write that any client knows to have been made."""
        ...

    def watch(self, prefix: str, since: int) -> Watch:
        """Return a watch of the changes under `prefix` after revision `since`. Never raises: the watch retries, or `take` raises."""
        ...

    def get(self, key: str) -> Entry | None: ...

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Write `key` and bind it to `lease` instead of any earlier lease. Raises LeaseGone."""
        ...

    def delete(self, key: str) -> bool:
        """Delete `key`. Return whether it existed."""
        ...

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with `prefix`. Return the number of deleted keys."""
        ...

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        """If all `compares` hold, make all `operations` in one revision and return True. If a compare does not hold, make no operation and
        return False. Raises LeaseGone.

        Each key may be in only one operation of a transaction. At most `MOST_OPERATIONS` operations are allowed.
        """
        ...

    def grant(self, ttl_s: int) -> int:
        """Return a new lease, which ends `ttl_s` seconds after its last keepalive. (etcd lengthens very short leases to its own
        minimum.)"""
        ...

    def keepalive(self, lease: int) -> float:
        """Renew `lease`. Return the seconds that the lease now has left; 0.0: it has ended."""
        ...

    def revoke(self, lease: int) -> None:
        """End `lease` now and delete the entries bound to it. If the lease has ended already, do nothing."""
        ...

    def close(self) -> None: ...


def first_put(store: Store, key: str, value: bytes, lease: int = 0) -> Entry:
    """Put `value` at `key` unless `key` exists. Return the entry that is then at `key`. Raises StoreUnavailable, LeaseGone."""
    while (entry := store.get(key)) is None:
        store.transact([KeyAbsent(key)], [Put(key, value, lease)])
    return entry


MOST_OPERATIONS = 100
"""The most operations in one transaction. etcd's own limit is 128 by default."""


def check_operations(operations: Sequence[Operation]) -> None:
    """Raise InternalError if etcd would refuse the transaction."""
    if len(operations) > MOST_OPERATIONS:
        raise InternalError(f"a transaction has {len(operations)} operations; {MOST_OPERATIONS} are the most")
    if len({operation.key for operation in operations}) < len(operations):
        raise InternalError(f"a transaction names a key twice: {operations}")
