"""The controller: one tick reads the whole World, asks `decide`, and writes its answer under the leader's fencing token.

It holds nothing that it cannot read again, so that another agent's controller can go on in the middle of a recovery.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .decision import Decision, Policy, decide
from .election import Election
from .keys import Keys
from .store import KeyAbsent, ModifiedAt, Put, Store
from .wire import dumps
from .world import read_world

RETURN_S = 3.0
"""When this agent has lost its lease, others have too: etcd was away, or everybody slept. So long they may take to be back in it: they try
again in each of their rounds."""


class Controller:
    def __init__(
        self,
        store: Store,
        keys: Keys,
        election: Election,
        policy: Policy,
        told: Callable[[Decision], None],
    ) -> None:
        """`told` hears of every decision that was accepted."""
        self._store = store
        self._keys = keys
        self._election = election
        self._policy = policy
        self._told = told
        self._lease, self._anew_s = 0, -math.inf

    def tick(self, lease: int, now: float) -> bool:
        """One level-triggered round at wall-clock time `now`, if this agent leads. True when something was written: then another
        round may find more to do at once. Raises StoreUnavailable."""
        if lease != self._lease:
            self._anew_s, self._lease = now if self._lease else -math.inf, lease
        if self._election.campaign(lease) is None:
            return False
        entries = self._store.range(self._keys.root)
        world = read_world(self._keys, {k: e.value for k, e in entries.items()})
        if len(world.members) > 1 and 0 <= now - self._anew_s < RETURN_S:
            return False
        decision = decide(world, now, self._policy)
        puts = [Put(self._keys.incident(i.id), dumps(i)) for i in decision.incidents]
        puts += [Put(self._keys.answer(ident), dumps(answer)) for ident, answer in decision.answers.items()]
        key = self._keys.generation
        if decision.record:
            puts.append(Put(key, dumps(decision.record)))
        if not puts:
            return False
        unchanged = ModifiedAt(key, entries[key].mod_revision) if key in entries else KeyAbsent(key)
        accepted = self._store.transact([self._election.guard(), unchanged], puts)
        if accepted:
            self._told(decision)
        return accepted
