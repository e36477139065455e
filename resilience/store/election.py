"""Who runs the controller: the agent whose lease holds the leader key.

Data flow: the agent's tick → `campaign(lease)` → the fencing token, while we lead. The token is the revision that created the leader
key; each of the controller's writes carries `guard()` as a compare, so that whatever a deposed leader still sends is refused
by the store itself, however long it was stopped.

Level-triggered: whether we lead is read off the entry each time (it names us, and our lease), so a campaign whose answer was lost
is won on the next tick, and an earlier life of this agent with the same name does not count as us.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InternalError
from .protocol import CreatedAt, Delete, Entry, KeyAbsent, LeaseGone, Put, Store


class Election:
    def __init__(self, store: Store, key: str, identity: str) -> None:
        self._store = store
        self._key = key
        self._identity = identity
        self._guard: CreatedAt | None = None

    def campaign(self, lease: int) -> int | None:
        """Take the leadership if nobody has it. The fencing token if we lead now, else None. Raises StoreUnavailable."""
        entry = self._store.get(self._key)
        if entry is None:
            try:
                self._store.transact([KeyAbsent(self._key)], [Put(self._key, self._identity.encode(), lease)])
            except LeaseGone:
                return None
            entry = self._store.get(self._key)
        return entry.create_revision if entry is not None and self.won(entry, lease) else None

    def won(self, entry: Entry, lease: int) -> bool:
        """Whether `entry`, the leader key's, names us; `guard` is then that of this leadership."""
        ours = self._is_ours(entry, lease)
        if ours:
            self._guard = CreatedAt(self._key, entry.create_revision)
        return ours

    def _is_ours(self, entry: Entry, lease: int) -> bool:
        return entry.lease == lease and entry.value == self._identity.encode()

    def place(self, members: Sequence[str]) -> int:
        """How many go before us where `members`, identities, stand for election in their order; whoever is none stands last."""
        return members.index(self._identity) if self._identity in members else len(members)

    def guard(self) -> CreatedAt:
        """The compare that holds only while the leadership last won lasts. After a loss it goes on existing, and fails."""
        if self._guard is None:
            raise InternalError(f"{self._identity} asked to write as the controller without having been elected")
        return self._guard

    def resign(self) -> None:
        """Give the leadership up, if we have it: the next campaign of anybody wins at once. Raises StoreUnavailable."""
        if self._guard is not None:
            self._store.transact([self._guard], [Delete(self._key)])

    def leader(self) -> str | None:
        entry = self._store.get(self._key)
        return None if entry is None else entry.value.decode()
