"""This agent's lease: granted, kept alive, and granted anew when etcd has lost it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from ...resilience.errors import StoreUnavailable, UsageError
from ...resilience.model.node import NodeRecord
from ...resilience.store.codec import dumps, loads
from ...resilience.store.protocol import Delete, KeyAbsent, LeaseGone, ModifiedAt, Put
from ...resilience.store.seat import Seat
from ...resilience.store.write_rates import jittered

STRANGE = 1.5
"""So many lives of a lease an agent of another machine may have this one's name until it is there: its lease may be the last one's."""
STRANGE_S = 1.0
"""Between two looks at it."""


class Heartbeat:
    def __init__(
        self,
        seat: Seat,
        record: NodeRecord,
        ttl_s: int,
        draw: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """draw: a number from [0, 1), anew each time, so that not all agents speak at once."""
        self._draw = draw
        self._store, self._keys, self._node, self._record = seat.store, seat.keys, seat.node, record
        self.ttl_s = ttl_s
        self._due_s = 0.0
        self.until_s = 0.0
        """The lease lives at least so long, on the monotonic clock: counted from before the last renewal was sent."""
        self.lease = 0
        self._unanswered = 0
        """A lease that this agent's record was put on, with no answer: that may still come to pass, over a later record."""
        self._strange_s = math.inf
        """Since when another machine's agent has this one's name."""

    @property
    def instance(self) -> str:
        """Of the agent that it stands for."""
        return self._record.instance

    def beat(self, now_s: float) -> None:
        """Renew the lease when a third of its life is over; register (again) when there is none. now_s: monotonic. Raises
        StoreUnavailable, and UsageError where another machine's agent has come to go by this name."""
        if now_s < self._due_s:
            if self._strange_s < math.inf:
                raise LeaseGone("another agent goes by this one's name")
            return
        left_s = self._store.keepalive(self.lease) if self.lease else 0.0
        if left_s <= 0:
            self._register(now_s)
        self.until_s = now_s + (left_s or self.ttl_s)
        self._due_s = now_s + jittered(self.ttl_s / 3, self._draw())

    def _register(self, now_s: float) -> None:
        key = self._keys.node(self._node)
        before = self._store.get(key)
        there = loads(NodeRecord, before.value) if before else self._record
        if there.home == self._record.home:
            self._strange_s = math.inf
        else:
            self._strange_s = min(self._strange_s, now_s)
            # It may be a backup's that etcd has been restored from: its lease runs out.
            if now_s - self._strange_s <= STRANGE * self.ttl_s:
                self._due_s = now_s + STRANGE_S
                raise LeaseGone(f"another agent, on {there.host}, goes by the name {self._node}")
            raise UsageError(
                f"an agent on {there.host} goes by the name {self._node} as well; this one leaves, and ends its ranks. Give each node a "
                "name of its own with --node"
            )
        if before is not None:
            # The holder of this node's run directory lock is this process: whoever wrote that record is dead, and its lease, which also
            # holds the leadership if it led, has no reason to live on.
            self._store.revoke(before.lease)
        if self._unanswered:
            self._store.revoke(self._unanswered)
        self._unanswered = self._store.grant(self.ttl_s)
        alive = Delete(self._keys.death(self.instance))  # whoever says that this agent is dead has been misled
        mirrored = before is not None and not before.lease  # by a copy of etcd's data, which leases are not part of
        still = ModifiedAt(key, before.mod_revision) if before and mirrored else KeyAbsent(key)
        if not self._store.transact([still], [Put(key, dumps(self._record), self._unanswered), alive]):
            raise LeaseGone(f"another agent has just come to go by the name {self._node}")
        # Not before: a lease without a record would be kept alive, and nobody would know of this agent.
        self.lease, self._unanswered = self._unanswered, 0

    def confirm(self) -> None:
        """See whether the record is this agent's: what one before it had written may have come to pass late. Raises StoreUnavailable."""
        entry = self._store.get(self._keys.node(self._node))
        if self.lease and (entry is None or entry.lease != self.lease):
            self.lost()

    def lost(self) -> None:
        """The store says that the lease is gone: register anew at the next beat."""
        self.lease, self._due_s = 0, self._due_s if self._strange_s < math.inf else 0.0

    def end(self) -> None:
        """Leave: the node's record and the leadership vanish at once."""
        if self.lease:
            with suppress(StoreUnavailable):  # it runs out by itself
                self._store.revoke(self.lease)
            self.lease = 0
