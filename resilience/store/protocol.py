"""The store that agents and the controller agree through: a small, revisioned key-value space with leases.

Data flow: agents put their node's facts, the controller swaps the generation record, everybody watches what concerns them
(`watch_cache.py`). `Store` is what the rest of the program sees; `memory.MemoryStore` serves the simulator and the tests,
`client.EtcdStore` a cluster, and tests/contract_store.py holds both to the same behaviour.

The rules are etcd's: every accepted write raises one revision counter for the whole store, an entry remembers the revision that
created it and the one that last changed it, and an entry bound to a lease is deleted when that lease ends.
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
    """The lease that the entry lives and dies with; 0: none."""


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
    """The store no longer has what a watch is to go on from. List anew, and watch from there."""


class Watch(Protocol):
    """What changes under one prefix, from a revision on: nothing twice, nothing left out, in order, until `HistoryGone`.

    It goes on by itself when a member or the connection fails, from the last change that has come. What has come is taken by one thread."""

    owed: int
    """Revision of the newest write under the prefix that was made through the same `Store`: unless it has been given, `take` will have
    it."""
    doubtful: bool
    """A write through the same `Store`, since this was last set to False, has had no answer: it may have been made, or be made yet."""

    def fileno(self) -> int:
        """Becomes readable when `take` has something, for poll."""
        ...

    def take(self) -> list[Change]:
        """What has come since the last time; all changes of one revision come together. Raises HistoryGone, from then on each time."""
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """Safe to share between threads. Every method raises `StoreUnavailable` when the store does not answer in time; a write may then
    have been made all the same, so read again before deciding again. Nothing retries in here: level-triggered loops do."""

    def range(self, prefix: str, limit: int = 0) -> dict[str, Entry]:
        """Every entry whose key starts with `prefix`, ordered by key, all of one and the same revision; or the first `limit` of them."""
        ...

    def listing(self, prefix: str) -> Listing:
        """The same, with the revision: no older than the newest write that anybody has had an answer to."""
        ...

    def watch(self, prefix: str, since: int) -> Watch:
        """What changes under `prefix` after revision `since`. Never raises: what is wrong, `take` says, or it is tried again."""
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

        A key may be named by one operation only, and there are `MOST_OPERATIONS` at the most.
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


def first_put(store: Store, key: str, value: bytes, lease: int = 0) -> Entry:
    """What is at `key`: `value`, unless somebody has put something there before. Raises StoreUnavailable, LeaseGone."""
    while (entry := store.get(key)) is None:
        store.transact([KeyAbsent(key)], [Put(key, value, lease)])
    return entry


MOST_OPERATIONS = 100
"""In one transaction; etcd takes 128 unless it is told otherwise."""


def check_operations(operations: Sequence[Operation]) -> None:
    """Raises InternalError where etcd would refuse the transaction."""
    if len(operations) > MOST_OPERATIONS:
        raise InternalError(f"a transaction has {len(operations)} operations; {MOST_OPERATIONS} are the most")
    if len({operation.key for operation in operations}) < len(operations):
        raise InternalError(f"a transaction names a key twice: {operations}")
