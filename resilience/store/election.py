"""The election of the leader: the agent whose lease holds the leader key.

Data flow: the agent's tick → `campaign(lease)` → the fencing token, while this agent leads. The token is the revision that created the
leader key. Each of the controller's writes carries `guard()` as a compare. So the store itself refuses whatever a deposed leader still
sends, however long that leader was stopped.

Level-triggered: the entry shows each time whether it names this agent and its lease. So if the answer to a campaign is lost, the agent
wins on the next tick. An earlier process of this agent with the same name does not count.
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
        """Take the leadership if it is vacant. Return the fencing token if this agent leads now, else None. Raises StoreUnavailable."""
        entry = self._store.get(self._key)
        if entry is None:
            try:
                self._store.transact([KeyAbsent(self._key)], [Put(self._key, self._identity.encode(), lease)])
            except LeaseGone:
                return None
            entry = self._store.get(self._key)
        return entry.create_revision if entry is not None and self.won(entry, lease) else None

    def won(self, entry: Entry, lease: int) -> bool:
        """Whether `entry`, the leader key's, names this agent. If it does, `guard` is then that of this leadership."""
        ours = self._is_ours(entry, lease)
        if ours:
            self._guard = CreatedAt(self._key, entry.create_revision)
        return ours

    def _is_ours(self, entry: Entry, lease: int) -> bool:
        return entry.lease == lease and entry.value == self._identity.encode()

    def place(self, members: Sequence[str]) -> int:
        """Return how many agents campaign before this one, if `members`, identities, do so in their order. Other agents come last."""
        return members.index(self._identity) if self._identity in members else len(members)

    def guard(self) -> CreatedAt:
        """Return the compare that holds only during the leadership that this agent won last. After its loss the compare fails."""
        if self._guard is None:
            raise InternalError(f"{self._identity} asked to write as the controller without having been elected")
        return self._guard

    def resign(self) -> None:
        """Give the leadership up, if this agent has it: any agent's next campaign wins at once. Raises StoreUnavailable."""
        if self._guard is not None:
            self._store.transact([self._guard], [Delete(self._key)])

    def leader(self) -> str | None:
        entry = self._store.get(self._key)
        return None if entry is None else entry.value.decode()
