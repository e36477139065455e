"""A store inside one process, for tests. The store obeys the rules of `resilience/store/protocol.py`, and its caller moves its clock."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import WeakSet

from mt_resilient.resilience.store.protocol import (
    Change,
    Compare,
    CreatedAt,
    Delete,
    Entry,
    HistoryGone,
    KeyAbsent,
    LeaseGone,
    Listing,
    ModifiedAt,
    Operation,
    Put,
    UnchangedSince,
    check_operations,
)

_KEPT = 1000
"""Number of past revisions from which a watch can still start. The agent's own etcd keeps as many."""


@dataclass
class _Lease:
    ttl_s: int
    ends_s: float


class MemoryWatch:
    """`Watch` on a MemoryStore. Every change arrives as soon as it is made, so the watch never waits for a write or doubts it."""

    owed = 0
    doubtful = False

    def __init__(self, store: MemoryStore, prefix: str) -> None:
        self._store, self.prefix = store, prefix
        self.came: list[Change] = []
        self.lost = False
        self._event = -1

    def fileno(self) -> int:
        if self._event < 0:  # made on first use: the simulator has 10,000 watches and polls none of them
            self._event = os.eventfd(1 if self.came or self.lost else 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._event

    def hear(self, changes: Sequence[Change], lost: bool = False) -> None:
        self.came += [change for change in changes if change.key.startswith(self.prefix)]
        self.lost = self.lost or lost
        if self._event >= 0 and (self.came or lost):
            os.eventfd_write(self._event, 1)

    def take(self) -> list[Change]:
        return self._store.taken(self)

    def close(self) -> None:
        self._store.forget(self)
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

    def emptied(self) -> list[Change]:
        if self._event >= 0 and not self.lost:
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
        came, self.came = self.came, []
        return came


class MemoryStore:
    """A store inside one process, whose leases follow `now`, a clock in seconds that the caller moves."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._granted = 0
        self._revision = 1
        self._history: deque[tuple[int, list[Change]]] = deque()
        self._watches: dict[str, WeakSet[MemoryWatch]] = {}
        # No lease ends before this time. So a simulated cluster of 10,000 nodes need not check all leases on every call.
        self._next_end_s = math.inf

    def range(self, prefix: str, limit: int = 0) -> dict[str, Entry]:
        return dict([*self.listing(prefix).entries.items()][: limit or None])

    def listing(self, prefix: str) -> Listing:
        with self._settled():
            keys = sorted(key for key in self._entries if key.startswith(prefix))
            return Listing(revision=self._revision, entries={key: self._entries[key] for key in keys})

    def watch(self, prefix: str, since: int) -> MemoryWatch:
        watch = MemoryWatch(self, prefix)
        with self._settled():
            oldest = self._history[0][0] if self._history else self._revision + 1
            watch.lost = since + 1 < oldest or since > self._revision
            for revision, changes in self._history:
                if revision > since and not watch.lost:
                    watch.hear(changes)
            self._watches.setdefault(prefix, WeakSet()).add(watch)
        return watch

    def taken(self, watch: MemoryWatch) -> list[Change]:
        """Return the changes that `watch` has not returned yet. Raises HistoryGone."""
        with self._settled():
            came = watch.emptied()
        if watch.lost and not came:
            raise HistoryGone(f"the changes under {watch.prefix} that were asked for are forgotten; list it anew")
        return came

    def forget(self, watch: MemoryWatch) -> None:
        with self._lock:
            self._watches.get(watch.prefix, WeakSet()).discard(watch)

    def compact(self, revision: int) -> None:
        """Discard the changes up to `revision`, as etcd does from time to time."""
        with self._lock:
            while self._history and self._history[0][0] <= revision:
                self._history.popleft()

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
        check_operations(operations)
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

    def lose(self, backup: Iterable[Entry] = ()) -> None:
        """Lose all data, like an etcd that restarts on an empty disk or from a backup. Entries on leases are gone, because their leases
        have expired since."""
        with self._lock:
            self._entries = {entry.key: entry for entry in backup if not entry.lease}
            self._revision = max((entry.mod_revision for entry in self._entries.values()), default=1)
            self._leases.clear()
            self._history.clear()
            for watch in [watch for watches in self._watches.values() for watch in watches]:
                watch.hear((), lost=True)
            self._watches.clear()

    def close(self) -> None:
        """Do nothing, because other users in this process still use the store."""

    @contextmanager
    def _settled(self) -> Iterator[float]:
        """Hold the lock, end the leases that have expired, and yield the time."""
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
        entry = None if isinstance(compare, UnchangedSince) else self._entries.get(compare.key)
        match compare:
            case KeyAbsent():
                return entry is None
            case CreatedAt(_, revision):
                return (entry.create_revision if entry else 0) == revision
            case ModifiedAt(_, revision):
                return (entry.mod_revision if entry else 0) == revision
            case UnchangedSince(prefix, revision):
                return all(e.mod_revision <= revision for k, e in self._entries.items() if k.startswith(prefix))

    def _apply(self, operations: Sequence[Operation]) -> int:
        """Apply the operations in one new revision. Return how many of them changed something."""
        revision, changes = self._revision + 1, []
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
            changes.append(Change(operation.key, revision, self._entries.get(operation.key)))
        if changes:
            self._revision = revision
            self._tell(revision, changes)
        return len(changes)

    def _tell(self, revision: int, changes: list[Change]) -> None:
        self._history.append((revision, changes))
        if len(self._history) > _KEPT:
            self._history.popleft()
        for prefix, watches in self._watches.items():
            if any(change.key.startswith(prefix) for change in changes):
                for watch in watches:
                    watch.hear(changes)
