"""The controller: one tick looks at the whole World, asks `decide`, and writes its answer under the leader's fencing token.

Every agent has one. All of them watch the helm: who leads, and the record that everybody obeys. The one that leads watches the rest too.
It holds nothing that it cannot read again, so that another agent's controller can go on in the middle of a recovery. A picture may be old:
so a decision is written only if record, incidents and answers are those that it was made upon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice

from .decide.decide import decide
from .decide.policy import Policy
from .model.cluster_state import World
from .model.generation import Decision, GenerationRecord
from .model.node import NodeStatus
from .model.state_machine import Phase
from .model.types import NodeId
from .report import status_view
from .store.codec import dumps
from .store.election import Election
from .store.keys import Keys
from .store.parsed_cache import Values
from .store.protocol import MOST_OPERATIONS, KeyAbsent, ModifiedAt, Put, Store, UnchangedSince
from .store.state_reader import world_of
from .store.watch_cache import Mirror
from .store.write_rates import campaign_after_s

RETURN_S = 3.0
"""When this agent has lost its lease, others have too: etcd was away or has lost its data, or everybody slept. So long they may
take to be back in it, or for the life of a lease: so long who does not know of it lets its ranks train (`agent/peers/fencing.py`)."""


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
        self._read_anew()
        self._lease, self._anew_s = 0, -math.inf
        self.awaits = ""
        """Where this agent leads a job that has not begun: for which nodes it waits, a sentence."""
        self._met: dict[NodeId, tuple[str, float]] = {}
        """Agents, and when this one has first seen them."""
        self._vacant_s: float | None = None
        """Wall-clock time since when nobody has led, as far as this agent has heard."""

    def record(self) -> GenerationRecord | None:
        """The record to obey, as far as this agent has heard. Raises StoreUnavailable."""
        self._helm.entries()
        self._heard.update(self._helm.changed())
        return self._heard.one(self._keys.generation, GenerationRecord)

    def fds(self) -> tuple[int, ...]:
        """Become readable when something has changed that concerns this agent: its orders; where it leads, anything. They may be others
        after each tick."""
        return (*self._helm.fds(), *self._whole.fds())

    def hear(self, now: float) -> bool:
        """Where this agent leads, read what has come, ahead of the next tick: whether anything has. now: wall-clock time. Raises
        StoreUnavailable."""
        if not self._whole.fds():
            return False
        self._whole.entries()
        return self._take_in(now)

    def tick(self, lease: int, now: float) -> bool:
        """One level-triggered round at wall-clock time `now`, if this agent leads. True when something was written: then another
        round may find more to do at once. Raises StoreUnavailable."""
        if lease != self._lease:
            self._anew_s, self._lease = now if self._lease else -math.inf, lease
        if not self._leads(lease, now):
            self._whole.close()
            return False
        entries = self._whole.entries()
        seen = self._whole.revision
        self._take_in(now)
        world = self._with_times(world_of(self._keys, self._values), now)
        if self._others_may_be_back(world, now):
            return False
        decision = _a_part(decide(world, now, self._policy))
        puts = [Put(self._keys.incident(i.id), dumps(i)) for i in decision.incidents]
        puts += [Put(self._keys.answer(ident), dumps(answer)) for ident, answer in decision.answers.items()]
        puts += [Put(self._keys.quarantine(node), dumps(entry)) for node, entry in decision.quarantine.items()]
        key = self._keys.generation
        if decision.record:
            puts.append(Put(key, dumps(decision.record)))
        self.awaits = status_view.awaited(world, now, self._policy.nodes.join_s) if not puts else ""
        if not puts:
            return False
        unchanged = ModifiedAt(key, entries[key].mod_revision) if key in entries else KeyAbsent(key)
        told = [UnchangedSince(prefix, seen) for prefix in (self._keys.incidents, self._keys.answers)]
        accepted = self._store.transact([self._election.guard(), unchanged, *told], puts)
        if accepted:
            self._told(decision)
            if decision.record and decision.record.phase is Phase.RUN:
                self._forget(entries, decision.record)
        else:
            self._helm.doubt()
            self._whole.doubt()
        return accepted

    def _others_may_be_back(self, world: World, now: float) -> bool:
        """Whether members are missing that may have lost their leases as this agent has."""
        spec, record = world.spec, world.record
        if spec is None or record is None or record.number <= spec.given_up:
            return False
        missing = record.members.keys() - world.nodes.keys()
        return bool(missing) and 0 <= now - self._anew_s < max(RETURN_S, self._policy.lease_s)

    def forget(self) -> None:
        """All that was heard: it is read anew. After an error, nobody knows what of it was taken in."""
        self.close()
        self._read_anew()

    def _read_anew(self) -> None:
        self._helm = Mirror(self._store, self._keys.helm)
        self._whole = Mirror(self._store, self._keys.root)
        self._heard, self._values = Values(), Values()
        self._heard_s: dict[NodeId, float] = {}
        """When this agent has heard each node's last word; of one that was there before: when that was said, by the node's clock."""

    def close(self) -> None:
        self._helm.close()
        self._whole.close()

    def _forget(self, entries: Iterable[str], record: GenerationRecord) -> None:
        """Acknowledgements of earlier generations; now, for while they gather all wait for the store. Raises StoreUnavailable."""
        acks = self._keys.acks
        known = {key.removeprefix(acks).partition("/")[0] for key in entries if key.startswith(acks)}
        for number in known - {str(record.number)}:
            self._store.delete_prefix(f"{acks}{number}/")

    def _take_in(self, now: float) -> bool:
        changed, statuses = self._whole.changed(), self._keys.statuses
        self._values.update(changed)
        said = self._values.under(statuses, NodeStatus)
        for node in [NodeId(key.removeprefix(statuses)) for key in changed if key.startswith(statuses)]:
            if node in said:
                self._heard_s[node] = now if node in self._heard_s else min(now, said[node].at_s)
        return bool(changed)

    def _with_times(self, world: World, now: float) -> World:
        """With when the nodes were last heard, and when those were first seen that may become members."""
        apart = world.nodes.keys() - world.record.members.keys() if world.begun and world.record else world.nodes.keys()
        here = {node: world.nodes[node].instance for node in apart}
        met = self._met
        self._met = {
            n: met[n] if n in met and met[n][0] == instance else (instance, now) for n, instance in here.items()
        }
        return replace(world, since_s={node: s for node, (_, s) in self._met.items()}, heard_s=dict(self._heard_s))

    def _leads(self, lease: int, now: float) -> bool:
        entry = self._helm.entries().get(self._keys.leader)
        if entry is not None:
            self._vacant_s = None
            return self._election.won(entry, lease)
        if self._vacant_s is None or now < self._vacant_s:
            self._vacant_s = now
        record = self.record()
        turn_s = campaign_after_s(self._election.place(list(record.members.values()) if record else []))
        return now - self._vacant_s >= turn_s and self._election.campaign(lease) is not None


def _a_part(decision: Decision) -> Decision:
    """As much of it as one transaction holds: first what is told, and only when nothing else is left, the record with its own incident.
    What is left out the next tick decides again."""
    if len(decision.incidents) + len(decision.answers) < MOST_OPERATIONS:
        return decision
    told = decision.incidents[: MOST_OPERATIONS // 2]
    answers = dict(islice(decision.answers.items(), MOST_OPERATIONS // 2))
    return replace(decision, record=None, incidents=told, answers=answers, reason="", said="")
