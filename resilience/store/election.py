"""The election of the leader: the leader is the agent whose lease holds the leader key.

Data flow: the agent's tick → `campaign(lease)` → the fencing token, while this agent leads. The token is the revision that created the
leader key. Each of the controller's writes has `guard()` as a compare. So the store itself refuses all writes of a deposed leader, however
long that leader was stopped.

The election is level-triggered: the entry always shows whether it names this agent and its lease. So if the answer to a campaign is lost,
the agent finds on the next tick that it has won. An entry by an earlier process of this agent with the same name does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InternalError
from .protocol import CreatedAt, Entry, KeyAbsent, LeaseGone, Put, Store


class Election:
    def __init__(self, store: Store, key: str, identity: str) -> None:
        self._store = store
        self._key = key
        self._identity = identity
        self._guard: CreatedAt | None = None

    def campaign(self, lease: int) -> int | None:
        """Try to become the leader if the job has none. Return the fencing token if this agent leads now, else None. Raises
        StoreUnavailable."""
        entry = self._store.get(self._key)
        if entry is None:
            try:
                self._store.transact([KeyAbsent(self._key)], [Put(self._key, self._identity.encode(), lease)])
            except LeaseGone:
                return None
            entry = self._store.get(self._key)
        return entry.create_revision if entry is not None and self.won(entry, lease) else None

    def won(self, entry: Entry, lease: int) -> bool:
        """Whether `entry`, which must be the leader key's, names this agent. If so, `guard` returns the compare for this leadership from
        now on."""
        ours = entry.lease == lease and entry.value == self._identity.encode()
        if ours:
            self._guard = CreatedAt(self._key, entry.create_revision)
        return ours

    def place(self, members: Sequence[str]) -> int:
        """Return how many agents campaign before this agent, if `members` (identities) campaign in their sequence. Other agents come
        last."""
        return members.index(self._identity) if self._identity in members else len(members)

    def guard(self) -> CreatedAt:
        """Return the compare that holds only while this agent keeps the leadership that it won last. Raises InternalError if it never
        won."""
        if self._guard is None:
            raise InternalError(f"{self._identity} asked to write as the controller without having been elected")
        return self._guard
