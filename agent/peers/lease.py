"""This agent's lease in etcd. The agent obtains it, renews it, and obtains a new one when etcd has lost it."""

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
"""How many lease lifetimes this agent waits while another machine's agent has the same node name. The record with this name may belong to a
dead agent whose lease has not expired yet."""
STRANGE_S = 1.0
"""Seconds between two checks of that record."""


class Heartbeat:
    def __init__(
        self,
        seat: Seat,
        record: NodeRecord,
        ttl_s: int,
        draw: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """draw: returns a random number from [0, 1), so that agents do not all renew at the same moment."""
        self._draw = draw
        self._store, self._keys, self._node, self._record = seat.store, seat.keys, seat.node, record
        self.ttl_s = ttl_s
        self._due_s = 0.0
        self.until_s = 0.0
        """The lease is valid at least until this monotonic time, counted from just before the last renewal was sent."""
        self.lease = 0
        self._unanswered = 0
        """The lease of a registration that etcd has not answered. etcd may still execute that write later, and overwrite a newer record."""
        self._strange_s = math.inf
        """Monotonic time since when another machine's agent has the same node name; infinite: no agent has."""

    @property
    def instance(self) -> str:
        """The instance (identity of one agent process) that holds this lease."""
        return self._record.instance

    def beat(self, now_s: float) -> None:
        """Renew the lease after a third of its lifetime. Register the node, again if necessary, if there is no lease. now_s: monotonic.
        Raises StoreUnavailable, and UsageError if another machine's agent has taken this node name."""
        if now_s < self._due_s:
            if self._strange_s < math.inf:
                raise LeaseGone("another agent has this one's name")
            return
        left_s = self._store.keepalive(self.lease) if self.lease else 0.0
        if left_s <= 0:
            self._register(now_s)
        self.until_s = now_s + (left_s or self.ttl_s)
        self._due_s = now_s + jittered(self.ttl_s / 3, self._draw())

    def keep(self, now_s: float) -> None:
        """Renew the lease if that is due, while the agent's loop waits for something else. Leave every other case to `beat`. now_s:
        monotonic."""
        if not self.lease or now_s < self._due_s:
            return
        self._due_s = now_s + self.ttl_s / 3
        with suppress(StoreUnavailable):
            if (left_s := self._store.keepalive(self.lease)) > 0:
                self.until_s = now_s + left_s

    def _register(self, now_s: float) -> None:
        key = self._keys.node(self._node)
        before = self._store.get(key)
        there = loads(NodeRecord, before.value) if before else self._record
        if there.home == self._record.home:
            self._strange_s = math.inf
        else:
            self._strange_s = min(self._strange_s, now_s)
            # The record may come from a backup of etcd's data. Then its lease expires.
            if now_s - self._strange_s <= STRANGE * self.ttl_s:
                self._due_s = now_s + STRANGE_S
                raise LeaseGone(f"another agent, on {there.host}, has the name {self._node}")
            raise UsageError(
                f"an agent on {there.host} has the same name, {self._node}; this agent ends its ranks and exits. Give each node a "
                "name of its own with --node"
            )
        if before is not None:
            # This process holds the lock of the node's run directory, so the agent that wrote that record is dead. Revoke its lease. If
            # that agent led, the leadership ends with the lease.
            self._store.revoke(before.lease)
        if self._unanswered:
            self._store.revoke(self._unanswered)
        self._unanswered = self._store.grant(self.ttl_s)
        alive = Delete(self._keys.death(self.instance))  # delete any report that this agent is dead
        mirrored = before is not None and not before.lease  # a copy of etcd's data contains no leases
        still = ModifiedAt(key, before.mod_revision) if before and mirrored else KeyAbsent(key)
        if not self._store.transact([still], [Put(key, dumps(self._record), self._unanswered), alive]):
            raise LeaseGone(f"another agent has just taken the name {self._node}")
        # Set the lease only now. Otherwise the agent might renew a lease that has no record, and no other agent would know of this node.
        self.lease, self._unanswered = self._unanswered, 0

    def confirm(self) -> None:
        """Check that the node's record belongs to this agent's lease; if not, register anew at the next beat. A late write of an earlier
        agent may have replaced it. Raises StoreUnavailable."""
        entry = self._store.get(self._keys.node(self._node))
        if self.lease and (entry is None or entry.lease != self.lease):
            self.lost()

    def lost(self) -> None:
        """Record that etcd has lost the lease, so that the next beat registers anew."""
        self.lease, self._due_s = 0, self._due_s if self._strange_s < math.inf else 0.0

    def end(self) -> None:
        """Revoke the lease, so that the node's record and the leadership vanish immediately."""
        if self.lease:
            with suppress(StoreUnavailable):  # the lease expires later
                self._store.revoke(self.lease)
            self.lease = 0
