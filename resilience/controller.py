"""The controller, which makes the job's decisions. At each tick it reads the World (everything in the store), calls `decide`, and writes
the decision under the leader's fencing token.

Every agent has a controller, but only the leader's decides. All controllers watch the helm: the leader's key, and the generation record,
which every agent obeys. The leader's controller also watches all other keys. A controller remembers nothing that it cannot read from the
store again. So another agent's controller can continue in the middle of a recovery. A controller's copy of the store may be stale. So the
store accepts a decision only if the record, the incidents and the answers have not changed since the controller read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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
from .store.protocol import MOST_OPERATIONS, Entry, KeyAbsent, ModifiedAt, Put, Store, UnchangedSince
from .store.state_reader import world_of
from .store.watch_cache import Mirror
from .store.write_rates import campaign_after_s

RETURN_S = 3.0
"""If a leader's lease has expired and the leader has a new lease, it waits this many seconds for missing members, or for a lease's lifetime
if that is longer. The other agents probably lost their leases too, because etcd was down or lost its data, or because all machines were
suspended. An agent that has not noticed the loss of its lease lets its ranks train for one lease's lifetime (`agent/peers/fencing.py`)."""


class Controller:
    def __init__(
        self,
        store: Store,
        keys: Keys,
        election: Election,
        policy: Policy,
        told: Callable[[Decision], None],
    ) -> None:
        """told: called with every decision that the store accepted. If the store accepted one without an answer, `told` is called at a
        later tick."""
        self._store = store
        self._keys = keys
        self._election = election
        self._policy = policy
        self._told = told
        self._unanswered: tuple[Decision, list[Put]] | None = None
        """A decision that the store has not answered."""
        self._read_anew()
        self._lease, self._anew_s = 0, -math.inf
        self.awaits = ""
        """A sentence that names the nodes for which a job waits before it begins. Set while this agent leads."""
        self.world: World | None = None
        """The World that this agent last judged as the leader; None: it does not lead, or cannot judge."""
        self._met: dict[NodeId, tuple[str, float]] = {}
        """For each possible new member: its agent's instance, and when this agent first saw that instance."""
        self._vacant_s: float | None = None
        """Wall-clock time at which this agent first saw that the job has no leader; None: it has one."""

    def record(self) -> GenerationRecord | None:
        """Return the newest generation record that this agent knows. Raises StoreUnavailable."""
        self._helm.entries()
        self._heard.update(self._helm.changed())
        return self._heard.one(self._keys.generation, GenerationRecord)

    def fds(self) -> tuple[int, ...]:
        """Return file descriptors that become readable when the leader's key or the record changes or, if this agent leads, when any key
        changes. Each tick may replace them."""
        return (*self._helm.fds(), *self._whole.fds())

    def hear(self, now: float) -> bool:
        """If this agent leads, read the store's changes before the next tick. Return whether there were changes. now: wall-clock time.
        Raises StoreUnavailable."""
        if not self._whole.fds():
            return False
        self._whole.entries()
        return self._take_in(now)

    def tick(self, lease: int, now: float) -> bool:
        """If this agent leads, make one decision from the present state, at wall-clock time `now`. Return whether the store accepted a
        change: then the caller should call again immediately, because more may be left to decide. Raises StoreUnavailable."""
        if lease != self._lease:
            self._anew_s, self._lease = now if self._lease else -math.inf, lease
        if not self._leads(lease, now):
            self._whole.close()
            self.world = self._unanswered = None
            return False
        entries = self._whole.entries()
        seen = self._whole.revision
        self._tell_unanswered(entries)
        self._take_in(now)
        world = self.world = self._with_times(world_of(self._keys, self._values), now)
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
        self._unanswered = decision, puts
        accepted = self._store.transact([self._election.guard(), unchanged, *told], puts)
        self._unanswered = None
        if accepted:
            self._told(decision)
            if decision.record and decision.record.phase is Phase.RUN:
                self._forget(entries, decision.record)
        else:
            self._helm.doubt()
            self._whole.doubt()
        return accepted

    def _tell_unanswered(self, entries: Mapping[str, Entry]) -> None:
        """Report the decision that the store did not answer, if the store has it."""
        if self._unanswered:
            decision, puts = self._unanswered
            if all(put.key in entries and entries[put.key].value == put.value for put in puts):
                self._unanswered = None
                self._told(decision)

    def _others_may_be_back(self, world: World, now: float) -> bool:
        """Whether members are missing that may soon be back, because they may have lost their leases together with this agent."""
        spec, record = world.spec, world.record
        if spec is None or record is None or record.number <= spec.given_up:
            return False
        missing = record.members.keys() - world.nodes.keys()
        return bool(missing) and 0 <= now - self._anew_s < max(RETURN_S, self._policy.lease_s)

    def doubt(self) -> None:
        """Make the next reading of the record list the store, because changes may not have arrived yet."""
        self._helm.doubt()

    def forget(self) -> None:
        """Discard everything that was read, so that the next tick reads it again. After an error it is unknown which changes were
        applied."""
        self.close()
        self.world = None
        self._read_anew()

    def _read_anew(self) -> None:
        self._helm = Mirror(self._store, self._keys.helm)
        self._whole = Mirror(self._store, self._keys.root)
        self._heard, self._values = Values(), Values()
        self._heard_s: dict[NodeId, float] = {}
        """For each node: the wall-clock time at which this agent read the node's last status. For the node's first status: the time at
        which the node wrote the status, if that is earlier."""

    def close(self) -> None:
        self._helm.close()
        self._whole.close()

    def _forget(self, entries: Iterable[str], record: GenerationRecord) -> None:
        """Delete the acknowledgements of earlier generations. The leader does this only once the ranks run, because in GATHER and LAUNCH
        all nodes wait for the store. Raises StoreUnavailable."""
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
        """Return `world` with two more times: when this agent last heard from each node, and when it first saw each possible new member."""
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
    """Return as much of `decision` as fits into one transaction. Incidents and answers are written first. The record follows when the rest
    fits into the same transaction. The next tick decides the rest again."""
    if len(decision.incidents) + len(decision.answers) < MOST_OPERATIONS:
        return decision
    told = decision.incidents[: MOST_OPERATIONS // 2]
    answers = dict(islice(decision.answers.items(), MOST_OPERATIONS // 2))
    return replace(decision, record=None, incidents=told, answers=answers, reason="", said="")
